"""A study's figures: what each layer gains over a reference, with its interval, and what that costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from kronattn.present import new_figure
from kronattn.present.charts import tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_costs", "draw_gains", "draw_worth"]

# By what an interval says.
_COLOURS = {"better": "#2f855a", "worse": "#c53030"}
_UNSURE = "#4a5568"
# Letters of a data set's name above a panel; more would reach into the next one.
_TITLE = 31
_MARKERS = "os^Dv<>PXp*"
_DEVICES = {"cuda": "#2b6cb0", "cpu": "#dd6b20"}
_KINDS = {"seconds": "o", "peak_bytes": "x"}


def draw_gains(summary: Sequence[Mapping[str, Any]], references: Sequence[str]) -> Figure:
    """A panel for each data set and reference: every layer's difference to it in points, with its 95% interval.

    Green and red: the interval excludes zero; a filled mark: so it does after Holm's correction.
    """
    tallest = max((len(part["layers"]) for part in summary), default=1)
    panels = [(part, reference) for part in summary for reference in references]
    # More than three beside each other are too small to read on a page.
    columns = len(references) if len(references) < 4 else 2
    rows = max(1, -(-len(panels) // columns))
    # As wide with one column as with several: the legend would be cut off.
    figure, axes = _panels(len(panels), columns, 9.0 / columns, [1.0 + 0.22 * tallest] * rows)
    for at, (axis, (part, reference)) in enumerate(zip(axes, panels, strict=True)):
        # Below the data set's name, which is too long to stand beside it.
        title = f"{fill(part['title'], _TITLE)}\nover {reference}"
        _draw_part(axis, part, reference, title, named=at % columns == 0)
        axis.set_xlabel(f"test {part['score_label']}, points", fontsize=9)
    _add_legend(figure, _verdicts())
    return figure


def draw_worth(
    decided: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    mean: str,
    nothing: str,
    layers: Collection[str] | None = None,
) -> Figure:
    """For each data set a row of three: the gain over nothing, the gain over a mean, and the price of each layer.

    Args:
        decided: a data set's summary, whose first reference stands for nothing, and its study's costs.
        mean: the layer that is a plain mean.
        nothing: the layer whose time and memory are those of the network without any.
        layers: those that are shown; all by default.
    """
    shown = [
        ({**part, "layers": [x for x in part["layers"] if layers is None or x["layer"] in layers]}, costs)
        for part, costs in decided
    ]
    figure, axes = _panels(3 * len(shown), 3, 3.0, [0.55 + 0.19 * len(part["layers"]) for part, _ in shown])
    drawn: dict[str, Any] = {}
    for at, (part, costs) in enumerate(shown):
        first, second, axis = axes[3 * at : 3 * at + 3]
        # Its name stands over its row once, what is measured below the last row: that keeps the figure short.
        reference = part["references"][0]
        _draw_part(first, part, reference, f"{part['title']}: over {reference}", loc="left")
        _draw_part(second, part, mean, f"over {mean}", named=False, loc="right")
        for kind, measured in costs.get(part["name"], {}).items():
            for figure_of, label in (("seconds", "time"), ("peak_bytes", "memory")):
                points = _prices(part, measured["layers"], figure_of, nothing)
                style = {"marker": _KINDS[figure_of], "color": _DEVICES.get(kind, _UNSURE), "linestyle": ""}
                name = f"{label} of a forward pass, {measured['name']}"
                (drawn[name],) = axis.plot(*zip(*points, strict=True), markersize=4.5, alpha=0.8, **style)
        axis.axvline(1, color="#a0aec0", linewidth=1)
        _lay_out(axis, part, "price", named=False, loc="right")
        if at == len(shown) - 1:
            for panel in (first, second):
                panel.set_xlabel("test score, points", fontsize=9)
            axis.set_xlabel(f"network's, divided by that with {nothing}", fontsize=9)
    _add_legend(figure, _verdicts() | drawn, columns=3)
    return figure


def _prices(
    part: Mapping[str, Any], layers: Mapping[str, Any], figure: str, nothing: str
) -> Sequence[tuple[float, float]]:
    """What a layer's network takes in that of the one without, and its place, the first layer at the top."""
    names = [entry["layer"] for entry in reversed(part["layers"])]
    base = layers[nothing][figure]
    return [(layers[name][figure] / base, place) for place, name in enumerate(names) if name in layers]


def _draw_part(axis: Any, part: Mapping[str, Any], reference: str, title: str, **options: Any) -> None:
    """Every layer's difference to a reference."""
    axis.axvline(0, color="#a0aec0", linewidth=1)
    for place, entry in enumerate(reversed(part["layers"])):
        found = entry["differences"].get(reference)
        if found is not None:
            mean, spread = _points(found)
            axis.errorbar(mean, place, xerr=spread, **_style(found["verdict"]))
    _lay_out(axis, part, title, **options)


def _lay_out(axis: Any, part: Mapping[str, Any], title: str, *, named: bool = True, loc: str = "center") -> None:
    """A title where it has room, and a line for each layer, with its name where the panel is the first of its row."""
    names = [entry["layer"] for entry in part["layers"]]
    axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=9)
    axis.tick_params(axis="y", labelleft=named)
    axis.set_ylim(-0.7, len(names) - 0.3)
    axis.set_title(title.replace("$", r"\$"), loc=loc, fontsize=9)  # $ would begin a formula
    # More would run into each other where all of them have a sign and a fraction.
    axis.locator_params(axis="x", nbins=5)
    axis.tick_params(axis="x", labelsize=9)
    tidy(axis, "x")


def _panels(count: int, columns: int, width: float, heights: Sequence[float]) -> tuple[Figure, Sequence[Any]]:
    """A figure with so many panels, each of that width in inches; each row has a height of its own."""
    figure = new_figure("the study's figure", width * columns, sum(heights))
    axes = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).flatten()
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def _style(verdict: str) -> dict[str, Any]:
    """How a difference is drawn, by what its interval says."""
    colour = _COLOURS.get(verdict.removeprefix("maybe "), _UNSURE)
    filled = colour if verdict in _COLOURS else "white"
    return {"fmt": "o", "color": colour, "markerfacecolor": filled, "capsize": 3, "markersize": 5}


def _verdicts() -> dict[str, Any]:
    """What the marks mean, for a legend."""
    from matplotlib.lines import Line2D

    verdicts = ("better", "maybe better", "no difference shown", "worse", "maybe worse")
    drawn = {}
    for verdict in verdicts:
        style = _style(verdict)
        drawn[verdict] = Line2D(
            [], [], marker=style["fmt"], color=style["color"], markerfacecolor=style["markerfacecolor"]
        )
    return drawn


def _add_legend(figure: Figure, drawn: Mapping[str, Any], columns: int = 5) -> None:
    """Below everything: names beside the points would lie on top of each other."""
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


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
    figure, axes = _panels(len(panels), 2, 4.8, [3.2] * -(-len(panels) // 2))
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
    _add_legend(figure, drawn, columns=6)
    return figure
