"""Measuring Table 2: every operator on every case that memory and patience allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kronattn.measure import (
    Timing,
    available_memory,
    count_madd,
    describe_environment,
    peak_memory,
    resolve_device,
    time_calls,
)
from kronattn.tables.operators.candidates import OPERATORS, Case
from kronattn.tables.operators.printed import PRINTED

__all__ = ["CASES", "QUICK_CASES", "LeftOut", "Measurement", "Row", "measure_operators"]

# The paper's three sizes, three larger ones, and three axes.
CASES = (
    *(Case((size, size)) for size in (14, 28, 56, 112, 224, 448)),
    Case((16, 28, 28)),
)
QUICK_CASES = (Case((14, 14)), Case((28, 28)), Case((4, 8, 8)))

_MEMORY_BUDGET = 2 * 10**9
_LONGEST_CALL = 1.5


@dataclass(frozen=True)
class Row:
    """What one operator costs on one case; savings and speed-ups are over ``attn`` unless named otherwise.

    ``madd`` is for one sample, as in the paper; memory and time are for the whole batch. Ratios to an operator
    that was not run are None.
    """

    case: Case
    operator: str
    madd: int
    cost_saving: float
    memory_bytes: int
    memory_saving: float | None
    timing: Timing
    speedup: float | None
    speedup_over_fused: float | None
    paper: dict[str, str] | None

    @property
    def time_ms(self) -> float:
        """The median time of a call, in milliseconds."""
        return self.timing.median * 1e3


@dataclass(frozen=True)
class LeftOut:
    """An operator that was not run on a case: what it would have needed, and what was allowed."""

    case: Case
    operator: str
    needed: str
    allowed: str

    @property
    def reason(self) -> str:
        """Why it was not run, in words."""
        return f"would need {self.needed}, more than {self.allowed}"


@dataclass(frozen=True)
class Measurement:
    """All rows, what is missing among them, and what they were measured with."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    environment: dict[str, str | int] = field(default_factory=dict)


def measure_operators(
    cases: Sequence[Case] = CASES,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seconds: float = 4.0,
    memory_budget: int | None = None,
    longest_call: float = _LONGEST_CALL,
    track: Callable[[Sequence[Case]], Iterable[Case]] = iter,
) -> Measurement:
    """Measure multiply-adds, memory and time of every operator on every case.

    Args:
        cases: smaller ones first: times of small cases tell which large ones would take too long.
        device, dtype: of the feature maps.
        seconds: of timing for each case; every operator runs a few times however long that takes.
        memory_budget: bytes; operators that would need more are left out. By default 2 GB, or half of what is
            available if that is less; on a GPU half of what is available.
        longest_call: seconds; operators whose single call would take longer are left out.
        track: may wrap the loop over cases, in a progress bar for instance.

    Returns:
        The rows in the order of ``cases``, and what was left out.

    Example:
        >>> measured = measure_operators([Case((6, 6))], seconds=0.01)
        >>> [(row.operator, row.madd) for row in measured.rows][-1]
        ('kao_qkv_as_printed', 3072)
    """
    device = resolve_device(str(device))
    budget = _default_budget(device) if memory_budget is None else memory_budget
    measured = Measurement(environment=describe_environment(device, dtype))
    for case in track(cases):
        madd = {name: _madd_of_one_sample(name, case) for name in OPERATORS}
        chosen = []
        for name in OPERATORS:
            limit = _exceeded(name, case, madd[name], measured.rows, budget, longest_call, dtype)
            if limit is None:
                chosen.append(name)
            else:
                measured.left_out.append(LeftOut(case, name, *limit))
        measured.rows.extend(_measure_case(case, chosen, madd, device, dtype, seconds))
    return measured


def _measure_case(
    case: Case, chosen: Sequence[str], madd: dict[str, int], device: torch.device, dtype: torch.dtype, seconds: float
) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.batch, case.channels, *case.grid, generator=generator).to(device, dtype)
    calls = {name: _call(_module(name, case).to(device, dtype), OPERATORS[name].input_of(x)) for name in chosen}
    timings = time_calls(calls, device=device, seconds=seconds)
    memory = {name: peak_memory(call, device=device, warm_up=False) for name, call in calls.items()}

    def times_as_fast(as_what: str, name: str) -> float | None:
        return timings[as_what].median / timings[name].median if as_what in timings else None

    return [
        Row(
            case=case,
            operator=name,
            madd=madd[name],
            cost_saving=1 - madd[name] / madd["attn"],
            memory_bytes=memory[name],
            memory_saving=1 - memory[name] / memory["attn"] if "attn" in memory else None,
            timing=timings[name],
            speedup=times_as_fast("attn", name),
            speedup_over_fused=times_as_fast("attn_fused", name),
            paper=PRINTED.get((case.grid, name)) if (case.batch, case.channels) == (8, 8) else None,
        )
        for name in chosen
    ]


def _module(name: str, case: Case) -> nn.Module:
    return OPERATORS[name].build(case.channels).eval()


def _call(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    return lambda: module(x)


def _madd_of_one_sample(name: str, case: Case) -> int:
    x = torch.empty(1, case.channels, *case.grid, device="meta")
    return count_madd(_module(name, case), OPERATORS[name].input_of(x))


def _exceeded(
    name: str,
    case: Case,
    madd: int,
    earlier: Sequence[Row],
    budget: int,
    longest: float,
    dtype: torch.dtype,
) -> tuple[str, str] | None:
    """What the operator would need and the limit that this exceeds; None if it may run."""
    needed = OPERATORS[name].bytes_needed(case, dtype.itemsize)
    if needed > budget:
        return f"{needed / 1e9:,.1f} GB", f"{budget / 1e9:,.1f} GB of memory"
    largest = max((row for row in earlier if row.operator == name), key=lambda row: row.madd, default=None)
    if largest is not None and largest.madd < madd:
        seconds = largest.timing.median * madd / largest.madd
        if seconds > longest:
            return f"about {seconds:,.1f} s", f"{longest:g} s for a call"
    return None


def _default_budget(device: torch.device) -> int:
    available = available_memory(device)
    if available is None:
        return _MEMORY_BUDGET
    return available // 2 if device.type == "cuda" else min(_MEMORY_BUDGET, available // 2)
