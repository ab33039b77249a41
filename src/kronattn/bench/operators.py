"""What attention operators cost beside a copy of their input: forward, and forward plus backward, in one run.

On a GPU every operator is timed twice. The device's own time is that of a captured graph which runs over several
inputs in turn, so that no cache holds what the next one needs; what a user sees is the time of eager calls.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kronattn.bench import peers
from kronattn.measure import describe_environment
from kronattn.ops.kronecker import kronecker_attention
from kronattn.present import Cell, Column, Group, Table, format_ratio, format_significant, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "OPERATORS",
    "SHAPES",
    "SMALL_SHAPES",
    "Cost",
    "bench_operators",
    "cost_table",
    "draw_costs",
    "from_json",
    "median_costs",
    "over_copy",
    "parse_shapes",
    "to_json",
]

# (N, C, h, w): KANet's stages, an image's middle layers, a large map, a very large one, and a call that is all launch.
SHAPES = (
    (512, 32, 28, 28),
    (512, 64, 14, 14),
    (512, 96, 14, 14),
    (512, 160, 7, 7),
    (64, 64, 56, 56),
    (16, 64, 128, 128),
    (4, 64, 512, 512),
    (8, 8, 56, 56),
)
# For a processor: seconds rather than minutes.
SMALL_SHAPES = ((8, 32, 28, 28), (8, 8, 56, 56))
# Forward passes that take longer are not followed by backward ones, which would take minutes.
_SLOW_MS = 30
# Twice an H200's second-level cache, in bytes: inputs that take turns add up to this much.
_ROTATED = 128 * 2**20


@dataclass(frozen=True)
class Operator:
    """One contender. ``scratch(N, C, h, w)`` is about how many elements it allocates beside input and output."""

    label: str
    call: Callable[[Tensor], Tensor]
    scratch: Callable[[int, int, int, int], int] = lambda n, c, h, w: 0
    ours: bool = False
    differentiable: bool = True
    compiled: bool = False


def _copy(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x)


def _kronecker(mode: str, backend: str) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        return kronecker_attention(x, mode=mode, backend=backend)

    return call


OPERATORS: dict[str, Operator] = {
    "copy": Operator("copy of x", _copy, differentiable=False),
    "attn": Operator("Attn", peers.regular, lambda n, c, h, w: 3 * n * (h * w) ** 2),
    "attn_fused": Operator("Attn, fused", peers.fused),
    "attn_pool": Operator("Attn, pooled", peers.pooled),
    "criss_cross": Operator("criss-cross", peers.criss_cross, lambda n, c, h, w: 4 * n * h * w * (h + w)),
    "axial": Operator("axial", peers.axial),
    "efficient": Operator("efficient", peers.efficient),
    "kao_kv_torch": Operator("KAO_KV, torch", _kronecker("kv", "torch"), ours=True),
    "kao_qkv_torch": Operator("KAO_QKV, torch", _kronecker("qkv", "torch"), ours=True),
    "kao_kv_compiled": Operator("KAO_KV, compiled", _kronecker("kv", "torch"), ours=True, compiled=True),
    "kao_qkv_compiled": Operator("KAO_QKV, compiled", _kronecker("qkv", "torch"), ours=True, compiled=True),
    "kao_kv": Operator("KAO_KV, kernels", _kronecker("kv", "triton"), ours=True),
    "kao_qkv": Operator("KAO_QKV, kernels", _kronecker("qkv", "triton"), ours=True),
}


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one operator on one shape, and bytes beyond its input at the peak; None where not measured."""

    shape: tuple[int, ...]
    operator: str
    forward_ms: float | None
    forward_eager_ms: float | None
    training_ms: float | None
    training_eager_ms: float | None
    forward_bytes: int | None
    reason: str = ""


def bench_operators(
    operators: Sequence[str] | None = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    channels_last: bool = True,
    training: bool = True,
    seconds: float = 0.2,
    track: Callable[[Sequence[Any]], Iterable[Any]] = lambda pairs: pairs,
) -> list[Cost]:
    """Measure operators on shapes, one after another, every operator on a shape with the same inputs.

    Args:
        operators: names in ``OPERATORS``; those that can run here by default, without the compiled ones.
        shapes: (N, C, h, w).
        device, dtype, channels_last: of the inputs.
        training: measure forward plus backward too.
        seconds: that one measurement takes.
        track: wraps the list of pairs, for a progress bar.

    Returns:
        A :class:`Cost` for each shape and operator.

    Example:
        >>> costs = bench_operators(["copy", "kao_qkv_torch"], [(1, 8, 4, 4)], device=torch.device("cpu"),
        ...                         dtype=torch.float32, seconds=0.001)
        >>> [cost.operator for cost in costs]
        ['copy', 'kao_qkv_torch']
    """
    if operators is None:
        operators = [
            name
            for name, operator in OPERATORS.items()
            if not operator.compiled and (device.type == "cuda" or name not in ("kao_kv", "kao_qkv"))
        ]
    for name in operators:
        if name not in OPERATORS:
            raise ValueError(f"operators must be among {', '.join(OPERATORS)}, not {name!r}")
    costs = []
    for shape, name in track([(shape, name) for shape in shapes for name in operators]):
        try:
            costs.append(
                _measure(name, shape, device, dtype, channels_last=channels_last, training=training, seconds=seconds)
            )
        except torch.OutOfMemoryError:
            costs.append(Cost(shape, name, None, None, None, None, None, "out of memory"))
    return costs


def _measure(
    name: str,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    channels_last: bool,
    training: bool,
    seconds: float,
) -> Cost:
    operator = OPERATORS[name]
    batch, channels, height, width = shape
    needed = operator.scratch(batch, channels, height, width) * dtype.itemsize
    if device.type == "cuda" and needed > 0.6 * torch.cuda.get_device_properties(device).total_memory:
        return Cost(shape, name, None, None, None, None, None, "its coefficients do not fit in memory")
    count = max(2, math.ceil(_ROTATED / (math.prod(shape) * dtype.itemsize))) if device.type == "cuda" else 1
    count = min(count, 24 if needed < 2**28 else 2)
    inputs, gradients = (_random(shape, count, device, dtype, channels_last, seed) for seed in (0, 1))
    call = operator.call
    if operator.compiled:
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True)

    def train(pair: tuple[Tensor, Tensor]) -> Tensor:
        x, gradient = pair
        return torch.autograd.grad(call(x), x, gradient)[0]

    with torch.no_grad():
        forward, forward_eager = _time(call, inputs, device, seconds)
        peak = _peak(lambda: call(inputs[0]), device)
    trained: float | None = None
    trained_eager: float | None = None
    if training and operator.differentiable and (forward or forward_eager) < _SLOW_MS:
        pairs = [(x.requires_grad_(), gradient) for x, gradient in zip(inputs, gradients, strict=True)]
        trained, trained_eager = _time(train, pairs, device, seconds)
    return Cost(shape, name, forward, forward_eager, trained, trained_eager, peak)


def _random(
    shape: tuple[int, ...], count: int, device: torch.device, dtype: torch.dtype, channels_last: bool, seed: int
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return [
        torch.randn(shape, generator=generator, device=device, dtype=dtype).contiguous(memory_format=layout)
        for _ in range(count)
    ]


def _time(
    call: Callable[[Any], Tensor], inputs: Sequence[Any], device: torch.device, seconds: float
) -> tuple[float | None, float]:
    """Milliseconds of a call: the device's own, over rotated inputs, and an eager one."""
    if device.type != "cuda":
        return None, _eager_ms(call, inputs[0], device, seconds)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in inputs[:2]:
            call(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # All outputs stay alive, so that they rotate too.
        outputs = [call(x) for x in inputs]
    graph.replay()
    samples = _cuda_ms(graph.replay, seconds)
    del graph, outputs
    return statistics.median(samples) / len(inputs), _eager_ms(call, inputs[0], device, seconds)


def _cuda_ms(call: Callable[[], Any], seconds: float) -> list[float]:
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < 3 or (len(samples) < 50 and time.perf_counter() - started < seconds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return samples


def _eager_ms(call: Callable[[Any], Tensor], x: Any, device: torch.device, seconds: float) -> float:
    """What a user sees: calls one after another, host and device together."""

    def timed(repeats: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(repeats):
            call(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begun) / repeats * 1e3

    timed(1)
    repeats = 20 if timed(1) < 10 else 1
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < 3 or (len(samples) < 50 and time.perf_counter() - started < seconds):
        samples.append(timed(repeats))
    return statistics.median(samples)


def _peak(call: Callable[[], Tensor], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = call()
    torch.cuda.synchronize(device)
    del output
    return torch.cuda.max_memory_allocated(device) - before


def parse_shapes(text: str) -> list[tuple[int, ...]]:
    """Shapes from "64x64x56x56,16x64x128x128".

    >>> parse_shapes("8x8x56x56")
    [(8, 8, 56, 56)]
    """
    shapes = []
    for part in text.split(","):
        sizes = part.strip().split("x")
        if len(sizes) != 4 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise ValueError(f"a shape is four sizes like 64x64x56x56, not {part.strip()!r}")
        shapes.append(tuple(int(size) for size in sizes))
    return shapes


def to_json(costs: Sequence[Cost], *, device: torch.device, dtype: torch.dtype, channels_last: bool) -> dict[str, Any]:
    """Return the costs with their ratios, and the command, versions and hardware that they were measured with.

    >>> found = to_json([], device=torch.device("cpu"), dtype=torch.float32, channels_last=True)
    >>> found["costs"], found["settings"]["channels_last"]
    ([], True)
    """
    environment = describe_environment(device, dtype)
    if device.type == "cuda":
        import triton

        environment["triton"] = triton.__version__
    return {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment,
        "settings": {"dtype": str(dtype).removeprefix("torch."), "channels_last": channels_last},
        "costs": [asdict(cost) | _ratios(cost, costs) for cost in costs],
    }


def from_json(found: dict[str, Any]) -> list[Cost]:
    """Return the costs that :func:`to_json` was given.

    >>> from_json({"costs": []})
    []
    """
    costs = []
    for row in found["costs"]:
        fields = {name: row[name] for name in Cost.__dataclass_fields__ if name != "shape"}
        costs.append(Cost(shape=tuple(row["shape"]), **fields))
    return costs


def median_costs(runs: Sequence[Sequence[Cost]]) -> list[Cost]:
    """Return the costs of several runs as one: the median of every number.

    >>> runs = [[Cost((1, 8, 4, 4), "copy", ms, ms, None, None, 256)] for ms in (0.5, 0.9, 0.6)]
    >>> median_costs(runs)[0].forward_ms
    0.6
    """
    medians = []
    for costs in zip(*runs, strict=True):
        numbers = {}
        for name in ("forward_ms", "forward_eager_ms", "training_ms", "training_eager_ms", "forward_bytes"):
            known = [getattr(cost, name) for cost in costs if getattr(cost, name) is not None]
            numbers[name] = statistics.median(known) if known else None
        medians.append(replace(costs[0], **numbers))
    return medians


def over_copy(costs: Sequence[Cost]) -> dict[str, dict[str, float | None]]:
    """Return one run's times over the copy's, forward and with backward, for each shape and operator.

    >>> over_copy([Cost((1, 8, 4, 4), "copy", 0.5, 1.0, None, None, 256)])
    {'1×8×4², copy': {'forward': 1.0, 'training': None}}
    """
    found = {}
    for cost in costs:
        ratios = _ratios(cost, costs)
        pair = {"forward": ratios["forward_over_copy"], "training": ratios["training_over_copy"]}
        found[f"{_label(cost.shape)}, {cost.operator}"] = pair
    return found


def _ratios(cost: Cost, costs: Sequence[Cost]) -> dict[str, float | None]:
    nothing = Cost(cost.shape, "", None, None, None, None, None)
    copy, fused = (_find(costs, cost.shape, name) or nothing for name in ("copy", "attn_fused"))
    beyond = None
    if cost.forward_bytes is not None and copy.forward_bytes:
        beyond = (cost.forward_bytes - copy.forward_bytes) / copy.forward_bytes
    return {
        "forward_over_copy": _ratio(cost.forward_ms, copy.forward_ms),
        "training_over_copy": _ratio(cost.training_ms, copy.forward_ms),
        "forward_speed_up_over_fused": _ratio(fused.forward_ms, cost.forward_ms),
        "training_speed_up_over_fused": _ratio(fused.training_ms, cost.training_ms),
        "eager_speed_up_over_fused": _ratio(fused.forward_eager_ms, cost.forward_eager_ms),
        "bytes_beyond_output_over_input": beyond,
    }


def _find(costs: Sequence[Cost], shape: tuple[int, ...], name: str) -> Cost | None:
    return next((cost for cost in costs if cost.shape == shape and cost.operator == name), None)


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def cost_table(costs: Sequence[Cost]) -> Table:
    """Return the costs as a table, one group for each shape.

    >>> cost_table([Cost((1, 8, 4, 4), "copy", 0.5, 1.0, None, None, 256)]).groups[0].title
    '1×8×4²'
    """
    columns = [
        Column("operator", numeric=False),
        Column("ms"),
        Column("÷ copy"),
        Column("fused ÷ it"),
        Column("eager ms"),
        Column("train ms"),
        Column("÷ copy"),
        Column("memory ÷ x"),
    ]
    groups = []
    for shape in dict.fromkeys(cost.shape for cost in costs):
        rows = []
        for cost in (cost for cost in costs if cost.shape == shape):
            ratios = _ratios(cost, costs)
            numbers = [
                _text(cost.forward_ms, _milliseconds),
                _text(ratios["forward_over_copy"], format_significant),
                _text(ratios["forward_speed_up_over_fused"], format_ratio),
                _text(cost.forward_eager_ms, _milliseconds),
                _text(cost.training_ms, _milliseconds),
                _text(ratios["training_over_copy"], format_significant),
                _text(ratios["bytes_beyond_output_over_input"], lambda share: f"{share:.1%}"),
            ]
            rows.append([Cell(OPERATORS[cost.operator].label), *(Cell(number) for number in numbers)])
        groups.append(Group(_label(shape), rows))
    return Table("Attention beside a copy of its input", columns, groups)


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


def _milliseconds(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else format_significant(value)


def _label(shape: tuple[int, ...]) -> str:
    batch, channels, height, width = shape
    return f"{batch}×{channels}×" + (f"{height}²" if height == width else f"{height}×{width}")


def draw_costs(costs: Sequence[Cost]) -> Figure:
    """Draw each operator's time over that of a copy, forward and with backward, for every shape.

    >>> costs = [Cost((1, 8, 4, 4), name, 0.5, 1.0, 1.5, 2.0, 256) for name in ("copy", "kao_kv")]
    >>> [axis.get_title() for axis in draw_costs(costs).axes]
    ['Forward', 'Forward and backward']
    """
    require_matplotlib("the figure")
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(cost.shape for cost in costs))
    names = [name for name in OPERATORS if any(cost.operator == name for cost in costs)]
    figure = Figure(figsize=(12, 9), layout="constrained")
    panels = (("Forward", "forward_over_copy"), ("Forward and backward", "training_over_copy"))
    for axis, (title, ratio) in zip(figure.subplots(2, 1, sharex=True), panels, strict=True):
        for index, name in enumerate(names):
            places, heights = [], []
            for place, shape in enumerate(shapes):
                cost = _find(costs, shape, name)
                value = None if cost is None else _ratios(cost, costs)[ratio]
                if value is not None:
                    places.append(place + (index - len(names) / 2) * 0.8 / len(names))
                    heights.append(value)
            colour = _COLOURS.get(name, "#cbd5e0")
            axis.bar(places, heights, width=0.8 / len(names), color=colour, label=OPERATORS[name].label, align="edge")
        axis.axhline(1, color="#2d3748", linewidth=0.8)
        axis.set(yscale="log", ylabel="times a copy of x", title=title)
        axis.set_xticks(range(len(shapes)), [_label(shape) for shape in shapes])
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure


_COLOURS = {
    "copy": "#2d3748",
    "attn": "#e2e8f0",
    "attn_fused": "#a0aec0",
    "attn_pool": "#718096",
    "criss_cross": "#b7a4d8",
    "axial": "#8f74c4",
    "efficient": "#6b46a8",
    "kao_kv_torch": "#bee3f8",
    "kao_qkv_torch": "#fbd38d",
    "kao_kv_compiled": "#63b3ed",
    "kao_qkv_compiled": "#f6ad55",
    "kao_kv": "#2b6cb0",
    "kao_qkv": "#dd6b20",
}
