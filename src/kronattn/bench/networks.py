"""Images a second of our networks and of their peers, in training and inference, as ratios within one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from kronattn.measure import Call, Comparison, Row, Way, calls, compare, replayed, resolve_device, resolve_dtype
from kronattn.measure.processes import OLD, Job, compare_in_processes
from kronattn.models.registry import CLASSIFIERS
from kronattn.present import Table, format_significant, tabulate

__all__ = ["BASE", "DEFAULT_NETWORKS", "HOWS", "WORKS", "bench_networks", "check_network", "speed_table"]

# Everything is a ratio to this one, measured in the same run.
BASE = "torchvision/mobilenet_v2"
PEERS = (
    "timm/mobilenetv2_100",
    "timm/mobilenetv3_large_100",
    "timm/mobilenetv4_conv_small",
    "timm/efficientnet_b0",
)
DEFAULT_NETWORKS = (BASE, "kanet_kv", "kanet_qkv", "mobilenetv2", "mobilenetv2_kao", "kanet_without_kao", *PEERS)
WORKS = ("inference", "training")
HOWS = ("eager", "compiled", "graphs")


def bench_networks(
    networks: Sequence[str] = DEFAULT_NETWORKS,
    works: Sequence[str] = WORKS,
    hows: Sequence[str] = ("eager",),
    *,
    batch: int = 16,
    size: int = 224,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    channels_last: bool = False,
    seconds: float = 8.0,
    processes: int = 0,
    rounds: int = 7,
    repeats: int = 1,
    against: Path | None = None,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    keep: Callable[[Comparison], None] = lambda found: None,
) -> Comparison:
    """Measure networks against each other: for each way of running them, they take turns.

    Args:
        networks: our names, "torchvision/NAME" or "timm/NAME"; the base of the ratios is added where it is missing.
        works: "inference" and "training" (forward, backward and an SGD step).
        hows: "eager", "compiled" and, on a GPU, "graphs": the whole step as a CUDA graph.
        batch, size: of the images.
        device, dtype, channels_last: of networks and images; half precision is autocast's.
        seconds: of timing for each way of running.
        processes: how many compile at a time, where each network has a process of its own; 0: all in this one.
        rounds: of turns, with processes.
        repeats: measure everything so often, in new processes where there are any: each run's time is a round then.
        against: another source tree, whose networks of the same names take part, in processes of their own.
        track: wraps the loop over ways of running, in a progress bar for instance.
        keep: called with what was found so far after each way, for a run that may be cut short.
    """
    device, dtype = resolve_device(str(device)), resolve_dtype(dtype)
    if "graphs" in hows and device.type != "cuda":
        raise ValueError("--how graphs is for CUDA devices: give --device cuda")
    names = list(dict.fromkeys([BASE, *networks]))
    for name in names:
        check_network(name)
    case = {"batch": batch, "size": size}
    ways = [Way(case, work, how) for how in hows for work in works]
    settings: dict[str, Any] = {"channels_last": channels_last}
    fixed: dict[str, Any] = {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "channels_last": channels_last,
        **case,
    }

    def prepare(name: str, way: Way) -> Call:
        call = calls.network_call(name, way.work, how=way.how, **fixed)
        with torch.no_grad():
            return Call(replayed(lambda _: call(), [None]) if way.how == "graphs" else call)

    def job(name: str, way: Way) -> Job:
        arguments = {"name": name.removesuffix(OLD), "work": way.work, "how": way.how, **fixed}
        return Job(Path(calls.__file__), "network_call", arguments, against if name.endswith(OLD) else None)

    shared: dict[str, Any] = {"base": BASE, "device": device, "dtype": dtype, "track": track, "keep": keep}
    if against is None and not processes:
        timing: dict[str, Any] = {"least": 3, "most": 9, "sample_seconds": 0.05, "repeats": repeats}
        return compare("networks", names, ways, prepare, settings=settings, seconds=seconds, **shared, **timing)
    if against is not None:
        names = [one for name in names for one in ([name] if "/" in name else [name, name + OLD])]
    turns: dict[str, Any] = {"rounds": rounds, "repeats": repeats, "seconds": seconds / rounds / repeats / len(names)}
    return compare_in_processes(
        "networks", names, ways, job, settings=settings, at_once=processes or 4, **turns, **shared
    )


def check_network(name: str) -> None:
    """Refuse a name that is neither ours nor says whose it is."""
    library, _, model = name.rpartition("/")
    if library not in ("", "torchvision", "timm") or (not library and model not in CLASSIFIERS):
        known = ", ".join([*CLASSIFIERS, "torchvision/NAME", "timm/NAME"])
        raise ValueError(f"unknown network {name!r}: known are {known}")


def speed_table(found: Comparison) -> Table:
    """The speeds for readers: a group for each way of running."""

    def images(row: Row, milliseconds: float) -> str:
        return format_significant(row.case["batch"] / milliseconds * 1e3)

    def quartiles(row: Row) -> str | None:
        return None if row.quartiles_ms is None else "–".join(images(row, ms) for ms in reversed(row.quartiles_ms))

    def ratio(row: Row) -> str | None:
        over = found.ratio(row)
        if over is None:
            return None
        return f"{over.value:.2f}×" + ("" if over.low is None else f" ({over.low:.2f}–{over.high:.2f})")

    case, settings = found.rows[0].case, found.settings
    layout = "channels_last" if settings["channels_last"] else "contiguous"
    note = f"Ratio: images a second over those of {found.base} in the same run, with its spread. Peak: beyond weights."
    return tabulate(
        f"Networks, batch {case['batch']}, {case['size']}×{case['size']}, {settings['dtype']}, {layout}",
        {
            "Network": lambda row: row.candidate,
            "images/s": lambda row: images(row, row.time_ms),
            "quartiles": quartiles,
            "ratio": ratio,
            "peak MB": lambda row: None if row.memory_bytes is None else format_significant(row.memory_bytes / 1e6),
        },
        found.measured,
        group=lambda row: f"{row.work}, {row.how}",
        notes=[note, *found.left_out(lambda row: f"{row.candidate}, {row.work}, {row.how}")],
    )
