"""How long one image takes on the CPU: every way to run a network, as ratios to MobileNetV2 run in the same way.

Each candidate has a process of its own and they take turns. In one process, thread pools that spin while they wait
(onnxruntime's, OpenMP's) would take the cores from whoever's turn it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.bench.networks import check_network
from kronattn.export.capture import export_network
from kronattn.export.quantise import quantise
from kronattn.export.runtime import require_onnx, run_onnx
from kronattn.inference import fuse_known
from kronattn.measure import Comparison, Row, Way
from kronattn.measure.calls import build_network
from kronattn.measure.processes import Job, compare_in_processes
from kronattn.models.files import Description
from kronattn.ops import kronecker_attention, native
from kronattn.present import Table, format_significant, tabulate

__all__ = [
    "BASE",
    "DEFAULT_NETWORKS",
    "OPERATORS",
    "WAYS",
    "bench_latency",
    "default_ways",
    "latency_table",
    "network_form",
]

BASE = "mobilenetv2"
DEFAULT_NETWORKS = (BASE, "kanet_kv", "kanet_qkv", "timm/mobilenetv2_100", "timm/mobilenetv4_conv_small")
# With the operators of the package kronattn-cpu, and without them where a name does not say so.
_NATIVE = "-native"
_WITHOUT = ("eager", "fused", "compiled", "onnxruntime", "onnxruntime-dynamic", "int8", "operators")
WAYS = (*_WITHOUT, *(f"{way}{_NATIVE}" for way in ("eager", "fused", "compiled", "operators")))
# The ways of this name compare operators rather than networks, with the first of these.
OPERATORS = ("fused attention", "kao_kv", "kao_qkv")
_OPERATOR_CASE = {"batch": 8, "channels": 8, "grid": [56, 56]}


def bench_latency(
    networks: Sequence[str] = DEFAULT_NETWORKS,
    ways: Sequence[str] = _WITHOUT,
    *,
    batch: int = 1,
    size: int = 224,
    rounds: int = 20,
    turn_seconds: float = 0.1,
    repeats: int = 1,
    track: Callable[[Sequence[str]], Iterable[str]] = iter,
    keep: Callable[[Comparison], None] = lambda found: None,
) -> Comparison:
    """Time networks in every way, one way after another; within a way, networks take turns.

    Every process has as many threads as this one.

    Args:
        networks: our names, "torchvision/NAME" or "timm/NAME"; the base of the ratios is added where it is missing.
        ways: some of ``WAYS``.
        batch, size: of the images.
        rounds: in each of which every network has a turn.
        turn_seconds: of one turn; a few calls, however long they take.
        repeats: measure everything so often, in new processes: each run's time is a round then.
        track: wraps the loop over ways, in a progress bar for instance.
        keep: called with what was found so far after each way, for a run that may be cut short.
    """
    threads = torch.get_num_threads()
    names = list(dict.fromkeys([BASE, *networks]))
    for name in names:
        check_network(name)
    native_reason = native.missing_reason()
    if native_reason is not None and any(way.endswith(_NATIVE) for way in ways):
        raise ValueError(f"the ways that end in {_NATIVE} cannot be measured: {native_reason}")
    onnx = any(way.startswith("onnxruntime") or way == "int8" for way in ways)
    if onnx:
        require_onnx()
    found = None
    rows: list[Row] = []

    def so_far(measured: Comparison) -> Comparison:
        # How busy the machine was decides what the figures are worth.
        load = {"load_average": [round(load, 2) for load in os.getloadavg()]} if hasattr(os, "getloadavg") else {}
        environment = {**measured.environment, "cores": os.cpu_count(), **load}
        return replace(measured, rows=[*rows, *measured.rows], environment=environment)

    for how in track(list(ways)):
        operators = _plain(how) == "operators"
        way = Way(_OPERATOR_CASE if operators else {"batch": batch, "size": size}, how=how)
        measured = compare_in_processes(
            "latency",
            OPERATORS if operators else names,
            [way],
            lambda name, way: _job(name, way, threads),
            base=BASE,
            packages=["onnxruntime"] if onnx else [],
            settings={"turn_seconds": turn_seconds},
            memory=False,
            rounds=rounds,
            seconds=turn_seconds,
            at_once=1,
            repeats=repeats,
            keep=lambda measured: keep(so_far(measured)),
        )
        found = so_far(measured)
        rows = found.rows
    if found is None:
        raise ValueError(f"no way to run networks was given: known are {', '.join(WAYS)}")
    return found


def default_ways() -> tuple[str, ...]:
    """All that can be measured here."""
    return WAYS if native.missing_reason() is None else _WITHOUT


def _plain(how: str) -> str:
    return how.removesuffix(_NATIVE)


def _job(name: str, way: Way, threads: int) -> Job:
    function = "operator_call" if _plain(way.how) == "operators" else "network_form"
    return Job(Path(__file__), function, {"name": name, "how": way.how, "threads": threads, **way.case})


def network_form(name: str, how: str, *, threads: int, batch: int, size: int) -> Callable[[], Any]:
    """What a process runs: a network on images, in one of the ways."""
    torch.set_num_threads(threads)
    native.switch(how.endswith(_NATIVE))
    how = _plain(how)
    model = _settled(name)
    images = torch.randn((batch, 3, size, size), generator=torch.Generator().manual_seed(0))
    if how in ("eager", "fused", "compiled"):
        run: Any = model if how == "eager" else fuse_known(model)
        run = torch.compile(run, fullgraph=True) if how == "compiled" else run
        return lambda: run(images)
    description = Description(name, {}, resize=size, size=size)
    dynamic = how == "onnxruntime-dynamic" or batch > 1
    content = export_network(model, description, dynamic=dynamic, sizes=[(size, size)]).content
    if how == "int8":
        content = quantise(content, "static", [images])
    run = run_onnx(content)
    return lambda: run(images)


def _settled(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_network(name)
    # Signals that have died out are denormal numbers, which are slow: give the norms fitting statistics.
    with torch.no_grad():
        for _ in range(6):
            model(torch.randn(4, 3, 64, 64))
    return model.eval()


def operator_call(
    name: str, how: str, *, threads: int, batch: int, channels: int, grid: Sequence[int]
) -> Callable[[], Tensor]:
    """What a process runs: an operator by itself."""
    torch.set_num_threads(threads)
    native.switch(how.endswith(_NATIVE))
    x = torch.randn((batch, channels, *grid), generator=torch.Generator().manual_seed(0))
    if name == "fused attention":
        # Channels of a position side by side, one head: what PyTorch's kernel wants.
        rows = x.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
        return lambda: F.scaled_dot_product_attention(rows, rows, rows, scale=1.0)
    mode = name.removeprefix("kao_")
    return lambda: kronecker_attention(x, mode=mode)


def latency_table(found: Comparison) -> Table:
    """The latencies for readers: a group for each way."""

    def over_base(figure: str) -> Callable[[Row], str | None]:
        def cell(row: Row) -> str | None:
            base = OPERATORS[0] if _plain(row.how) == "operators" else found.base
            share = found.share_of_rounds(row, base, figure)
            if share is None or share.low is None or share.high is None:
                return None
            spread = "" if row.candidate == base else f" ({_times(share.low)}–{_times(share.high)})"
            return _times(share.value) + spread

        return cell

    def over_eager(row: Row) -> str | None:
        eager = found.find(row.candidate, Way(row.case, how="eager"))
        return None if eager is None or not eager.time_ms else _times((row.time_ms or 0) / eager.time_ms)

    def quartiles(row: Row) -> str | None:
        return None if row.quartiles_ms is None else "–".join(map(format_significant, row.quartiles_ms))

    case = next((row.case for row in found.rows if "size" in row.case), None)
    images = "" if case is None else f", batch {case['batch']}, {case['size']}×{case['size']}"
    note = (
        f"Ratios of time to {found.base} in the same way and round, with quartiles (operators: to fused attention, at "
        "8×8×56×56); below 1 is faster. CPU: time of the process on all cores, without waiting for one."
    )
    return tabulate(
        f"Latency on the CPU{images}, threads: {found.environment['threads']}",
        {
            "Network": lambda row: row.candidate,
            "ms": lambda row: format_significant(row.time_ms),
            "quartiles": quartiles,
            f"÷ {found.base}": over_base("time_ms"),
            "÷ eager": over_eager,
            "CPU ms": lambda row: None if row.cpu_ms is None else format_significant(row.cpu_ms),
            "CPU ÷": over_base("cpu_ms"),
        },
        found.measured,
        group=lambda row: row.how,
        notes=[note, *found.left_out(lambda row: f"{row.candidate}, {row.how}")],
    )


def _times(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"1/{1 / value:.0f}"
