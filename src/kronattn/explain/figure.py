"""The picture: an image under the map of where one position attends, its row and column weights along the edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kronattn.explain.heat import HEAT, overlaid
from kronattn.explain.operators import LABELS, MODES, Comparison
from kronattn.explain.place import grid_position
from kronattn.explain.shares import drawn_shares
from kronattn.explain.view import COLOURS
from kronattn.present import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image

__all__ = ["draw_layer", "draw_layers"]

_LONGEST = 448  # pixels of the picture below the map


def draw_layer(
    image: Image.Image, comparison: Comparison, place: tuple[float, float], modes: Sequence[str] = MODES
) -> Figure:
    """Draw one layer: a panel for each operator, beside each other.

    Args:
        image: the whole image that the network saw.
        comparison: the layer, from :func:`kronattn.explain.compare_operators`.
        place: x and y as fractions of the image's width and height.
        modes: which operators, of "kv", "qkv" and "regular".

    Example:
        >>> import kronattn
        >>> from PIL import Image
        >>> from kronattn.explain import compare_operators
        >>> model = kronattn.create_model("kanet_kv", width=0.25).eval()
        >>> comparisons = compare_operators(model, torch.randn(1, 3, 64, 64))
        >>> figure = draw_layer(Image.new("RGB", (64, 64)), comparisons[0], (0.5, 0.5))
        >>> [axis.get_title(loc="left").split(",")[0] for axis in figure.axes if axis.get_title(loc="left")]
        ['KAO_KV', 'KAO_QKV', 'regular']
    """
    return draw_layers(image, [comparison], place, modes)


def draw_layers(
    image: Image.Image,
    comparisons: Sequence[Comparison],
    place: tuple[float, float],
    modes: Sequence[str] = MODES,
    *,
    caption: str = "",
) -> Figure:
    """Draw several layers below each other, under a caption; other arguments as in :func:`draw_layer`."""
    small = image.copy()
    small.thumbnail((_LONGEST, _LONGEST))
    shape = min(max(small.height / small.width, 0.4), 2.5)
    width = 3.1
    heights = [width * shape + 0.95] * len(comparisons)
    figure = new_figure("the figure", width * len(modes) + 0.2, sum(heights) + (0.35 if caption else 0))
    if caption:
        figure.suptitle(caption, fontsize=10, x=0.01, ha="left", fontweight="bold")
    rows: Any = np.atleast_1d(figure.subfigures(len(comparisons), 1))
    for part, comparison in zip(rows, comparisons, strict=True):
        row, column = grid_position(place, comparison.grid)
        title = f"{comparison.name}: {comparison.grid[0]}×{comparison.grid[1]}, row {row}, column {column}"
        part.suptitle(title, fontsize=9, x=0.01, ha="left")
        panels = np.atleast_1d(part.subfigures(1, len(modes)))
        for panel, mode in zip(panels, modes, strict=True):
            if mode in comparison.calls:
                _draw_panel(panel, small, comparison, mode, (row, column))
            else:
                positions = comparison.grid[0] * comparison.grid[1]
                panel.text(0.5, 0.5, f"{LABELS[mode]}: left out,\n{positions:,} positions", ha="center", fontsize=9)
    return figure


def _draw_panel(panel: Any, image: Image.Image, comparison: Comparison, mode: str, position: tuple[int, int]) -> None:
    call = comparison.calls[mode]
    rows, columns, places = drawn_shares(call.at(*position))
    width, height = image.size
    colour = COLOURS[mode]
    axes = panel.subplots(
        2, 2, gridspec_kw={"width_ratios": (1, 6), "height_ratios": (1, 6), "hspace": 0.02, "wspace": 0.02}
    )
    corner, top, left, main = axes.ravel()
    corner.axis("off")

    main.imshow(np.asarray(overlaid(image, places)), extent=(0, width, height, 0), aspect="auto")
    row, column = position
    cell = (width / comparison.grid[1], height / comparison.grid[0])
    from matplotlib.patches import Rectangle

    # Red, which is no colour of the map's, on white.
    for edge, line in (("white", 3.2), ("#e53e3e", 1.8)):
        main.add_patch(Rectangle((column * cell[0], row * cell[1]), *cell, fill=False, edgecolor=edge, linewidth=line))
    main.set(xticks=[], yticks=[], xlim=(0, width), ylim=(height, 0))
    _draw_bar(panel, axes, float(places.max()))

    step = width / len(columns)
    top.bar(np.arange(len(columns)) * step, columns, width=step, align="edge", color=colour, linewidth=0)
    top.set(xlim=(0, width), xticks=[], yticks=[])
    step = height / len(rows)
    left.barh(np.arange(len(rows)) * step, rows, height=step, align="edge", color=colour, linewidth=0)
    left.set(ylim=(height, 0), xticks=[], yticks=[])
    # One scale for both edges, or a faint row would look like a strong column.
    most = max(float(rows.max()), float(columns.max())) * 1.05
    top.set_ylim(0, most)
    left.set_xlim(most, 0)
    for axis in (top, left):
        axis.spines[:].set_visible(False)
    own = ", the network's own" if mode == comparison.own else ""
    top.set_title(f"{LABELS[mode]}{own}", fontsize=9, loc="left", color=colour, fontweight="bold" if own else None)


def _draw_bar(panel: Any, axes: Any, most: float) -> None:
    """A colour bar below the map: from nothing to the largest share of one position."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = ScalarMappable(Normalize(0, 100 * most), LinearSegmentedColormap.from_list("heat", HEAT))
    bar = panel.colorbar(colours, ax=list(axes.ravel()), location="bottom", shrink=0.8, aspect=40, pad=0.02)
    bar.set_ticks([0, 100 * most], labels=["0", f"{most:.2%}"])
    bar.ax.tick_params(labelsize=7, length=0)
    bar.outline.set_visible(False)
    bar.set_label("share of the attention, each position", fontsize=7, labelpad=-6)
