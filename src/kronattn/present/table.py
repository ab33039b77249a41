"""A table as plain data: what the terminal, Markdown, HTML and JSON are rendered from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

__all__ = ["NOTHING", "Cell", "Column", "Group", "Table", "tabulate", "to_json"]

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """One entry: what was found here and, beside it, what the paper prints."""

    text: str
    printed: str = ""
    # "good" or "bad" where a result is judged, "printed" for the paper's, "stored" for one of an earlier run.
    tone: str = ""


@dataclass(frozen=True)
class Column:
    """A heading; numbers are set flush right."""

    title: str
    numeric: bool = True


@dataclass(frozen=True)
class Group:
    """Rows that belong together, under a title of their own if it is not empty."""

    title: str
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Table:
    """A table as plain data; its notes stand below."""

    title: str
    columns: Sequence[Column]
    groups: Sequence[Group]
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[Sequence[Cell]]:
        """The rows of all groups."""
        return [row for group in self.groups for row in group.rows]

    def only(self, chosen: Sequence[int]) -> Table:
        """Some of its columns."""
        groups = [Group(group.title, [[row[at] for at in chosen] for row in group.rows]) for group in self.groups]
        return replace(self, columns=[self.columns[at] for at in chosen], groups=groups)


def tabulate(
    title: str,
    columns: Mapping[Any, Callable[[Any], Cell | str | None]],
    rows: Iterable[Any],
    *,
    group: Callable[[Any], str] = lambda row: "",
    notes: Sequence[str] = (),
) -> Table:
    """A table of records: a function for each column says what a record has there.

    Args:
        title: of the table.
        columns: by heading. The first names the record; the others hold numbers unless a :class:`Column` says so.
            A function that returns None has nothing to say; a column that says nothing for any record is left out.
        rows: the records.
        group: the title of a record's group; records of one group follow each other.
        notes: below the table.

    Example:
        >>> table = tabulate("Sizes", {"name": lambda r: r[0], "MB": lambda r: f"{r[1]:.1f}"}, [("x", 1.5)])
        >>> [cell.text for cell in table.rows[0]]
        ['x', '1.5']
    """
    heads = [c if isinstance(c, Column) else Column(c, numeric=at > 0) for at, c in enumerate(columns)]
    groups = [
        Group(name, [[_cell(value(row)) for value in columns.values()] for row in part])
        for name, part in groupby(rows, group)
    ]
    table = Table(title, heads, groups, notes)
    return table.only(
        [at for at in range(len(heads)) if not groups or any(row[at] != Cell(NOTHING) for row in table.rows)]
    )


def _cell(value: Cell | str | None) -> Cell:
    return value if isinstance(value, Cell) else Cell(NOTHING if value is None else value)


def to_json(table: Table) -> dict[str, Any]:
    """A table as one JSON object, its figures as they are shown; a printed value stands beside ours.

    >>> to_json(Table("Sizes", [Column("MB")], [Group("", [[Cell("1.5", printed="1.4MB")]])]))["rows"]
    [{'group': '', 'cells': ['1.5'], 'printed': ['1.4MB']}]
    """
    rows = [
        {"group": group.title, "cells": [cell.text for cell in row], "printed": [cell.printed for cell in row]}
        for group in table.groups
        for row in group.rows
    ]
    return {
        "title": table.title,
        "columns": [column.title for column in table.columns],
        "rows": rows,
        "notes": list(table.notes),
    }
