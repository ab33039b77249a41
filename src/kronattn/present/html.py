"""Pages of one file each, with their style and figures inside, and tables on them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

from kronattn.present.figures import figure_bytes
from kronattn.present.table import Cell, Column, Group, Table

__all__ = ["embedded_figure", "html_page", "to_html"]

_TYPES = {"png": "image/png", "svg": "image/svg+xml"}


def html_page(title: str, header: Iterable[str], main: Iterable[str], footer: str = "") -> str:
    """Return an HTML page that fetches nothing from elsewhere; its parts are HTML.

    >>> html_page("Sizes", ["<h1>Sizes</h1>"], ["<p>One.</p>"]).startswith("<!doctype html>")
    True
    """
    style = files("kronattn.present").joinpath("page.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            *("<header>", *header, "</header>", "<main>", *main, "</main>"),
            *([f"<footer>\n{footer}\n</footer>"] if footer else []),
            "</body>\n</html>\n",
        ]
    )


def embedded_figure(
    figure: Any, description: str, kind: str = "svg", *, caption: str = "", narrow: bool = False
) -> str:
    """Return a matplotlib figure for a page: as an image of its own, so that identifiers inside two cannot clash."""
    data = b64encode(figure_bytes(figure, kind)).decode("ascii")
    image = f'<img alt="{escape(description)}" src="data:{_TYPES[kind]};base64,{data}">'
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return ('<figure class="narrow">' if narrow else "<figure>") + f"{image}{below}</figure>"


def to_html(table: Table) -> str:
    """Return a table as HTML, in a box that scrolls sideways on a narrow screen.

    >>> "<td" in to_html(Table("Sizes", [Column("MB")], [Group("", [[Cell("1.5")]])]))
    True
    """
    heads = "".join(f'<th scope="col"{_class(column)}>{escape(column.title)}</th>' for column in table.columns)
    bodies = "\n".join(_html_group(table, group) for group in table.groups)
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return (
        f'<div class="table"><table>\n<caption>{escape(table.title)}</caption>\n'
        f"<thead><tr>{heads}</tr></thead>\n{bodies}\n</table></div>\n"
        + (f'<div class="notes">{notes}</div>\n' if notes else "")
    )


def _html_group(table: Table, group: Group) -> str:
    # Where a column holds printed values, every cell leaves room for one, so that ours stay aligned.
    with_printed = [any(cells[at].printed for cells in table.rows) for at in range(len(table.columns))]
    rows = []
    if group.title:
        title = f'<th scope="rowgroup" colspan="{len(table.columns)}">{escape(group.title)}</th>'
        rows.append(f'<tr class="group">{title}</tr>')
    for row in group.rows:
        cells = zip(table.columns, row, with_printed, strict=True)
        rows.append("<tr>" + "".join(_html_cell(column, cell, room) for column, cell, room in cells) + "</tr>")
    return "<tbody>\n" + "\n".join(rows) + "\n</tbody>"


def _html_cell(column: Column, cell: Cell, room: bool) -> str:
    printed = f'<span class="printed">{escape(cell.printed)}</span>' if room else ""
    text = f'<span class="{cell.tone}">{escape(cell.text)}</span>' if cell.tone else escape(cell.text)
    # For a narrow screen, where a row is a block and the headings are left out.
    return f'<td{_class(column)} data-label="{escape(column.title)}">{text}{printed}</td>'


def _class(column: Column) -> str:
    return ' class="number"' if column.numeric else ""
