"""Table 2: every operator on every case that memory and patience allow, beside the printed values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from kronattn.measure import Call, Comparison, Row, Way, compare, count_madd, memory_budget
from kronattn.measure.environment import resolve_device, resolve_dtype
from kronattn.present import Cell, Table, format_percent, format_ratio, format_significant, tabulate
from kronattn.present.charts import Panel, Series, draw_panels
from kronattn.tables.operators.candidates import OPERATORS, Case, with_map
from kronattn.tables.operators.printed import PRINTED

__all__ = ["CASES", "QUICK_CASES", "draw_operators", "measure_operators", "operator_tables"]

# The paper's three sizes, three larger ones, and three axes.
CASES = (
    *(Case((size, size)) for size in (14, 28, 56, 112, 224, 448)),
    Case((16, 28, 28)),
)
QUICK_CASES = (Case((14, 14)), Case((28, 28)), Case((4, 8, 8)))

_MEMORY_BUDGET = 2 * 10**9
_LONGEST_CALL = 1.5


def measure_operators(
    cases: Sequence[Case] = CASES,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = torch.float32,
    seconds: float = 4.0,
    budget: int | None = None,
    longest_call: float = _LONGEST_CALL,
    track: Callable[[Sequence[Way]], Iterable[Way]] = iter,
) -> Comparison:
    """Measure multiply-adds, memory and time of every operator on every case.

    Args:
        cases: smaller ones first: times of small cases tell which large ones would take too long.
        device, dtype: of the feature maps.
        seconds: of timing for each case; every operator runs a few times however long that takes.
        budget: bytes; operators that would need more are left out. By default 2 GB, or half of what is available if
            that is less; on a GPU half of what is available.
        longest_call: seconds; operators whose single call would take longer are left out.
        track: may wrap the loop over cases, in a progress bar for instance.

    Example:
        >>> found = measure_operators([Case((6, 6))], seconds=0.01)
        >>> [(row.candidate, row.madd) for row in found.rows][-1]
        ('kao_qkv_as_printed', 3072)
    """
    device, dtype = resolve_device(str(device)), resolve_dtype(dtype)
    allowed = memory_budget(device, _MEMORY_BUDGET) if budget is None else budget
    madd: dict[tuple[str, Case], int] = {}

    def count(name: str, way: Way) -> dict[str, int]:
        case = Case.of(way.case)
        x = torch.empty(1, case.channels, *case.grid, device="meta")
        madd[name, case] = count_madd(_module(name, case), OPERATORS[name].input_of(x))
        return {"madd": madd[name, case]}

    def limit(name: str, way: Way, found: Comparison) -> str:
        case = Case.of(way.case)
        needed = OPERATORS[name].bytes_needed(case, dtype.itemsize)
        if needed > allowed:
            return f"would need {needed / 1e9:,.1f} GB, more than {allowed / 1e9:,.1f} GB of memory"
        earlier = [row for row in found.measured if row.candidate == name and row.madd and row.time_ms]
        largest = max(earlier, key=lambda row: row.madd or 0, default=None)
        if largest is not None and largest.madd and largest.time_ms and largest.madd < madd[name, case]:
            taken = largest.time_ms / 1e3 * madd[name, case] / largest.madd
            if taken > longest_call:
                return f"would need about {taken:,.1f} s, more than {longest_call:g} s for a call"
        return ""

    def prepare(name: str, way: Way) -> Call:
        case = Case.of(way.case)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(case.batch, case.channels, *case.grid, generator=generator).to(device, dtype)
        module, given = _module(name, case).to(device, dtype), OPERATORS[name].input_of(x)
        return Call(lambda: module(given))

    ways = [Way(case.to_dict()) for case in cases]
    return compare(
        "table 2",
        with_map(),
        ways,
        prepare,
        base="attn",
        limit=limit,
        count=count,
        device=device,
        dtype=dtype,
        seconds=seconds,
        track=track,
    )


def _module(name: str, case: Case) -> nn.Module:
    build = OPERATORS[name].build
    assert build is not None
    return build(case.channels).eval()


def operator_tables(found: Comparison) -> list[Table]:
    """Return the paper's table beside its printed values and, if larger cases were run, a table of those.

    Example:
        >>> [table.title for table in operator_tables(measure_operators([Case((14, 14))], seconds=0.01))]
        ["The paper's Table 2, recomputed"]
    """
    notes = [
        "Sizes are batch × grid × channels. MAdd: multiply-adds for one sample. MB: 10⁶ bytes allocated at the "
        "peak, output included. ms: median for the whole batch. Saved, speed-up: over Attn. "
        "Grey: as printed in the paper.",
        "Attn materialises its coefficient matrix, as the paper's does. The printed megabytes come to about four "
        "such matrices; the peak here holds two. The fused operator is not in the paper: same result as "
        "Attn, by PyTorch's fused kernel.",
        "KAO_QKV counts the image's mean once, as the theorem asks for; KAO_QKV printed is the paper's equation, which "
        "counts it once for each axis, and has the paper's figures beside it.",
    ]
    tables = []
    for inside, title, said in (
        (True, "The paper's Table 2, recomputed", notes),
        (False, "Beyond the paper: larger grids, three axes", []),
    ):
        rows = [row for row in found.rows if _in_paper(row) == inside]
        if rows:
            tables.append(_table(title, found, rows, said))
    return tables


def _table(title: str, found: Comparison, rows: Sequence[Row], notes: Sequence[str]) -> Table:
    def saved(row: Row, figure: str) -> str | None:
        share = found.share(row, "attn", figure)
        return None if share is None else format_percent(1 - share)

    def over(row: Row, base: str) -> str | None:
        ratio = found.ratio(row, base)
        return None if ratio is None else format_ratio(ratio.value)

    def cost_saved(row: Row) -> str:
        base = next(one.madd for one in found.rows if one.candidate == "attn" and one.same_way(row))
        return format_percent(1 - (row.madd or 0) / (base or 1))

    return tabulate(
        title,
        {
            "Operator": lambda row: OPERATORS[row.candidate].label,
            "MAdd": lambda row: Cell(f"{row.madd:,}", printed(row, "madd")),
            "Saved": lambda row: Cell(cost_saved(row), printed(row, "cost_saving")),
            "MB": lambda row: Cell(format_significant(row.memory_bytes / 1e6), printed(row, "memory")),
            "MB saved": lambda row: _or_nothing(saved(row, "memory_bytes"), printed(row, "memory_saving")),
            "ms": lambda row: Cell(format_significant(row.time_ms), printed(row, "time")),
            "Speed-up": lambda row: _or_nothing(over(row, "attn"), printed(row, "speedup")),
            "vs fused": lambda row: over(row, "attn_fused"),
        },
        [row for row in rows if not row.failed],
        group=lambda row: Case.of(row.case).label,
        notes=[*notes, *found.left_out(_name, rows)],
    )


def _name(row: Row) -> str:
    return f"{OPERATORS[row.candidate].label} at {Case.of(row.case).label}"


def _or_nothing(text: str | None, beside: str) -> Cell | None:
    return None if text is None else Cell(text, beside)


def printed(row: Row, figure: str) -> str:
    """What the paper prints for an operator on a case, or "".

    >>> printed(Row("kao_kv", {"batch": 8, "channels": 8, "grid": [14, 14]}), "speedup")
    '3.5×'
    """
    return PRINTED.get((tuple(row.case["grid"]), row.candidate), {}).get(figure, "") if _in_paper(row) else ""


def _in_paper(row: Row) -> bool:
    """Whether the paper has the case; the fused operator's rows stand among the paper's though it has none."""
    return (row.case["batch"], row.case["channels"]) == (8, 8) and (tuple(row.case["grid"]), "attn") in PRINTED


def draw_operators(found: Comparison) -> object:
    """Draw time, memory and multiply-adds against the number of positions, on logarithmic scales.

    Lines join the square grids; points of their own are grids of other shapes; crosses are the paper's values.

    Example:
        >>> measured = measure_operators([Case((4, 4)), Case((6, 6))], seconds=0.01)
        >>> [axis.get_ylabel() for axis in draw_operators(measured).axes]
        ['milliseconds', 'megabytes', 'multiply-adds']
    """
    panels: list[tuple[str, str, Callable[[Row], float], str]] = [
        ("Time of a call", "milliseconds", lambda row: row.time_ms or 0, "time"),
        ("Peak memory of a call", "megabytes", lambda row: (row.memory_bytes or 0) / 1e6, "memory"),
        ("Multiply-adds of one sample", "multiply-adds", lambda row: float(row.madd or 0), "madd"),
    ]

    def series(name: str, value: Callable[[Row], float], figure: str) -> Series:
        rows = [(Case.of(row.case), row) for row in found.measured if row.candidate == name]
        return Series(
            name,
            OPERATORS[name].label,
            line=[(case.positions, value(row)) for case, row in rows if case.is_square],
            others=[(case.positions, value(row)) for case, row in rows if not case.is_square],
            printed=[(case.positions, _number(printed(row, figure))) for case, row in rows if printed(row, figure)],
        )

    cases = [Case.of(row.case) for row in found.measured]
    sizes = sorted({case.grid[0] for case in cases if case.is_square})
    others = dict.fromkeys("×".join(map(str, case.grid)) for case in cases if not case.is_square)
    return draw_panels(
        [Panel(title, unit, [series(name, value, key) for name in with_map()]) for title, unit, value, key in panels],
        xlabel="positions",
        ticks={size**2: f"{size}²" for size in sizes},
        width=13,
        others=f"other grids ({', '.join(others)})",
    )


def _number(text: str) -> float:
    """The printed value in the axis's unit: "0.63m" is millions, "1,262.6MB" and "5.8ms" are taken as they are.

    >>> _number("0.63m"), _number("1,262.6MB")
    (630000.0, 1262.6)
    """
    digits = re.match(r"[\d.,]+", text)
    assert digits is not None
    return float(digits[0].replace(",", "")) * (1e6 if text.endswith("m") else 1)
