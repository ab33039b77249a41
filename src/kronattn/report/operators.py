"""The report's section on Table 2: what the operators cost."""

from __future__ import annotations

from kronattn.report.section import Content, Drawing, Highlight, Settings
from kronattn.tables.operators import (
    CASES,
    OPERATORS,
    QUICK_CASES,
    Measurement,
    draw_operators,
    measure_operators,
    operator_tables,
)
from kronattn.tables.rendering import format_ratio

__all__ = ["build"]

_INTRODUCTION = (
    "Multiply-adds, memory and time of one attention operator on one feature map: regular attention (Attn), "
    "regular attention on pooled keys and values (Attn+Pool), PyTorch's fused attention (Fused), and the two "
    "Kronecker attention operators. KAO_KV attends to the averages of rows and columns instead of to all "
    "positions; in KAO_QKV the averages also ask."
)


def build(settings: Settings) -> Content:
    """Measure the operators and return tables, the figure and the headline speed-ups."""
    measured = measure_operators(
        QUICK_CASES if settings.quick else CASES,
        device=settings.device,
        dtype=settings.dtype,
        seconds=0.1 if settings.quick else 4.0,
        track=lambda cases: settings.track(cases, "Measuring operators"),
    )
    drawing = Drawing(
        draw_operators(measured.rows),
        "Cost against the number of positions, both on logarithmic scales. Lines join square grids, hollow marks "
        "are grids of other shapes (three axes), crosses are the values printed in the paper.",
        "Time, memory and multiply-adds of the operators against the number of positions: regular attention "
        "grows with the square of it, Kronecker attention more slowly.",
    )
    return Content(_INTRODUCTION, operator_tables(measured), [drawing], _highlights(measured))


def _highlights(measured: Measurement) -> list[Highlight]:
    """The Kronecker operators' speed-ups at the largest size that regular attention was run on."""
    compared = [row for row in measured.rows if row.speedup is not None]
    largest = max((row.case for row in compared), key=lambda case: case.positions, default=None)
    return [
        Highlight(
            format_ratio(row.speedup),
            f"{OPERATORS[row.operator].label} over regular attention at {row.case.label}"
            + (f", {format_ratio(row.speedup_over_fused)} over fused" if row.speedup_over_fused else ""),
        )
        for row in compared
        if row.case == largest and row.operator in ("kao_kv", "kao_qkv") and row.speedup is not None
    ]
