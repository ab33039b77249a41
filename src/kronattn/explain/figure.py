"""The picture: views of several layers and operators beside each other, with their names and scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kronattn.explain.heat import HEAT, drawn_shares
from kronattn.explain.operators import LABELS, MODES, Comparison
from kronattn.explain.place import grid_position
from kronattn.explain.view import COLOURS, draw_view
from kronattn.present import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image

__all__ = ["draw_layers"]


def draw_layers(
    image: Image.Image, comparisons: Sequence[Comparison], place: tuple[float, float], *, caption: str = ""
) -> Figure:
    """Draw layers below each other, each with a panel for every operator, under a caption.

    Args:
        image: the whole image that the network saw.
        comparisons: the layers, from :func:`kronattn.explain.compare_operators`.
        place: x and y as fractions of the image's width and height.

    Example:
        >>> import kronattn
        >>> from PIL import Image
        >>> from kronattn.explain import compare_operators
        >>> model = kronattn.create_model("kanet_kv", width=0.25).eval()
        >>> comparisons = compare_operators(model, torch.randn(1, 3, 64, 64))
        >>> figure = draw_layers(Image.new("RGB", (64, 64)), comparisons[:1], (0.5, 0.5))
        >>> [axis.get_title(loc="left").split(",")[0] for axis in figure.axes if axis.get_title(loc="left")]
        ['KAO_KV', 'KAO_QKV', 'regular']
    """
    shape = min(max(image.height / image.width, 0.4), 2.5)
    width = 3.1
    heights = [width * shape + 0.95] * len(comparisons)
    figure = new_figure("the figure", width * len(MODES) + 0.2, sum(heights) + (0.35 if caption else 0))
    if caption:
        figure.suptitle(caption, fontsize=10, x=0.01, ha="left", fontweight="bold")
    rows: Any = np.atleast_1d(figure.subfigures(len(comparisons), 1))
    for part, comparison in zip(rows, comparisons, strict=True):
        row, column = grid_position(place, comparison.grid)
        title = f"{comparison.name}: {comparison.grid[0]}×{comparison.grid[1]}, row {row}, column {column}"
        part.suptitle(title, fontsize=9, x=0.01, ha="left")
        panels = np.atleast_1d(part.subfigures(1, len(MODES)))
        for panel, mode in zip(panels, MODES, strict=True):
            if mode in comparison.calls:
                _draw_panel(panel, image, comparison, mode, place)
            else:
                positions = comparison.grid[0] * comparison.grid[1]
                panel.text(0.5, 0.5, f"{LABELS[mode]}: left out,\n{positions:,} positions", ha="center", fontsize=9)
    return figure


def _draw_panel(panel: Any, image: Image.Image, comparison: Comparison, mode: str, place: tuple[float, float]) -> None:
    call = comparison.calls[mode]
    axis = panel.subplots()
    axis.imshow(np.asarray(draw_view(image, call, place)))
    axis.axis("off")
    own = ", the network's own" if mode == comparison.own else ""
    weight = "bold" if own else None
    axis.set_title(f"{LABELS[mode]}{own}", fontsize=9, loc="left", color=COLOURS[mode], fontweight=weight)
    _draw_bar(panel, axis, float(drawn_shares(call.at(*grid_position(place, call.grid)))[2].max()))


def _draw_bar(panel: Any, axis: Any, most: float) -> None:
    """A colour bar below the map: from nothing to the largest share of one position."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = ScalarMappable(Normalize(0, 100 * most), LinearSegmentedColormap.from_list("heat", HEAT))
    bar = panel.colorbar(colours, ax=axis, location="bottom", shrink=0.8, aspect=40, pad=0.02)
    bar.set_ticks([0, 100 * most], labels=["0", f"{most:.2%}"])
    bar.ax.tick_params(labelsize=7, length=0)
    bar.outline.set_visible(False)
    bar.set_label("share of the attention, each position", fontsize=7, labelpad=-6)
