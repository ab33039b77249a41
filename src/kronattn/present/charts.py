"""Charts that several tables draw: what grows with the size of a problem, a line for each candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kronattn.present.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "Panel", "Series", "draw_panels", "tidy"]

# One colour for each operator, in whatever it is drawn.
COLOURS = {
    "copy": "#2d3748",
    "aspp": "#38a169",
    "attn": "#a0aec0",
    "attn_pool": "#718096",
    "attn_fused": "#2d3748",
    "criss_cross": "#b7a4d8",
    "axial": "#8f74c4",
    "efficient": "#6b46a8",
    "kao_kv_torch": "#bee3f8",
    "kao_qkv_torch": "#fbd38d",
    "kao_kv_compiled": "#63b3ed",
    "kao_qkv_compiled": "#f6ad55",
    "kao_kv": "#2b6cb0",
    "kao_qkv": "#dd6b20",
    "kao_qkv_as_printed": "#9c4221",
}
_MARKERS = {
    "kao_qkv_as_printed": "1",
    "aspp": "s",
    "attn": "o",
    "attn_pool": "s",
    "attn_fused": "D",
    "kao_kv": "^",
    "kao_qkv": "v",
}


@dataclass
class Series:
    """One candidate: points that a line joins, points of their own (hollow), and the paper's values (crosses)."""

    name: str
    label: str
    line: list[tuple[float, float]] = field(default_factory=list)
    others: list[tuple[float, float]] = field(default_factory=list)
    printed: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Panel:
    """One of the charts side by side."""

    title: str
    unit: str
    series: Sequence[Series]


def draw_panels(
    panels: Sequence[Panel], *, xlabel: str, ticks: Mapping[float, str], width: float, others: str = "other grids"
) -> Figure:
    """Draw charts side by side, on logarithmic scales, with one legend below, which calls the hollow points ``others``.

    Example:
        >>> one = Series("kao_kv", "KAO_KV", [(1, 1), (2, 2)])
        >>> drawn = draw_panels([Panel("Time", "ms", [one])], xlabel="positions", ticks={1: "1"}, width=5)
        >>> [axis.get_ylabel() for axis in drawn.axes]
        ['ms']
    """
    figure = new_figure("a figure", width, 4.6)
    everything = [series for panel in panels for series in panel.series]
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for series in panel.series:
            style: dict[str, Any] = {"color": COLOURS.get(series.name, "#cbd5e0")}
            marker = _MARKERS.get(series.name, "o")
            _plot(axis, series.line, marker=marker, markersize=5, linewidth=1.8, label=series.label, **style)
            hollow = {"marker": marker, "markersize": 7, "markerfacecolor": "none", "linestyle": "none"}
            _plot(axis, series.others, **hollow, **style)
            _plot(axis, series.printed, marker="x", alpha=0.6, markersize=6, linestyle="none", **style)
        axis.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=panel.unit)
        axis.set_title(panel.title, fontsize=11)
        axis.set_xticks(list(ticks), list(ticks.values()))
        axis.minorticks_off()
        tidy(axis)
    handles, labels = axis.get_legend_handles_labels()
    if any(series.printed for series in everything):
        handles.append(axis.plot([], [], "x", color="#4a5568", alpha=0.6, markersize=6)[0])
        labels.append("the paper's values")
    if any(series.others for series in everything):
        handles.append(axis.plot([], [], "o", color="#4a5568", markersize=7, markerfacecolor="none")[0])
        labels.append(others)
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False)
    return figure


def _plot(axis: Any, points: Sequence[tuple[float, float]], **style: Any) -> None:
    if points:
        axis.plot(*zip(*points, strict=True), **style)


def tidy(axis: Any, grid: str = "both") -> None:
    """A faint grid, and no frame where no axis is."""
    axis.grid(axis=grid, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
