"""Times that can be compared on a noisy machine: candidates take turns within one run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Timing", "time_calls"]


@dataclass(frozen=True)
class Timing:
    """Seconds that one call takes: the median over the rounds, and the quartiles around it.

    >>> Timing(median=2e-3, lower=1.9e-3, upper=2.2e-3, rounds=9).median
    0.002
    """

    median: float
    lower: float
    upper: float
    rounds: int


def time_calls(
    calls: Mapping[str, Callable[[], Any]],
    *,
    device: str | torch.device = "cpu",
    seconds: float = 3.0,
    least_rounds: int = 3,
    most_rounds: int = 25,
    sample_seconds: float = 0.02,
) -> dict[str, Timing]:
    """Time several calls against each other, in inference mode.

    The calls take turns, round after round, so that whatever else the machine does meets them all alike. In its
    turn a call runs once or, if it is short, as often as it takes to fill ``sample_seconds``.

    Args:
        calls: by name; none takes arguments.
        device: where they run: on CUDA devices the GPU's own clock is read.
        seconds: that all rounds together should take; the fewest rounds may take longer.
        least_rounds, most_rounds: bounds on the number of rounds.
        sample_seconds: that one measurement of a short call should take.

    Returns:
        A :class:`Timing` for each name.

    Example:
        >>> x = torch.randn(64, 64)
        >>> timings = time_calls({"sum": x.sum, "product": lambda: x @ x}, seconds=0.01, sample_seconds=1e-4)
        >>> sorted(timings), timings["sum"].median > 0
        (['product', 'sum'], True)
    """
    device = torch.device(device)
    measure = _seconds_on_cuda if device.type == "cuda" else _seconds_on_cpu
    repeats: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        cost = 0.0
        for name, call in calls.items():
            once = _warm_up(call, measure, device)
            repeats[name] = max(1, math.ceil(sample_seconds / once))
            cost += once * repeats[name]
        rounds = min(most_rounds, max(least_rounds, int(seconds / max(cost, 1e-9))))
        for _ in range(rounds):
            for name, call in calls.items():
                samples[name].append(measure(call, repeats[name], device))
    return {name: _summary(values) for name, values in samples.items()}


def _warm_up(call: Callable[[], Any], measure: Callable[..., float], device: torch.device) -> float:
    """A first estimate of a call's seconds. The very first call is not it: it may compile and allocate."""
    first = measure(call, 1, device)
    if first > 0.5:
        return first
    return max(1e-7, min(measure(call, 1, device) for _ in range(3)))


def _seconds_on_cpu(call: Callable[[], Any], repeats: int, _: torch.device) -> float:
    start = time.perf_counter()
    for _repeat in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _seconds_on_cuda(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats


def _summary(samples: list[float]) -> Timing:
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return Timing(median, lower, upper, len(samples))
