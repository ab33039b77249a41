"""Table 2 of the paper: what attention operators cost on one feature map, recomputed, and carried further."""

from kronattn.tables.operators.candidates import OPERATORS, Case
from kronattn.tables.operators.figure import draw_operators
from kronattn.tables.operators.measurement import CASES, QUICK_CASES, Measurement, Row, measure_operators
from kronattn.tables.operators.printed import PRINTED
from kronattn.tables.operators.render import operator_tables, to_json

__all__ = [
    "CASES",
    "OPERATORS",
    "PRINTED",
    "QUICK_CASES",
    "Case",
    "Measurement",
    "Row",
    "draw_operators",
    "measure_operators",
    "operator_tables",
    "to_json",
]
