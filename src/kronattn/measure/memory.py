"""Peak memory of a call, measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["available_memory", "peak_memory"]


def peak_memory(call: Callable[[], Any], *, device: str | torch.device = "cpu", warm_up: bool = True) -> int:
    """Measure how many bytes a call has allocated at its peak, beyond what was allocated before it.

    The call's output counts, its input does not. The call runs in inference mode, once to warm up and once to be
    measured: on the CPU every allocation and release is recorded and replayed in order; on a GPU the allocator
    keeps the maximum itself. What libraries allocate behind PyTorch's back is not seen.

    Args:
        call: takes no arguments; its result is kept until the measurement ends.
        device: where it allocates, "cpu" or a CUDA device.
        warm_up: whether to run it once before; not needed if it has run already.

    Returns:
        Bytes. On a GPU every allocation is rounded up to a multiple of 512.

    Example:
        >>> peak_memory(lambda: torch.ones(1000) + torch.ones(1000))  # both terms live while the sum is made
        12000
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"memory can be measured on cpu and cuda, not on {device.type}")
    with torch.inference_mode():
        if warm_up:
            call()
        return _peak_on_cpu(call) if device.type == "cpu" else _peak_on_cuda(call, device)


def available_memory(device: str | torch.device = "cpu") -> int | None:
    """Return how many bytes could still be allocated on a device; None where the system does not say.

    Example:
        >>> available = available_memory()
        >>> available is None or available > 0
        True
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [limit for limit in (_available_to_system(), _available_to_group()) if limit is not None]
    return min(limits, default=None)


def _peak_on_cpu(call: Callable[[], Any]) -> int:
    with _quietly(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        output = call()
    results: Any = recorded.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    del output
    return peak


def _peak_on_cuda(call: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del output
    return peak


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the profiler from writing on standard error that it starts, stops and finds no GPU."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "6")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _available_to_system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _available_to_group() -> int | None:
    """What the control group of a container leaves; page cache counts as used, so it errs on the small side."""
    try:
        limit, used = (Path("/sys/fs/cgroup", name).read_text() for name in ("memory.max", "memory.current"))
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None
