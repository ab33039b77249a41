"""How many threads a command computes with: those that it was told, or as many as there are cores free for it.

PyTorch's threads wait for each other by spinning. Beside another job on the same cores they spin against it, and a
forward of 20 ms may take seconds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

__all__ = ["Busy", "allowed_cores", "take_threads", "use_threads"]

_CGROUP = Path("/sys/fs/cgroup")
# Seconds that the load is watched for, at least.
_WATCHED = 0.1


class Busy:
    """How many cores others keep busy, from now on until it is asked.

    Example:
        >>> Busy().cores() >= 0
        True
    """

    def __init__(self) -> None:
        self._start = _ticks(), _own_seconds(), time.monotonic()

    def cores(self) -> float:
        rest = _WATCHED - (time.monotonic() - self._start[2])
        if rest > 0:
            time.sleep(rest)
        before, own, then = self._start
        now = _ticks()
        if before is None or now is None:
            # Not Linux: the average of the last minute.
            return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        seconds = time.monotonic() - then
        busy = (now - before) / os.sysconf("SC_CLK_TCK") - (_own_seconds() - own)
        return max(0.0, busy / seconds)


def _ticks() -> int | None:
    """What all processes of the machine have computed so far, in ticks of the clock."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft, *_ = map(int, fields)
    return user + nice + system + interrupts + soft


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def allowed_cores(cgroup: Path = _CGROUP) -> int:
    """The cores that this process may use: those it is bound to, and no more than its container's share of time.

    Example:
        >>> 1 <= allowed_cores() <= os.cpu_count()
        True
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *(int(share) for share in _shares(cgroup))]))


def _shares(cgroup: Path) -> list[float]:
    """Cores that a container gets the time of, by either version of control groups."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / name).read_text() for name in files).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return [max(1.0, int(quota) / int(period))]
    return []


def take_threads(wanted: int | None, busy: Busy) -> None:
    """Compute with so many threads, or with as many as cores are free; what is less than all is said in one line.

    ``OMP_NUM_THREADS`` has been somebody's choice already.
    """
    if wanted is not None:
        use_threads(wanted)
        return
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores, others = allowed_cores(), busy.cores()
    free = min(cores, max(1, round((os.cpu_count() or 1) - others)))
    use_threads(free)
    if free < cores:
        threads = f"{free} thread{'s' if free > 1 else ''}"
        print(
            f"kronattn: note: others keep {others:.1f} of {os.cpu_count()} cores busy: {threads}; --threads for more",
            file=sys.stderr,
        )


def use_threads(count: int) -> None:
    """For this process, and for those that it starts."""
    torch.set_num_threads(count)
    os.environ["OMP_NUM_THREADS"] = str(count)
