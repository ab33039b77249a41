"""How long one image takes on the CPU: every way to run a network, as ratios to MobileNetV2 run in the same way.

Each candidate has a process of its own and they take turns. In one process, thread pools that spin while they wait
(onnxruntime's, OpenMP's) would take the cores from whoever's turn it is.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.export.capture import export_network
from kronattn.export.quantise import quantise
from kronattn.export.runtime import run_onnx
from kronattn.extras import require_library
from kronattn.inference import fuse_known
from kronattn.measure import describe_environment
from kronattn.models.files import Description
from kronattn.models.registry import CLASSIFIERS, create_model
from kronattn.ops import kronecker_attention
from kronattn.present import Cell, Column, Group, Table, format_significant

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["BASE", "DEFAULT_NETWORKS", "WAYS", "Latency", "Settings", "bench_latency", "latency_table", "to_json"]

BASE = "mobilenetv2"
DEFAULT_NETWORKS = (BASE, "kanet_kv", "kanet_qkv", "timm/mobilenetv2_100", "timm/mobilenetv4_conv_small")
WAYS = ("eager", "fused", "compiled", "onnxruntime", "onnxruntime-dynamic", "int8", "operators")
# The last way compares operators rather than networks.
OPERATORS = ("fused attention", "kao_kv", "kao_qkv")
_OPERATOR_SHAPE = (8, 8, 56, 56)
# Long enough for threads that spin to go to sleep.
_PAUSE = 0.01


@dataclass(frozen=True)
class Settings:
    """How to run and how long to measure.

    >>> Settings().threads
    2
    """

    threads: int = 2
    batch: int = 1
    size: int = 224
    rounds: int = 20
    turn_seconds: float = 0.1


@dataclass(frozen=True)
class Latency:
    """One network in one way: milliseconds a call, and the ratio to the base's turn in the same round.

    Time of the CPU does not count waiting for a core, so with one thread its ratio holds on a busy machine too. Several
    threads spin while they wait for each other, and that counts.
    """

    network: str
    way: str
    milliseconds: float
    milliseconds_quartiles: tuple[float, float]
    over_base: float
    over_base_quartiles: tuple[float, float]
    cpu_milliseconds: float
    cpu_over_base: float
    cpu_over_base_quartiles: tuple[float, float]


def bench_latency(
    networks: Sequence[str] = DEFAULT_NETWORKS,
    ways: Sequence[str] = WAYS,
    settings: Settings | None = None,
    track: Callable[[Sequence[str]], Iterable[str]] = lambda items: items,
) -> list[Latency]:
    """Time networks in every way, one way after another; within a way, networks take turns.

    Args:
        networks: our names, or "timm/NAME"; the base of the ratios is added where it is missing.
        ways: some of ``WAYS``.
        settings: threads, size and time.
        track: wraps the loop over ways, in a progress bar for instance.
    """
    settings = settings or Settings()
    names = list(dict.fromkeys([BASE, *networks]))
    for name in names:
        _check_name(name)
    latencies = []
    for way in track(list(ways)):
        candidates = OPERATORS if way == "operators" else names
        latencies += _summaries(way, _take_turns(candidates, way, settings))
    return latencies


def _check_name(name: str) -> None:
    if not name.startswith("timm/") and name not in CLASSIFIERS:
        raise ValueError(f"unknown network {name!r}: known are {', '.join(CLASSIFIERS)} and timm/NAME")


# (seconds, seconds of the CPU) of a call, in each round.
Samples = dict[str, list[tuple[float, float]]]


def _take_turns(candidates: Sequence[str], way: str, settings: Settings) -> Samples:
    workers = {}
    try:
        for name in candidates:
            workers[name] = _Worker(name, way, settings)
        samples: Samples = {name: [] for name in candidates}
        for turn in range(settings.rounds):
            # Every other round the other way round: nobody always follows the same one.
            for name in list(candidates)[:: -1 if turn % 2 else 1]:
                time.sleep(_PAUSE)
                samples[name].append(workers[name].take_turn())
        return samples
    finally:
        for worker in workers.values():
            worker.stop()


class _Worker:
    """A process with one network in it, which runs when it is told to."""

    def __init__(self, name: str, way: str, settings: Settings) -> None:
        # A new interpreter: a forked one would share the parent's thread pools, without their threads.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, way, settings), daemon=True)
        self._process.start()
        theirs.close()
        self._receive(f"{name}, {way}")

    def _receive(self, what: str) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the process of {what} ended before it answered") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def take_turn(self) -> tuple[float, float]:
        self._connection.send("turn")
        return self._receive("a turn")

    def stop(self) -> None:
        self._connection.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()


def _serve(connection: Connection, name: str, way: str, settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    try:
        with torch.inference_mode(way != "compiled"), torch.no_grad():
            call = _operator(name) if way == "operators" else _call(name, way, settings)
            for _ in range(3):
                call()
            connection.send("ready")
            while True:
                connection.recv()
                connection.send(_one_turn(call, settings.turn_seconds))
    except EOFError:
        pass  # the parent is done
    except Exception as error:  # to be raised where somebody reads it
        connection.send(type(error)(str(error)) if isinstance(error, ValueError) else RuntimeError(f"{name}: {error}"))


def _one_turn(call: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Medians over the turn's calls, after one that brings the caches back."""
    call()
    walls: list[float] = []
    cpus: list[float] = []
    end = time.perf_counter() + seconds
    while len(walls) < 3 or time.perf_counter() < end:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)


def _call(name: str, way: str, settings: Settings) -> Callable[[], Any]:
    model = _settled(name)
    shape = (settings.batch, 3, settings.size, settings.size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if way in ("eager", "fused", "compiled"):
        run: Any = model if way == "eager" else fuse_known(model)
        run = torch.compile(run, fullgraph=True) if way == "compiled" else run
        return lambda: run(images)
    description = Description(name, {}, resize=settings.size, size=settings.size)
    dynamic = way == "onnxruntime-dynamic" or settings.batch > 1
    content = export_network(model, description, dynamic=dynamic, sizes=[(settings.size, settings.size)]).content
    if way == "int8":
        content = quantise(content, "static", [images])
    run = run_onnx(content)
    return lambda: run(images)


def _settled(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name.startswith("timm/"):
        timm: Any = require_library("timm", name, extra="timm")
        model: nn.Module = timm.create_model(name.removeprefix("timm/"))
    else:
        model = create_model(name)
    # Signals that have died out are denormal numbers, which are slow: give the norms fitting statistics.
    for _ in range(6):
        model(torch.randn(4, 3, 64, 64))
    return model.eval()


def _operator(name: str) -> Callable[[], Tensor]:
    x = torch.randn(_OPERATOR_SHAPE, generator=torch.Generator().manual_seed(0))
    if name == "fused attention":
        # Channels of a position side by side, one head: what PyTorch's kernel wants.
        rows = x.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
        return lambda: F.scaled_dot_product_attention(rows, rows, rows, scale=1.0)
    mode = name.removeprefix("kao_")
    return lambda: kronecker_attention(x, mode=mode)


def _summaries(way: str, samples: Samples) -> list[Latency]:
    base = next(iter(samples.values()))
    latencies = []
    for name, turns in samples.items():
        milliseconds = _quartiles([wall * 1e3 for wall, _ in turns])
        ratios = [
            _quartiles([turn[clock] / max(other[clock], 1e-9) for turn, other in zip(turns, base, strict=True)])
            for clock in (0, 1)
        ]
        latencies.append(
            Latency(
                network=name,
                way=way,
                milliseconds=milliseconds[1],
                milliseconds_quartiles=(milliseconds[0], milliseconds[2]),
                over_base=ratios[0][1],
                over_base_quartiles=(ratios[0][0], ratios[0][2]),
                cpu_milliseconds=statistics.median(cpu * 1e3 for _, cpu in turns),
                cpu_over_base=ratios[1][1],
                cpu_over_base_quartiles=(ratios[1][0], ratios[1][2]),
            )
        )
    return latencies


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def latency_table(latencies: Sequence[Latency], settings: Settings) -> Table:
    """The latencies for readers: a group for each way."""
    columns = (
        Column("Network", numeric=False),
        Column("ms"),
        Column(f"÷ {BASE}"),
        Column("quartiles"),
        Column("CPU ms"),
        Column("÷"),
        Column("quartiles"),
    )
    groups = []
    for way in dict.fromkeys(one.way for one in latencies):
        rows = [
            [
                Cell(one.network),
                Cell(format_significant(one.milliseconds)),
                Cell(_ratio(one.over_base)),
                Cell("–".join(_ratio(value) for value in one.over_base_quartiles)),
                Cell(format_significant(one.cpu_milliseconds)),
                Cell(_ratio(one.cpu_over_base)),
                Cell("–".join(_ratio(value) for value in one.cpu_over_base_quartiles)),
            ]
            for one in latencies
            if one.way == way
        ]
        groups.append(Group(way, rows))
    notes = [
        f"Ratios of time to {BASE} in the same way and round (operators: to fused attention, at 8×8×56×56); below 1 is "
        "faster. CPU: time of the process on all cores, without waiting for one.",
    ]
    title = f"Latency on the CPU, batch {settings.batch}, {settings.size}×{settings.size}, {settings.threads} threads"
    return Table(title, columns, groups, notes)


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"1/{1 / value:.0f}"


def to_json(latencies: Sequence[Latency], settings: Settings) -> dict[str, Any]:
    """The latencies as one JSON object, with what they were measured on and how busy it was."""
    environment: dict[str, Any] = {**describe_environment(), "threads": settings.threads}
    if any(one.way.startswith("onnxruntime") or one.way == "int8" for one in latencies):
        environment["onnxruntime"] = require_library("onnxruntime", "ONNX", extra="export").__version__
    if hasattr(os, "getloadavg"):
        environment["load_average"] = [round(load, 2) for load in os.getloadavg()]
    environment["cores"] = os.cpu_count()
    return {"rows": [asdict(one) for one in latencies], "settings": asdict(settings), "environment": environment}
