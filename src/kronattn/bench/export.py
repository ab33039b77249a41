"""Latency on the CPU of PyTorch eager, torch.compile and onnxruntime, as ratios to MobileNetV2 in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from kronattn.export.capture import export_network
from kronattn.export.runtime import run_onnx
from kronattn.measure import Call, Comparison, Row, Way, compare
from kronattn.models.files import Description
from kronattn.models.registry import create_model
from kronattn.present import Table, format_significant, tabulate

__all__ = ["BASE", "DEFAULT_NETWORKS", "RUNTIMES", "bench_export", "latency_table"]

BASE = "mobilenetv2"
DEFAULT_NETWORKS = (BASE, "kanet_kv", "kanet_qkv")
RUNTIMES = ("eager", "compiled", "onnxruntime")


def bench_export(
    networks: Sequence[str] = DEFAULT_NETWORKS,
    runtimes: Sequence[str] = RUNTIMES,
    *,
    batch: int = 1,
    size: int = 224,
    seconds: float = 20.0,
    track: Callable[[Sequence[Way]], Iterable[Way]] = iter,
) -> Comparison:
    """Time all networks in all runtimes; in each runtime they take turns.

    Args:
        networks: names of :func:`kronattn.list_models`; the base of the ratios is added where it is missing.
        runtimes: "eager", "compiled" and "onnxruntime".
        batch, size: of the images.
        seconds: that all turns together should take.
        track: wraps the loop over runtimes; capturing and compiling takes longer than the timing.
    """
    return compare(
        "export",
        list(dict.fromkeys([BASE, *networks])),
        [Way({"batch": batch, "size": size}, how=runtime) for runtime in runtimes],
        _prepare,
        base=BASE,
        packages=["onnxruntime"] if "onnxruntime" in runtimes else [],
        seconds=seconds / len(runtimes),
        track=track,
        most=25,
    )


def _prepare(name: str, way: Way) -> Call:
    size = way.case["size"]
    images = torch.randn(way.case["batch"], 3, size, size)
    torch.manual_seed(0)
    model = create_model(name)
    with torch.no_grad():
        # Signals that have died out are denormal numbers, which are slow: give the norms fitting statistics.
        for _ in range(6):
            model(torch.randn(4, 3, 64, 64))
    model.eval()
    if way.how == "onnxruntime":
        description = Description(name, {}, resize=size, size=size)
        run = run_onnx(export_network(model, description, sizes=[(size, size)]).content)
        return Call(lambda: run(images))
    if way.how == "eager":
        return Call(lambda: model(images))
    compiled = torch.compile(model)
    with torch.inference_mode():
        compiled(images)  # compiles for what is timed; a first call would count as one that takes a minute
    return Call(lambda: compiled(images))


def latency_table(found: Comparison) -> Table:
    """The latencies for readers: a group for each runtime."""

    def over_eager(row: Row) -> str | None:
        eager = found.find(row.candidate, Way(row.case, how="eager"))
        return None if eager is None or not eager.time_ms else f"{(row.time_ms or 0) / eager.time_ms:.2f}"

    def over_base(row: Row) -> str | None:
        share = found.share(row)
        return None if share is None else f"{share:.2f}"

    def quartiles(row: Row) -> str | None:
        return None if row.quartiles_ms is None else "–".join(map(format_significant, row.quartiles_ms))

    case = found.rows[0].case
    note = f"Ratios of time within one run: below 1 is faster than {BASE} in the same runtime, or than eager PyTorch."
    return tabulate(
        f"Latency on the CPU, batch {case['batch']}, {case['size']}×{case['size']}, float32",
        {
            "Network": lambda row: row.candidate,
            "ms": lambda row: format_significant(row.time_ms),
            "quartiles": quartiles,
            f"÷ {BASE}": over_base,
            "÷ eager": over_eager,
        },
        found.measured,
        group=lambda row: row.how,
        notes=[note, *found.left_out(lambda row: f"{row.candidate}, {row.how}")],
    )
