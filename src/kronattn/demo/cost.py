"""What the operators cost on a grid of a chosen size, measured when asked."""

from __future__ import annotations

from collections.abc import Callable

from kronattn.measure import Row
from kronattn.present import format_significant, tabulate, to_html
from kronattn.tables.operators.candidates import OPERATORS, Case
from kronattn.tables.operators.table import measure_operators

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
    found = measure_operators(cases, seconds=seconds, budget=_MEMORY, longest_call=_LONGEST_CALL)

    def over_regular(row: Row) -> str:
        ratio = found.ratio(row)
        return "" if ratio is None else f"{format_significant(ratio.value)}×"

    def figure(value: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda row: "" if row.failed else value(row)

    table = tabulate(
        f"One map of {size}×{size} positions, {channels} channels, on this computer",
        {
            "operator": lambda row: OPERATORS[row.candidate].label + (f": {row.failed}" if row.failed else ""),
            "MAdd": figure(lambda row: f"{row.madd:,}"),
            "MB": figure(lambda row: format_significant((row.memory_bytes or 0) / 1e6)),
            "ms": figure(lambda row: format_significant(row.time_ms or 0)),
            "over regular": figure(over_regular),
        },
        [row for row in found.rows if row.case == cases[-1].to_dict()],
    )
    return to_html(table)
