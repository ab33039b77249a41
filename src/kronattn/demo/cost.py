"""What the operators cost on a grid of a chosen size, measured when asked."""

from __future__ import annotations

from kronattn.present import Cell, Column, Group, Table, format_significant, to_html
from kronattn.tables.operators import OPERATORS, Case, measure_operators

__all__ = ["cost_html"]

# The page should answer within a second or two and leave the computer usable.
_SECONDS = 0.6
_LONGEST_CALL = 0.5
_MEMORY = 600 * 10**6


def cost_html(size: int, channels: int, seconds: float = _SECONDS) -> str:
    """Multiply-adds, memory and time of every operator on one map of size × size, as an HTML table.

    Example:
        >>> "KAO_QKV" in cost_html(8, 8, seconds=0.01)
        True
    """
    # A small case first: its time tells whether an operator would take too long on the large one.
    cases = [Case((side, side), batch=1, channels=channels) for side in sorted({min(16, size), size})]
    measured = measure_operators(cases, seconds=seconds, memory_budget=_MEMORY, longest_call=_LONGEST_CALL)
    rows = {row.operator: row for row in measured.rows if row.case == cases[-1]}
    reasons = {one.operator: one.reason for one in measured.left_out if one.case == cases[-1]}
    cells = []
    for name, operator in OPERATORS.items():
        if name in rows:
            row = rows[name]
            speed = "" if row.speedup is None else f"{format_significant(row.speedup)}×"
            memory, time = format_significant(row.memory_bytes / 1e6), format_significant(row.time_ms)
            cells.append([Cell(operator.label), Cell(f"{row.madd:,}"), Cell(memory), Cell(time), Cell(speed)])
        else:
            cells.append([Cell(f"{operator.label}: {reasons[name]}"), *[Cell("") for _ in range(4)]])
    heads = [Column("operator", numeric=False), *(Column(title) for title in ("MAdd", "MB", "ms", "over regular"))]
    title = f"One map of {size}×{size} positions, {channels} channels, on this computer"
    return to_html(Table(title, heads, [Group("", cells)]))
