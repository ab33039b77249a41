"""Tables and figures for readers: one table type, rendered to a terminal, Markdown, HTML and JSON."""

from kronattn.present.figures import FIGURE_SUFFIXES, figure_bytes, new_figure
from kronattn.present.formats import format_percent, format_ratio, format_significant, round_significant
from kronattn.present.html import embedded_figure, html_page, to_html
from kronattn.present.markdown import to_markdown
from kronattn.present.table import NOTHING, Cell, Column, Group, Table, tabulate, to_json
from kronattn.present.terminal import to_rich

__all__ = [
    "FIGURE_SUFFIXES",
    "NOTHING",
    "Cell",
    "Column",
    "Group",
    "Table",
    "embedded_figure",
    "figure_bytes",
    "format_percent",
    "format_ratio",
    "format_significant",
    "html_page",
    "new_figure",
    "round_significant",
    "tabulate",
    "to_html",
    "to_json",
    "to_markdown",
    "to_rich",
]
