"""The page: one HTML file with its style and figures inside, and nothing fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from kronattn.present import embedded_figure, html_page, to_html
from kronattn.report.section import Content, Section

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
    links = "\n".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section, _ in sections)
    highlights = "\n".join(
        f'<div class="highlight"><b>{escape(one.value)}</b><span>{escape(one.label)}</span></div>'
        for _, content in sections
        for one in content.highlights
    )
    measured = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in environment.items()
    )
    header = [
        f'<h1>Kronecker attention</h1>\n<p class="lead">{escape(_LEAD)}</p>\n<p>{_HOW_TO_READ}</p>',
        f'<div class="highlights">\n{highlights}\n</div>\n<nav>\n{links}\n</nav>',
    ]
    main = [_section(section, content) for section, content in sections]
    return html_page("Kronecker attention: the report", header, main, f"<h2>Measured with</h2>\n<dl>{measured}</dl>")


def _section(section: Section, content: Content) -> str:
    parts = [
        f'<section id="{section.name}">',
        f"<h2>{escape(section.title)}</h2>",
        f"<p>{escape(content.introduction)}</p>",
        *(
            embedded_figure(one.figure, one.description, caption=one.caption, narrow=one.narrow)
            for one in content.drawings
        ),
        *(to_html(table) for table in content.tables),
        "</section>",
    ]
    return "\n".join(parts)
