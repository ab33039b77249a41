"""The page: an image's explanation as one HTML file with everything inside."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from kronattn.explain.figure import draw_layers
from kronattn.explain.operators import Comparison
from kronattn.present import embedded_figure, html_page

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["HOW_TO_READ", "render_explanation"]

HOW_TO_READ = (
    "Bars along the edges: how much the marked position attends to each column (above) and each row (left). Colours "
    "over the image: the map that these weights imply, from dark for nothing to yellow for the most. Kronecker "
    "attention sees averages of rows and columns, so a row's weight is spread evenly over the row and a column's over "
    "the column, and the map is their sum, never their product. For the regular operator the map is the coefficients, "
    "and the bars are its sums. Heads are averaged; KAO_QKV's two questions, the row's and the column's, are too. The "
    "operators that are not the network's own see the same features through the same maps, but were not trained here."
)


def render_explanation(
    image: Image.Image,
    comparisons: Sequence[Comparison],
    place: tuple[float, float],
    *,
    title: str,
    lead: str = "",
) -> str:
    """Return one HTML page with a picture for each layer; arguments as in :func:`kronattn.explain.draw_layers`."""
    links = "\n".join(f'<a href="#layer-{at}">{escape(one.name)}</a>' for at, one in enumerate(comparisons))
    header = [
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n<p>{escape(HOW_TO_READ)}</p>',
        f"<nav>\n{links}\n</nav>",
    ]
    main = []
    for at, one in enumerate(comparisons):
        description = f"Row and column weights of {one.name} for each operator"
        picture = embedded_figure(draw_layers(image, [one], place), description, "png")
        main.append(f'<section id="layer-{at}"><h2>{escape(one.name)}</h2>\n{picture}</section>')
    return html_page(title, header, main)
