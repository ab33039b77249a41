"""Table 2 of the paper: what attention operators cost on one feature map, recomputed, and carried further."""

from kronattn.tables.operators.candidates import OPERATORS, Case
from kronattn.tables.operators.printed import PRINTED
from kronattn.tables.operators.table import CASES, QUICK_CASES, draw_operators, measure_operators, operator_tables

__all__ = [
    "CASES",
    "OPERATORS",
    "PRINTED",
    "QUICK_CASES",
    "Case",
    "draw_operators",
    "measure_operators",
    "operator_tables",
]
