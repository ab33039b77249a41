"""Latency on the CPU of PyTorch eager, torch.compile and onnxruntime, as ratios to MobileNetV2 in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kronattn.export.capture import export_network
from kronattn.export.runtime import run_onnx
from kronattn.measure import describe_environment, time_calls
from kronattn.models.files import Description
from kronattn.models.registry import create_model
from kronattn.present import Cell, Column, Group, Table, format_significant

__all__ = ["BASE", "DEFAULT_NETWORKS", "RUNTIMES", "Latency", "bench_export", "latency_table", "to_json"]

BASE = "mobilenetv2"
DEFAULT_NETWORKS = (BASE, "kanet_kv", "kanet_qkv")
RUNTIMES = ("eager", "compiled", "onnxruntime")


@dataclass(frozen=True)
class Latency:
    """One network in one runtime: milliseconds a call, over the base in that runtime, and over its own eager call."""

    network: str
    runtime: str
    milliseconds: float
    quartiles: tuple[float, float]
    over_base: float
    over_eager: float | None


def bench_export(
    networks: Sequence[str] = DEFAULT_NETWORKS,
    runtimes: Sequence[str] = RUNTIMES,
    *,
    batch: int = 1,
    size: int = 224,
    seconds: float = 20.0,
    track: Callable[[Sequence[tuple[str, str]]], Iterable[tuple[str, str]]] = lambda items: items,
) -> list[Latency]:
    """Time all networks in all runtimes, in turns within one run.

    Args:
        networks: names of :func:`kronattn.list_models`; the base of the ratios is added where it is missing.
        runtimes: "eager", "compiled" and "onnxruntime".
        batch, size: of the images.
        seconds: that all turns together should take.
        track: wraps the loop that captures and compiles, which takes longer than the timing.
    """
    names = list(dict.fromkeys([BASE, *networks]))
    images = torch.randn(batch, 3, size, size)
    calls = {pair: _call(*pair, images) for pair in track([(n, r) for n in names for r in runtimes])}
    timings = time_calls({f"{n} {r}": call for (n, r), call in calls.items()}, seconds=seconds, most=25)
    median = {pair: timings[" ".join(pair)].median for pair in calls}
    return [
        Latency(
            network=name,
            runtime=runtime,
            milliseconds=median[name, runtime] * 1e3,
            quartiles=(timings[f"{name} {runtime}"].lower * 1e3, timings[f"{name} {runtime}"].upper * 1e3),
            over_base=median[name, runtime] / median[BASE, runtime],
            over_eager=median[name, runtime] / median[name, "eager"] if (name, "eager") in median else None,
        )
        for runtime in runtimes
        for name in names
    ]


def _call(name: str, runtime: str, images: torch.Tensor) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = create_model(name)
    with torch.no_grad():
        # Signals that have died out are denormal numbers, which are slow: give the norms fitting statistics.
        for _ in range(6):
            model(torch.randn(4, 3, 64, 64))
    model.eval()
    if runtime == "onnxruntime":
        size = images.shape[-1]
        description = Description(name, {}, resize=size, size=size)
        exported = export_network(model, description, sizes=[(size, size)])
        run = run_onnx(exported.content)
        return lambda: run(images)
    if runtime == "eager":
        return lambda: model(images)
    compiled = torch.compile(model)
    with torch.inference_mode():
        compiled(images)  # compiles for what is timed; a first call would count as one that takes a minute
    return lambda: compiled(images)


def latency_table(latencies: Sequence[Latency], *, batch: int, size: int) -> Table:
    """The latencies for readers: a group for each runtime."""
    columns = (
        Column("Network", numeric=False),
        Column("ms"),
        Column("quartiles"),
        Column(f"÷ {BASE}"),
        Column("÷ eager"),
    )
    groups = []
    for runtime in dict.fromkeys(one.runtime for one in latencies):
        rows = [
            [
                Cell(one.network),
                Cell(format_significant(one.milliseconds)),
                Cell("–".join(format_significant(value) for value in one.quartiles)),
                Cell(f"{one.over_base:.2f}"),
                Cell("" if one.over_eager is None else f"{one.over_eager:.2f}"),
            ]
            for one in latencies
            if one.runtime == runtime
        ]
        groups.append(Group(runtime, rows))
    note = f"Ratios of time within one run: below 1 is faster than {BASE} in the same runtime, or than eager PyTorch."
    return Table(f"Latency on the CPU, batch {batch}, {size}×{size}, float32", columns, groups, [note])


def to_json(latencies: Sequence[Latency], *, batch: int, size: int) -> dict[str, Any]:
    """The latencies as one JSON object, with what they were measured on."""
    environment: dict[str, Any] = describe_environment()
    if any(one.runtime == "onnxruntime" for one in latencies):
        import onnxruntime

        environment["onnxruntime"] = onnxruntime.__version__
    return {
        "rows": [asdict(one) for one in latencies],
        "settings": {"batch": batch, "size": size},
        "environment": environment,
    }
