"""A table in a terminal, whatever its width."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kronattn.present.table import Cell, Table

if TYPE_CHECKING:
    import rich.console
    import rich.measure
    import rich.table

__all__ = ["to_rich"]

_WIDEST_NAME = 24


def to_rich(table: Table, *, width: int) -> rich.console.Group:
    """Return a table for a terminal of that width: printed values beside ours or, if that is too wide, below; and if it
    still is, several tables below each other, each with the first column, so that no figure is cut off.

    >>> from kronattn.present import Column, Group
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
        if _widths(table.only([0, *chosen[-1], column]), separator="\n").minimum <= width:
            chosen[-1].append(column)
        else:
            chosen.append([column])
    parts = [replace(table.only([0, *columns]), title="", notes=()) for columns in chosen]
    parts[0] = replace(parts[0], title=table.title)
    parts[-1] = replace(parts[-1], notes=table.notes)
    return parts


def _least_width(table: Table, at: int, separator: str) -> int | None:
    """Of a column: Rich would rather cut figures off than words, and the first is what a row is found by."""
    column = table.columns[at]
    if at and not column.numeric:
        return None
    lines = (line for row in table.rows for line in _lines(row[at], separator))
    longest = max(map(len, [column.title, *lines]))
    return longest if column.numeric else min(longest, _WIDEST_NAME)


def _lines(cell: Cell, separator: str) -> list[str]:
    return (cell.text + separator + cell.printed if cell.printed else cell.text).split("\n")


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
