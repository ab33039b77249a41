"""How each kind of comparison is shown: its tables, and its figure where it has one. A new kind is one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kronattn.bench.insert import insert_table
from kronattn.bench.latency import latency_table
from kronattn.bench.networks import speed_table
from kronattn.bench.operators import cost_table, draw_costs
from kronattn.measure import Comparison
from kronattn.present import Table
from kronattn.tables.operators.table import draw_operators, operator_tables
from kronattn.tables.segmentation.heads import draw_heads, head_table

__all__ = ["draw", "tables"]

_UNFINISHED = "Not complete: the run ended before everything was measured."

_SHOWN: dict[str, tuple[Callable[[Comparison], Table | Sequence[Table]], Callable[[Comparison], Any] | None]] = {
    "table 2": (operator_tables, draw_operators),
    "operators": (cost_table, draw_costs),
    "networks": (speed_table, None),
    "heads": (head_table, draw_heads),
    "latency": (latency_table, None),
    "insert": (insert_table, None),
}


def tables(found: Comparison) -> list[Table]:
    """A comparison for readers.

    >>> [table.title for table in tables(Comparison("operators", "copy"))]
    ['Attention beside a copy of its input']
    """
    shown = _shown(found)[0](found)
    found_tables = [shown] if isinstance(shown, Table) else list(shown)
    if found.unfinished and found_tables:
        last = found_tables[-1]
        found_tables[-1] = replace(last, notes=[*last.notes, _UNFINISHED])
    return found_tables


def draw(found: Comparison) -> Any:
    """A comparison as a figure."""
    drawn = _shown(found)[1]
    if drawn is None:
        drawn_kinds = ", ".join(kind for kind, (_, figure) in _SHOWN.items() if figure is not None)
        raise ValueError(f"there is no figure of {found.kind}: there is for {drawn_kinds}")
    return drawn(found)


def _shown(found: Comparison) -> Any:
    if found.kind not in _SHOWN:
        raise ValueError(f"unknown kind of comparison {found.kind!r}: known are {', '.join(_SHOWN)}")
    return _SHOWN[found.kind]
