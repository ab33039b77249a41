"""Table 2 for readers: as tables beside the printed values, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from kronattn.tables.operators.candidates import OPERATORS, Case
from kronattn.tables.operators.measurement import Measurement, Row
from kronattn.tables.operators.printed import PRINTED
from kronattn.tables.rendering import Cell, Column, Group, Table, format_percent, format_ratio, format_significant

__all__ = ["operator_tables", "to_json"]

_NOTHING = "–"
_COLUMNS = (
    Column("Operator", numeric=False),
    Column("MAdd"),
    Column("Saved"),
    Column("MB"),
    Column("Saved"),
    Column("ms"),
    Column("Speed-up"),
    Column("vs fused"),
)


def operator_tables(measured: Measurement) -> list[Table]:
    """Return the paper's table beside its printed values and, if larger cases were run, a table of those.

    Example:
        >>> from kronattn.tables.operators import Case, measure_operators
        >>> [table.title for table in operator_tables(measure_operators([Case((14, 14))], seconds=0.01))]
        ["The paper's Table 2, recomputed"]
    """
    inside = [row for row in measured.rows if _in_paper(row.case)]
    beyond = [row for row in measured.rows if not _in_paper(row.case)]
    tables = []
    if inside:
        notes = [
            "Sizes are batch × grid × channels. MAdd: multiply-adds for one sample. MB: 10⁶ bytes allocated at the "
            "peak, output included. ms: median for the whole batch. Savings and speed-up: over Attn. "
            "Grey: as printed in the paper.",
            "Attn builds its coefficient matrix, as the paper's does. The printed megabytes come to about four "
            "such matrices; the peak here holds two. The fused operator is not in the paper: same result as "
            "Attn, by PyTorch's fused kernel.",
            "KAO_QKV counts the image's mean once, as the theorem asks for; KAO_QKV printed is the paper's equation, "
            "which counts it once for each axis, and has the paper's figures beside it.",
        ]
        tables.append(_table("The paper's Table 2, recomputed", inside, [*notes, *_left_out(measured, True)]))
    if beyond:
        tables.append(_table("Beyond the paper: larger grids, three axes", beyond, _left_out(measured, False)))
    return tables


def to_json(measured: Measurement) -> dict[str, Any]:
    """Return the measurement as one JSON object: rows, what was left out, environment.

    Example:
        >>> from kronattn.tables.operators import Case, measure_operators
        >>> sorted(to_json(measure_operators([Case((6, 6))], seconds=0.01)))
        ['environment', 'left_out', 'rows']
    """
    return {
        "rows": [
            {
                "batch": row.case.batch,
                "grid": list(row.case.grid),
                "channels": row.case.channels,
                "operator": row.operator,
                "madd": row.madd,
                "cost_saving": row.cost_saving,
                "memory_bytes": row.memory_bytes,
                "memory_saving": row.memory_saving,
                "time_ms": row.time_ms,
                "time_ms_quartiles": [row.timing.lower * 1e3, row.timing.upper * 1e3],
                "speedup": row.speedup,
                "speedup_over_fused": row.speedup_over_fused,
                "paper": row.paper,
            }
            for row in measured.rows
        ],
        "left_out": [
            {
                "batch": missing.case.batch,
                "grid": list(missing.case.grid),
                "channels": missing.case.channels,
                "operator": missing.operator,
                "reason": missing.reason,
            }
            for missing in measured.left_out
        ],
        "environment": measured.environment,
    }


def _in_paper(case: Case) -> bool:
    """Whether the paper has the case; the fused operator's rows stand among the paper's though it has none."""
    return (case.batch, case.channels) == (8, 8) and (case.grid, "attn") in PRINTED


def _table(title: str, rows: Iterable[Row], notes: Sequence[str]) -> Table:
    groups = [(case, [_cells(row) for row in group]) for case, group in groupby(rows, key=lambda row: row.case)]
    cells = [row for _, group in groups for row in group]
    # Beyond some size regular attention is nowhere run, and the columns that compare with it have nothing to say.
    shown = [at for at in range(len(_COLUMNS)) if any(row[at].text != _NOTHING for row in cells)]
    return Table(
        title,
        [_COLUMNS[at] for at in shown],
        [Group(case.label, [[row[at] for at in shown] for row in group]) for case, group in groups],
        notes,
    )


def _cells(row: Row) -> list[Cell]:
    paper = row.paper or {}

    def ratio(value: float | None) -> str:
        return _NOTHING if value is None else format_ratio(value)

    saving = _NOTHING if row.memory_saving is None else format_percent(row.memory_saving)

    return [
        Cell(OPERATORS[row.operator].label),
        Cell(f"{row.madd:,}", paper.get("madd", "")),
        Cell(format_percent(row.cost_saving), paper.get("cost_saving", "")),
        Cell(format_significant(row.memory_bytes / 1e6), paper.get("memory", "")),
        Cell(saving, paper.get("memory_saving", "")),
        Cell(format_significant(row.time_ms), paper.get("time", "")),
        Cell(ratio(row.speedup), paper.get("speedup", "")),
        Cell(ratio(row.speedup_over_fused)),
    ]


def _left_out(measured: Measurement, in_paper: bool) -> list[str]:
    by_limit: dict[str, list[str]] = {}
    for one in measured.left_out:
        if _in_paper(one.case) == in_paper:
            entry = f"{OPERATORS[one.operator].label} at {one.case.label} ({one.needed})"
            by_limit.setdefault(one.allowed, []).append(entry)
    return [f"Left out, as needing more than {limit}: {', '.join(names)}." for limit, names in by_limit.items()]
