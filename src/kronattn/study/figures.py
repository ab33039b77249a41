"""A study's figures: what each layer gains over a reference, with its interval, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kronattn.present import new_figure
from kronattn.present.charts import tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_costs", "draw_gains"]

# By what an interval says.
_COLOURS = {"better": "#2f855a", "worse": "#c53030"}
_UNSURE = "#4a5568"
_MARKERS = "os^Dv<>PXp*"


def draw_gains(summary: Sequence[Mapping[str, Any]], references: Sequence[str]) -> Figure:
    """A panel for each data set and reference: every layer's difference to it in points, with its 95% interval.

    Green and red: the interval excludes zero; a filled mark: so it does after Holm's correction.
    """
    tallest = max((len(part["layers"]) for part in summary), default=1)
    panels = [(part, reference) for part in summary for reference in references]
    # More than three beside each other are too small to read on a page.
    columns = len(references) if len(references) < 4 else 2
    figure, axes = _panels(len(panels), columns, 4.2, 1.1 + 0.24 * tallest)
    for axis, (part, reference) in zip(axes, panels, strict=True):
        names = [entry["layer"] for entry in part["layers"]]
        axis.axvline(0, color="#a0aec0", linewidth=1)
        for place, entry in enumerate(reversed(part["layers"])):
            found = entry["differences"].get(reference)
            if found is not None:
                _draw_difference(axis, place, found)
        axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=7)
        axis.set_ylim(-0.7, len(names) - 0.3)
        axis.tick_params(axis="x", labelsize=7)
        axis.set_title(f"{part['title']}: over {reference}", fontsize=8)
        axis.set_xlabel(f"test {part['score_label']}, points", fontsize=7)
        tidy(axis, "x")
    return figure


def _panels(count: int, columns: int, width: float, height: float) -> tuple[Figure, Sequence[Any]]:
    """A figure with so many panels, each of that size in inches."""
    rows = max(1, -(-count // columns))
    figure = new_figure("the study's figure", width * columns, height * rows)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def _draw_difference(axis: Any, place: int, found: Mapping[str, Any]) -> None:
    word = found["verdict"].removeprefix("maybe ")
    colour = _COLOURS.get(word, _UNSURE)
    mean, spread = _points(found)
    filled = colour if found["verdict"] in _COLOURS else "white"
    axis.errorbar(mean, place, xerr=spread, fmt="o", color=colour, markerfacecolor=filled, capsize=3, markersize=5)


def _points(found: Mapping[str, Any]) -> tuple[float, Any]:
    """A difference in points, and how far its interval reaches below and above it."""
    mean = 100 * found["mean"]
    return mean, None if found["low"] is None else [[mean - 100 * found["low"]], [100 * found["high"] - mean]]


def draw_costs(summary: Sequence[Mapping[str, Any]], costs: Mapping[str, Any], reference: str) -> Figure | None:
    """For each data set and device: the gain over ``reference`` against the time of a batch, in that of ``reference``.

    None where no cost was measured.
    """
    panels = [(part, measured) for part in summary for measured in costs.get(part["name"], {}).values()]
    panels = [panel for panel in panels if reference in panel[1]["layers"]]
    if not panels:
        return None
    figure, axes = _panels(len(panels), 2, 4.8, 3.2)
    layers = list(dict.fromkeys(entry["layer"] for part in summary for entry in part["layers"]))
    drawn: dict[str, Any] = {}
    for axis, (part, measured) in zip(axes, panels, strict=True):
        base = measured["layers"][reference]["seconds"]
        for entry in part["layers"]:
            cost, gain = measured["layers"].get(entry["layer"]), entry["differences"].get(reference)
            if cost is None or gain is None:
                continue
            x, (y, spread) = cost["seconds"] / base, _points(gain)
            name, number = entry["layer"], layers.index(entry["layer"])
            marks = {"color": f"C{number % 10}", "marker": _MARKERS[number % len(_MARKERS)]}
            drawn[name] = axis.errorbar(x, y, yerr=spread, linestyle="", capsize=2, markersize=5, label=name, **marks)
        axis.axhline(0, color="#a0aec0", linewidth=1)
        axis.set_title(f"{part['title']}, {measured['name']}", fontsize=8)
        axis.set_xlabel(f"time of a forward pass, in that of {reference}", fontsize=7)
        axis.set_ylabel(f"gain over {reference}, points", fontsize=7)
        axis.tick_params(labelsize=7)
        tidy(axis)
    # Names beside the points would lie on top of each other.
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=6, fontsize=7, frameon=False)
    return figure
