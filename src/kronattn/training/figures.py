"""A run as pictures: how it learned, and what it confuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_confusion", "draw_curves"]

_TRAIN, _VAL = "#a0aec0", "#2b6cb0"


def draw_curves(rows: Sequence[Mapping[str, float]], title: str = "") -> Figure:
    """Loss, accuracy and learning rate against the epoch; ``rows`` are those of ``history.csv``.

    Example:
        >>> rows = [{"epoch": e, "train/loss": 1 / e, "val/loss": 2 / e, "val/top1": 0.5, "lr": 0.1} for e in (1, 2)]
        >>> [axis.get_ylabel() for axis in draw_curves(rows).axes]
        ['loss', 'top-1, %', 'learning rate']
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    loss, accuracy, rate = figure.subplots(1, 3)
    _line(loss, rows, "train/loss", _TRAIN, "training")
    _line(loss, rows, "val/loss", _VAL, "validation")
    _line(accuracy, rows, "train/top1", _TRAIN, "training", 100)
    _line(accuracy, rows, "val/top1", _VAL, "validation", 100)
    _line(rate, rows, "lr", "#dd6b20", "learning rate")
    for axis, name in ((loss, "loss"), (accuracy, "top-1, %"), (rate, "learning rate")):
        axis.set(xlabel="epoch", ylabel=name)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    loss.legend(frameon=False)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def draw_confusion(matrix: Sequence[Sequence[int]], classes: Sequence[str]) -> Figure:
    """How often each class (rows) was called each class (columns).

    Example:
        >>> draw_confusion([[5, 1], [0, 4]], ["cat", "dog"]).axes[0].get_xlabel()
        'predicted'
    """
    from matplotlib.figure import Figure

    count = len(classes)
    side = 2.2 + 0.36 * min(count, 40)
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    axis = figure.subplots()
    shares = [[cell / max(1, sum(row)) for cell in row] for row in matrix]
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if count <= 25:
        for i, row in enumerate(matrix):
            for j, cell in enumerate(row):
                if cell:
                    colour = "white" if shares[i][j] > 0.5 else "#1a202c"
                    axis.text(j, i, str(cell), ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(count), classes, rotation=45, ha="right", fontsize=8)
        axis.set_yticks(range(count), classes, fontsize=8)
    axis.set(xlabel="predicted", ylabel="true")
    return figure


def _line(axis: Any, rows: Sequence[Mapping[str, float]], name: str, colour: str, label: str, times: float = 1) -> None:
    points = [(row["epoch"], row[name] * times) for row in rows if row.get(name) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), color=colour, label=label, linewidth=1.8)
