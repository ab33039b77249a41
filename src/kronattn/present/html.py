"""A table on a page."""

from __future__ import annotations

from html import escape

from kronattn.present.table import Cell, Column, Group, Table

__all__ = ["to_html"]


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
