"""Times that can be compared on a noisy machine: candidates take turns within one run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Timing", "quartiles", "replayed", "time_calls"]

# Seconds beyond which what a first call does besides (allocate, compile) no longer shows.
_LONG = 0.5


@dataclass(frozen=True)
class Timing:
    """Seconds that one call takes: the median over its turns, and the quartiles around it."""

    median: float
    lower: float
    upper: float
    turns: int


def time_calls(
    calls: Mapping[str, Callable[[], Any]],
    *,
    device: str | torch.device = "cpu",
    seconds: float = 4.0,
    least: int = 3,
    most: int = 15,
    sample_seconds: float = 0.02,
) -> dict[str, Timing]:
    """Time several calls against each other, in inference mode.

    The calls take turns, spread evenly over the run, so that whatever else the machine does meets them all alike.
    In its turn a call runs once or, if it is short, once to warm up and then as often as it takes to fill
    ``sample_seconds``, of which the median counts. Short calls have more turns than long ones.

    Args:
        calls: by name; none takes arguments.
        device: where they run: on CUDA devices the GPU's own clock is read.
        seconds: that all turns together should take; the fewest turns may take longer.
        least, most: bounds on the number of turns of a call.
        sample_seconds: that one turn of a short call should take.

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
    with torch.inference_mode():
        samples = {name: _warm_up(call, measure, device) for name, call in calls.items()}
        once = {name: max(1e-7, min(values)) for name, values in samples.items()}
        repeats = {name: max(1, math.ceil(sample_seconds / once[name])) for name in calls}
        turns = _turns({name: once[name] * repeats[name] for name in calls}, seconds, least, most)
        for name, values in samples.items():
            if once[name] > _LONG:
                turns[name] -= 1  # its warm-up was as good as a turn
            else:
                values.clear()
        for name in _schedule(turns):
            if repeats[name] > 1:
                # Another call had the caches and the allocator to itself in between.
                calls[name]()
            samples[name].append(measure(calls[name], repeats[name], device))
    spreads = {name: quartiles(values) for name, values in samples.items()}
    return {name: Timing(mid, low, high, len(samples[name])) for name, (low, mid, high) in spreads.items()}


def replayed(call: Callable[[Any], Any], inputs: Sequence[Any]) -> Callable[[], None]:
    """A call on each of several inputs as one CUDA graph: the device's own time, without the host's.

    Inputs that together exceed the caches find nothing of theirs there when it is their turn; outputs stay alive, so
    that they take turns, too. A graph knows where all of these and the weights lie, but does not keep them: its replay
    does.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for turn in range(3):
            call(inputs[turn % len(inputs)])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(x) for x in inputs]

    def replay(kept: Any = (call, inputs, outputs)) -> None:
        graph.replay()

    return replay


def _turns(costs: Mapping[str, float], seconds: float, least: int, most: int) -> dict[str, int]:
    """Share out the time: what the cheaper calls leave of their share goes to the dearer ones."""
    turns = {}
    for rank, (name, cost) in enumerate(sorted(costs.items(), key=lambda item: item[1])):
        turns[name] = min(most, max(least, int(seconds / (len(costs) - rank) / cost)))
        seconds -= turns[name] * cost
    return {name: turns[name] for name in costs}


def _schedule(turns: Mapping[str, int]) -> list[str]:
    """Names in the order of their turns, each name's spread evenly.

    >>> _schedule({"long": 1, "short": 2})
    ['short', 'long', 'short']
    """
    moments = [((turn + 0.5) / count, name) for name, count in turns.items() for turn in range(count)]
    return [name for _, name in sorted(moments, key=lambda moment: moment[0])]


def _warm_up(call: Callable[[], Any], measure: Callable[..., float], device: torch.device) -> list[float]:
    """First estimates of a call's seconds; the very first call is only one for those that take long anyway."""
    if device.type == "cuda":
        call()  # kernels are loaded, some are compiled
    first = measure(call, 1, device)
    return [first] if first > _LONG else [measure(call, 1, device) for _ in range(3)]


def _seconds_on_cpu(call: Callable[[], Any], repeats: int, _: torch.device) -> float:
    # The median and not the mean: a thread that has to wait for its core makes one call a hundred times longer.
    durations = []
    for _repeat in range(repeats):
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def _seconds_on_cuda(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile; of one value, itself.

    >>> quartiles([1, 2, 3, 4, 5])
    [2.0, 3.0, 4.0]
    """
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3
