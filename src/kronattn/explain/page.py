"""The page: an image's explanation as one HTML file with everything inside."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from kronattn.explain.figure import draw_layer
from kronattn.explain.operators import MODES, Comparison
from kronattn.present import figure_bytes

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
    modes: Sequence[str] = MODES,
) -> str:
    """Return one HTML page with a picture for each layer; arguments as in :func:`kronattn.explain.draw_layers`."""
    style = files("kronattn.report").joinpath("page.css").read_text(encoding="utf-8")
    links = "\n".join(f'<a href="#layer-{at}">{escape(one.name)}</a>' for at, one in enumerate(comparisons))
    sections = []
    for at, comparison in enumerate(comparisons):
        data = b64encode(figure_bytes(draw_layer(image, comparison, place, modes), "png")).decode("ascii")
        sections.append(
            f'<section id="layer-{at}"><h2>{escape(comparison.name)}</h2>\n'
            f'<figure><img alt="Row and column weights of {escape(comparison.name)} for each operator" '
            f'src="data:image/png;base64,{data}"></figure></section>'
        )
    body = "\n".join(sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
<p>{escape(HOW_TO_READ)}</p>
<nav>
{links}
</nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""
