"""What all tables share: a table as plain data, shown in a terminal or on a page; figures as files; number formats."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from kronattn.extras import require_library

if TYPE_CHECKING:
    import rich.console
    import rich.measure
    import rich.table

__all__ = [
    "FIGURE_SUFFIXES",
    "Cell",
    "Column",
    "Group",
    "Table",
    "figure_bytes",
    "format_percent",
    "format_ratio",
    "format_significant",
    "require_matplotlib",
    "to_html",
    "to_rich",
]

FIGURE_SUFFIXES = (".png", ".svg")


@dataclass(frozen=True)
class Cell:
    """One entry: what was found here and, beside it, what the paper prints.

    >>> Cell("75.00%", printed="75.00%").printed
    '75.00%'
    """

    text: str
    printed: str = ""
    # "good" or "bad" where a result is judged, "printed" for the paper's, "stored" for one of an earlier run.
    tone: str = ""


@dataclass(frozen=True)
class Column:
    """A heading; numbers are set flush right.

    >>> Column("MAdd").numeric
    True
    """

    title: str
    numeric: bool = True


@dataclass(frozen=True)
class Group:
    """Rows that belong together, under a title of their own if it is not empty.

    >>> len(Group("8×14²×8", [[Cell("Attn")], [Cell("KAO_KV")]]).rows)
    2
    """

    title: str
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Table:
    """A table as plain data; its notes stand below.

    >>> Table("Sizes", [Column("MB")], [Group("", [[Cell("1.5")]])]).groups[0].rows[0][0].text
    '1.5'
    """

    title: str
    columns: Sequence[Column]
    groups: Sequence[Group]
    notes: Sequence[str] = ()


_WIDEST_NAME = 24


def to_rich(table: Table, *, width: int) -> rich.console.Group:
    """Return a table for a terminal of that width: printed values beside ours or, if that is too wide, below; and if it
    still is, several tables below each other, each with the first column, so that no figure is cut off.

    >>> sizes = Table("Sizes", [Column("Of", numeric=False), Column("MB")], [Group("", [[Cell("x"), Cell("1.5")]])])
    >>> [len(to_rich(sizes, width=width).renderables) for width in (80, 5)]
    [1, 1]
    >>> wide = Table("", [Column("a" * 20)] * 5, [])
    >>> len(to_rich(wide, width=80).renderables)
    2
    """
    from rich.console import Group as Stack

    if _widths(table, separator=" ").maximum <= width:
        return Stack(_to_rich(table, separator=" "))
    return Stack(*(_to_rich(part, separator="\n") for part in _parts(table, width)))


def _widths(table: Table, *, separator: str) -> rich.measure.Measurement:
    """From the least, with words broken into lines and no figure cut off, to the most.

    Title and notes do not count: they can be broken into lines of any length.
    """
    from rich.console import Console

    return Console(width=10_000).measure(_to_rich(replace(table, title="", notes=()), separator=separator))


def _parts(table: Table, width: int) -> list[Table]:
    """The table by columns, as many of them at a time as fit, after the first, which says what a row is about."""
    if len(table.columns) < 2:
        return [table]
    chosen = [[1]]
    for column in range(2, len(table.columns)):
        if _widths(_columns(table, [0, *chosen[-1], column]), separator="\n").minimum <= width:
            chosen[-1].append(column)
        else:
            chosen.append([column])
    parts = [_columns(table, [0, *columns]) for columns in chosen]
    parts[0] = replace(parts[0], title=table.title)
    parts[-1] = replace(parts[-1], notes=table.notes)
    return parts


def _least_width(table: Table, at: int, separator: str) -> int | None:
    """Of a column: Rich would rather cut figures off than words, and the first is what a row is found by."""
    column = table.columns[at]
    if at and not column.numeric:
        return None
    cells = [row[at] for row in _all_rows(table) if at < len(row)]
    longest = max(map(len, [column.title, *(line for cell in cells for line in _lines(cell, separator))]))
    return longest if column.numeric else min(longest, _WIDEST_NAME)


def _lines(cell: Cell, separator: str) -> list[str]:
    return (cell.text + separator + cell.printed if cell.printed else cell.text).split("\n")


def _columns(table: Table, chosen: Sequence[int]) -> Table:
    """Some of a table's columns, without title and notes. Rows may end early."""
    groups = [
        Group(group.title, [[row[column] for column in chosen if column < len(row)] for row in group.rows])
        for group in table.groups
    ]
    return Table("", [table.columns[column] for column in chosen], groups)


def _to_rich(table: Table, *, separator: str) -> rich.table.Table:
    import rich.box
    import rich.table
    from rich.text import Text

    shown = rich.table.Table(
        title=Text(table.title) if table.title else None,
        caption=Text("\n".join(table.notes), justify="left") if table.notes else None,
        box=rich.box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        title_justify="left",
        title_style="bold",
    )
    for at, column in enumerate(table.columns):
        shown.add_column(
            Text(column.title),
            justify="right" if column.numeric else "left",
            no_wrap=column.numeric,
            min_width=_least_width(table, at, separator),
            vertical="top",
        )
    tones = {"good": "green", "bad": "red", "printed": "dim", "stored": "blue", "": ""}
    for group in table.groups:
        if group.title:
            shown.add_row(Text(group.title, style="bold"))
        for row in group.rows:
            texts = []
            for cell in row:
                text = Text(cell.text, style=tones[cell.tone])
                if cell.printed:
                    text.append(separator + cell.printed, style="dim")
                texts.append(text)
            shown.add_row(*texts)
        shown.add_section()
    return shown


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
    with_printed = [any(cells[at].printed for cells in _all_rows(table)) for at in range(len(table.columns))]
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


def _all_rows(table: Table) -> Iterator[Sequence[Cell]]:
    return (row for group in table.groups for row in group.rows)


def _class(column: Column) -> str:
    return ' class="number"' if column.numeric else ""


def figure_bytes(figure: Any, kind: str) -> bytes:
    """Return a matplotlib figure as "png" or "svg", the same bytes for the same figure.

    >>> from matplotlib.figure import Figure
    >>> figure_bytes(Figure(figsize=(1, 1)), "png")[1:4]
    b'PNG'
    """
    import matplotlib

    buffer = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "kronattn"}):
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def require_matplotlib(wanted_by: str) -> None:
    """Say what to install if matplotlib is missing: to be called before any work is spent on a figure.

    >>> require_matplotlib("--output")
    """
    require_library("matplotlib.figure", wanted_by, extra="plots")


def format_percent(fraction: float) -> str:
    """Format a fraction with two decimals, as the paper prints its savings; more where it would round to 100%.

    >>> format_percent(1 - 39_388_160 / 157_552_640), format_percent(0.99998)
    ('75.00%', '99.998%')
    """
    for decimals in range(2, 8):
        text = f"{fraction:.{decimals}%}"
        if fraction >= 1 or float(text[:-1]) < 100:
            break
    return text


def format_ratio(ratio: float) -> str:
    """Format a speed-up: one decimal, none from a thousand on.

    >>> format_ratio(31.13), format_ratio(1894.2)
    ('31.1×', '1,894×')
    """
    return f"{ratio:,.1f}×" if ratio < 1000 else f"{ratio:,.0f}×"


def format_significant(value: float) -> str:
    """Format a positive number with three significant digits at least, and no more than three decimals.

    >>> format_significant(0.1374), format_significant(2.718), format_significant(1541.13)
    ('0.137', '2.72', '1,541')
    """
    decimals = next((places for places, bound in ((3, 1), (2, 10), (1, 100)) if value < bound), 0)
    return f"{value:,.{decimals}f}"
