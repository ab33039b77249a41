"""Table 2 as a picture: cost against the number of positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kronattn.tables.operators.candidates import OPERATORS
from kronattn.tables.operators.measurement import Row
from kronattn.tables.rendering import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_operators"]

_STYLES = {
    "attn": ("#a0aec0", "o"),
    "attn_pool": ("#718096", "s"),
    "attn_fused": ("#2d3748", "D"),
    "kao_kv": ("#2b6cb0", "^"),
    "kao_qkv": ("#dd6b20", "v"),
    "kao_qkv_as_printed": ("#9c4221", "1"),
}


def draw_operators(rows: Sequence[Row]) -> Figure:
    """Draw time, memory and multiply-adds against the number of positions, on logarithmic scales.

    Lines join the square grids; points of their own are grids of other shapes; crosses are the printed values.

    Example:
        >>> from kronattn.tables.operators import Case, measure_operators
        >>> measured = measure_operators([Case((4, 4)), Case((6, 6))], seconds=0.01)
        >>> [axis.get_ylabel() for axis in draw_operators(measured.rows).axes]
        ['milliseconds', 'megabytes', 'multiply-adds']
    """
    require_matplotlib("the operators' figure")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels: list[tuple[str, str, Callable[[Row], float], str]] = [
        ("Time of a call", "milliseconds", lambda row: row.time_ms, "time"),
        ("Peak memory of a call", "megabytes", lambda row: row.memory_bytes / 1e6, "memory"),
        ("Multiply-adds of one sample", "multiply-adds", lambda row: float(row.madd), "madd"),
    ]
    for axis, (title, unit, value, printed) in zip(figure.subplots(1, 3), panels, strict=True):
        for operator in OPERATORS:
            _draw_operator(axis, [row for row in rows if row.operator == operator], value, printed)
        axis.set(xscale="log", yscale="log", xlabel="positions", ylabel=unit)
        axis.set_title(title, fontsize=11)
        _name_grids(axis, rows)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    if any(row.paper for row in rows):
        handles.append(axis.plot([], [], "x", color="#4a5568", alpha=0.6, markersize=6)[0])
        labels.append("as printed")
    if any(not _is_square(row) for row in rows):
        handles.append(axis.plot([], [], "o", color="#4a5568", markersize=7, markerfacecolor="none")[0])
        labels.append("other grids")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _draw_operator(axis: Any, rows: Sequence[Row], value: Callable[[Row], float], printed: str) -> None:
    if not rows:
        return
    colour, marker = _STYLES[rows[0].operator]
    lines = [row for row in rows if _is_square(row)]
    others = [row for row in rows if not _is_square(row)]
    label = OPERATORS[rows[0].operator].label
    axis.plot(
        [row.case.positions for row in lines],
        [value(row) for row in lines],
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=1.8,
        label=label,
    )
    axis.plot(
        [row.case.positions for row in others],
        [value(row) for row in others],
        color=colour,
        marker=marker,
        markersize=7,
        markerfacecolor="none",
        linestyle="none",
    )
    inside = [row for row in lines if row.paper is not None]
    axis.plot(
        [row.case.positions for row in inside],
        [_number((row.paper or {})[printed]) for row in inside],
        "x",
        color=colour,
        alpha=0.6,
        markersize=6,
    )


def _name_grids(axis: Any, rows: Sequence[Row]) -> None:
    sizes = sorted({row.case.grid[0] for row in rows if _is_square(row)})
    axis.set_xticks([size**2 for size in sizes], [f"{size}²" for size in sizes])
    axis.minorticks_off()


def _is_square(row: Row) -> bool:
    return len(row.case.grid) == 2 and row.case.grid[0] == row.case.grid[1]


def _number(printed: str) -> float:
    """The printed value in the axis's unit: "0.63m" is millions, "1,262.6MB" and "5.8ms" are taken as they are.

    >>> _number("0.63m"), _number("1,262.6MB")
    (630000.0, 1262.6)
    """
    digits = re.match(r"[\d.,]+", printed)
    assert digits is not None
    return float(digits[0].replace(",", "")) * (1e6 if printed.endswith("m") else 1)
