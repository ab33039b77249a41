"""The report's section on Table 2: what the operators cost."""

from __future__ import annotations

from kronattn.measure import Comparison
from kronattn.present import format_ratio
from kronattn.report.section import Content, Drawing, Highlight, Settings
from kronattn.tables.operators.candidates import OPERATORS, Case
from kronattn.tables.operators.table import CASES, QUICK_CASES, draw_operators, measure_operators, operator_tables

__all__ = ["build"]

_INTRODUCTION = (
    "Multiply-adds, memory and time of one attention operator on one feature map: regular attention (Attn), "
    "regular attention on pooled keys and values (Attn+Pool), PyTorch's fused attention (Fused), and the two "
    "Kronecker attention operators. KAO_KV attends to the averages of rows and columns instead of to all "
    "positions; in KAO_QKV the averages also ask."
)


def build(settings: Settings) -> Content:
    """Measure the operators and return tables, the figure and the headline speed-ups."""
    found = measure_operators(
        QUICK_CASES if settings.quick else CASES,
        device=settings.device,
        dtype=settings.dtype,
        seconds=0.1 if settings.quick else 4.0,
        track=lambda cases: settings.track(cases, "Measuring operators"),
    )
    drawing = Drawing(
        draw_operators(found),
        "Cost against the number of positions, both on logarithmic scales. Lines join square grids, hollow marks "
        "are grids of other shapes (three axes), crosses are the values printed in the paper.",
        "Time, memory and multiply-adds of the operators against the number of positions: regular attention "
        "grows with the square of it, Kronecker attention more slowly.",
    )
    return Content(_INTRODUCTION, operator_tables(found), [drawing], _highlights(found))


def _highlights(found: Comparison) -> list[Highlight]:
    """The Kronecker operators' speed-ups at the largest size that regular attention was run on."""
    regular = [row for row in found.measured if row.candidate == "attn"]
    largest = max(regular, key=lambda row: Case.of(row.case).positions, default=None)
    highlights = []
    for name in ("kao_kv", "kao_qkv"):
        row = None if largest is None else found.find(name, largest)
        if row is not None and (speedup := found.ratio(row)) is not None:
            fused = found.ratio(row, "attn_fused")
            label = f"{OPERATORS[name].label} over regular attention at {Case.of(row.case).label}"
            beside = "" if fused is None else f", {format_ratio(fused.value)} over fused"
            highlights.append(Highlight(format_ratio(speedup.value), label + beside))
    return highlights
