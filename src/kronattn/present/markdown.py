"""A table in Markdown, as the README and the guide have it."""

from __future__ import annotations

from collections.abc import Sequence

from kronattn.present.table import Cell, Column, Table

__all__ = ["to_markdown"]


def to_markdown(table: Table) -> str:
    """Return a table as Markdown: printed values in brackets, a group's title in a column before the others.

    >>> from kronattn.present import tabulate
    >>> print(to_markdown(tabulate("", {"": str, "MB": lambda row: Cell("1.5", "1.4")}, ["x"])))
    | | MB |
    |---|---:|
    | x | 1.5 (1.4) |
    """
    grouped = any(group.title for group in table.groups)
    columns = [*([Column("", numeric=False)] if grouped else []), *table.columns]
    lines = [
        *([f"**{table.title}**", ""] if table.title else []),
        _line([column.title for column in columns]),
        "|" + "|".join("---:" if column.numeric else "---" for column in columns) + "|",
        *(
            _line([*([group.title] if grouped else []), *map(_text, row)])
            for group in table.groups
            for row in group.rows
        ),
        *(line for note in table.notes for line in ("", note)),
    ]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _text(cell: Cell) -> str:
    return f"{cell.text} ({cell.printed})" if cell.printed else cell.text
