"""A run as pictures: how it learned, and what it confuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kronattn.models.files import Description
from kronattn.present import new_figure
from kronattn.present.charts import tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_confusion", "draw_curves", "draw_pictures"]

_COLUMNS = ("image", "truth", "prediction", "error")
_TRAIN, _VAL = "#a0aec0", "#2b6cb0"


def draw_curves(
    rows: Sequence[Mapping[str, float]], score: str = "top1", label: str = "top-1", title: str = ""
) -> Figure:
    """Loss, score and learning rate against the epoch; ``rows`` are those of ``history.csv``.

    Example:
        >>> rows = [{"epoch": e, "train/loss": 1 / e, "val/loss": 2 / e, "val/top1": 0.5, "lr": 0.1} for e in (1, 2)]
        >>> [axis.get_ylabel() for axis in draw_curves(rows).axes]
        ['loss', 'top-1, %', 'learning rate']
    """
    figure = new_figure("the figure", 12, 3.8)
    loss, accuracy, rate = figure.subplots(1, 3)
    _line(loss, rows, "train/loss", _TRAIN, "training")
    _line(loss, rows, "val/loss", _VAL, "validation")
    _line(accuracy, rows, f"train/{score}", _TRAIN, "training", 100)
    _line(accuracy, rows, f"val/{score}", _VAL, "validation", 100)
    _line(rate, rows, "lr", "#dd6b20", "learning rate")
    for axis, name in ((loss, "loss"), (accuracy, f"{label}, %"), (rate, "learning rate")):
        axis.set(xlabel="epoch", ylabel=name)
        axis.locator_params(axis="x", integer=True)
        tidy(axis)
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
    count = len(classes)
    side = 2.2 + 0.36 * min(count, 40)
    figure = new_figure("the figure", side + 0.8, side)
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
        # A line through one point shows nothing.
        marker = "o" if len(points) == 1 else None
        axis.plot(*zip(*points, strict=True), color=colour, label=label, linewidth=1.8, marker=marker)


def draw_pictures(samples: Sequence[tuple[Tensor, Tensor, Tensor]], description: Description) -> Figure:
    """A row for each sample: the image, the truth, the prediction, and where they differ (red; grey: ignored).

    Args:
        samples: normalised image (3, H, W), true labels and predicted labels (H, W).
        description: of the network, for its colours.

    Example:
        >>> labels = torch.zeros(4, 6, dtype=torch.int64)
        >>> drawn = draw_pictures([(torch.zeros(3, 4, 6), labels, labels)], Description("m", palette=[[0, 0, 255]]))
        >>> [axis.get_title() for axis in drawn.axes]
        ['image', 'truth', 'prediction', 'error']
    """
    figure = new_figure("the figure", 2.9 * len(_COLUMNS), 2.2 * len(samples) + 0.3)
    axes = figure.subplots(len(samples), len(_COLUMNS), squeeze=False)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (description.mean, description.std))
    for row, (image, truth, predicted) in zip(axes, samples, strict=True):
        ignored = truth == description.ignore_index
        error = torch.full((*truth.shape, 3), 255, dtype=torch.uint8)
        error[truth != predicted] = torch.tensor([197, 48, 48], dtype=torch.uint8)
        error[ignored] = 160
        seen = (image * std + mean).clamp(0, 1).permute(1, 2, 0)
        pictures = (seen, _painted(truth, description), _painted(predicted, description), error)
        for axis, picture in zip(row, pictures, strict=True):
            axis.imshow(picture.numpy(), interpolation="nearest")
            axis.set_axis_off()
    for axis, title in zip(axes[0], _COLUMNS, strict=True):
        axis.set_title(title, fontsize=10)
    if description.classes:
        from matplotlib.patches import Patch

        colours = [[value / 255 for value in colour] for colour in description.palette]
        named = zip(description.classes, colours, strict=False)
        handles = [Patch(color=tuple(colour), label=name) for name, colour in named]
        figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return figure


def _painted(labels: Tensor, description: Description) -> Tensor:
    colours = torch.zeros(256, 3, dtype=torch.uint8)
    colours[: len(description.palette)] = torch.tensor(description.palette, dtype=torch.uint8)
    return colours[labels.long()]
