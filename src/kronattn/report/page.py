"""The page: one HTML file with its style and figures inside, and nothing fetched from elsewhere."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from kronattn.present import figure_bytes, to_html
from kronattn.report.section import Content, Drawing, Highlight, Section

__all__ = ["render_page"]

_LEAD = (
    "kronattn is Kronecker attention for PyTorch: attention over images, video and volumes that looks at the "
    "averages of rows and columns instead of at all positions. It implements the paper Kronecker Attention "
    "Networks (KDD 2020). This page holds what the paper claims beside what this machine measured."
)
_HOW_TO_READ = (
    'Black figures were computed by this run. <span class="printed">Grey figures</span> are printed in the '
    "paper, measured on its authors’ hardware and software: multiply-adds and their savings should agree to the "
    'digit, memory and time only in how they grow. <span class="stored">Blue figures</span> are those of training '
    "runs that were made before and are kept in results/."
)


def render_page(sections: Sequence[tuple[Section, Content]], environment: Mapping[str, str | int]) -> str:
    """Return the report as one HTML page.

    Args:
        sections: with what they found, in order.
        environment: what it was measured with, for the footer.

    Example:
        >>> section = Section("one", "A title", lambda settings: Content("A sentence."))
        >>> page = render_page([(section, Content("A sentence."))], {"torch": "2.15.0"})
        >>> page.startswith("<!doctype html>"), "A title" in page
        (True, True)
    """
    style = files("kronattn.report").joinpath("page.css").read_text(encoding="utf-8")
    links = "\n".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section, _ in sections)
    highlights = "\n".join(_highlight(one) for _, content in sections for one in content.highlights)
    bodies = "\n".join(_section(section, content) for section, content in sections)
    footer = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in environment.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Kronecker attention: the report</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>Kronecker attention</h1>
<p class="lead">{escape(_LEAD)}</p>
<p>{_HOW_TO_READ}</p>
<div class="highlights">
{highlights}
</div>
<nav>
{links}
</nav>
</header>
<main>
{bodies}
</main>
<footer>
<h2>Measured with</h2>
<dl>{footer}</dl>
</footer>
</body>
</html>
"""


def _highlight(highlight: Highlight) -> str:
    return f'<div class="highlight"><b>{escape(highlight.value)}</b><span>{escape(highlight.label)}</span></div>'


def _section(section: Section, content: Content) -> str:
    parts = [
        f'<section id="{section.name}">',
        f"<h2>{escape(section.title)}</h2>",
        f"<p>{escape(content.introduction)}</p>",
        *(_drawing(drawing) for drawing in content.drawings),
        *(to_html(table) for table in content.tables),
        "</section>",
    ]
    return "\n".join(parts)


def _drawing(drawing: Drawing) -> str:
    # As an image of its own, so that identifiers inside two figures cannot clash.
    data = b64encode(figure_bytes(drawing.figure, "svg")).decode("ascii")
    opening = '<figure class="narrow">' if drawing.narrow else "<figure>"
    return (
        f'{opening}<img alt="{escape(drawing.description)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(drawing.caption)}</figcaption></figure>"
    )
