"""Heads as a picture: time and memory against the size of the image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kronattn.present import require_matplotlib
from kronattn.tables.segmentation.candidates import HEADS
from kronattn.tables.segmentation.measurement import HeadCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_heads"]

_STYLES = {
    "aspp": ("#38a169", "s"),
    "attn": ("#a0aec0", "o"),
    "attn_fused": ("#2d3748", "D"),
    "kao_kv": ("#2b6cb0", "^"),
    "kao_qkv": ("#dd6b20", "v"),
}


def draw_heads(rows: Sequence[HeadCost]) -> Figure:
    """Draw time and memory of each head against the image's size, on logarithmic scales; inference alone.

    Example:
        >>> from kronattn.tables.segmentation import Case, measure_heads
        >>> cases = [Case(size, channels=16) for size in (17, 33)]
        >>> [axis.get_ylabel() for axis in draw_heads(measure_heads(cases, seconds=0.01).rows).axes]
        ['milliseconds an image', 'megabytes an image']
    """
    require_matplotlib("the heads' figure")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels: list[tuple[str, str, Callable[[HeadCost], float]]] = [
        ("Time of the head", "milliseconds an image", lambda row: row.time_ms / row.case.batch),
        ("Memory beyond the features", "megabytes an image", lambda row: row.memory_bytes / 1e6 / row.case.batch),
    ]
    inference = [row for row in rows if row.work == "inference"]
    sizes = sorted({row.case.size for row in inference})
    for axis, (title, unit, value) in zip(figure.subplots(1, 2), panels, strict=True):
        for name, (colour, marker) in _STYLES.items():
            own = sorted((row for row in inference if row.head == name), key=lambda row: row.case.size)
            if own:
                axis.plot(
                    [row.case.size for row in own],
                    [value(row) for row in own],
                    color=colour,
                    marker=marker,
                    markersize=5,
                    linewidth=1.8,
                    label=HEADS[name].label,
                )
        axis.set(xscale="log", yscale="log", xlabel="height and width of the image", ylabel=unit)
        axis.set_title(title, fontsize=11)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False)
    return figure
