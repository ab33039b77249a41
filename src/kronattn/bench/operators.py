"""What attention operators cost beside a copy of their input: forward, and forward plus backward, in one run.

On a GPU every operator is timed twice. The device's own time is that of a CUDA graph over rotating inputs, so that no
cache holds what the next one needs; what a user sees is the time of eager calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kronattn.measure import Call, Comparison, Row, Way, compare, replayed, resolve_device, resolve_dtype
from kronattn.present import Table, format_ratio, format_significant, new_figure, tabulate
from kronattn.present.charts import COLOURS, tidy
from kronattn.tables.operators.candidates import OPERATORS, Case, with_call

__all__ = [
    "OPERATORS",
    "SHAPES",
    "SMALL_SHAPES",
    "bench_operators",
    "cost_table",
    "draw_costs",
    "over_copy",
    "parse_shapes",
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


def bench_operators(
    operators: Sequence[str] | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
    channels_last: bool = True,
    training: bool = True,
    seconds: float = 0.2,
    repeats: int = 1,
    track: Callable[[Sequence[Way]], Iterable[Way]] = iter,
    keep: Callable[[Comparison], None] = lambda found: None,
) -> Comparison:
    """Measure operators on shapes: on each of them they take turns, with the same inputs.

    Args:
        operators: names in ``OPERATORS``; those that can run here by default, without the compiled ones.
        shapes: (N, C, h, w); ``SHAPES`` on a GPU, ``SMALL_SHAPES`` elsewhere by default.
        device, dtype, channels_last: of the inputs; bfloat16 on a GPU, float32 elsewhere by default.
        training: measure forward plus backward too.
        seconds: of timing for each operator, shape and way of running.
        repeats: how often to measure everything: rows then hold medians.
        track: wraps the loop over shapes and ways of running, for a progress bar.
        keep: called with what was found so far after each of them, for a run that may be cut short.

    Example:
        >>> found = bench_operators(["copy", "kao_qkv_torch"], [(1, 8, 4, 4)], device="cpu", seconds=0.001)
        >>> [(row.candidate, row.work) for row in found.measured]
        [('copy', 'inference'), ('kao_qkv_torch', 'inference'), ('kao_qkv_torch', 'training')]
    """
    device = resolve_device(str(device))
    on_gpu = device.type == "cuda"
    dtype = resolve_dtype(dtype or ("bfloat16" if on_gpu else "float32"))
    shapes = shapes or (SHAPES if on_gpu else SMALL_SHAPES)
    if operators is None:
        uncompiled = [name for name in with_call() if not OPERATORS[name].compiled]
        operators = [name for name in uncompiled if on_gpu or name not in ("kao_kv", "kao_qkv")]
    for name in operators:
        if name not in with_call():
            raise ValueError(f"operators must be among {', '.join(with_call())}, not {name!r}")
    ways = [
        Way(_case(shape), work, how)
        for shape in shapes
        for work in ("inference", *(["training"] if training else []))
        for how in (("graphs", "eager") if on_gpu else ("eager",))
    ]
    compiled_for: list[Way] = []
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def scratch(name: str, way: Way) -> int:
        return OPERATORS[name].bytes_needed(Case.of(way.case), dtype.itemsize, matrices=3)

    def limit(name: str, way: Way, found: Comparison) -> str:
        if on_gpu and scratch(name, way) > 0.6 * torch.cuda.get_device_properties(device).total_memory:
            return "its coefficients do not fit in memory"
        if way.work == "training":
            if not OPERATORS[name].differentiable:
                return "it has no backward"
            forward = found.find(name, Way(way.case, "inference", way.how))
            if forward is None:
                return "its forward was not measured"
            if (forward.time_ms or 0) > _SLOW_MS:
                return f"its forward takes more than {_SLOW_MS} ms"
        return ""

    def random(shape: Sequence[int], count: int, seed: int) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        drawn = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(count))
        return [x.contiguous(memory_format=layout) for x in drawn]

    def prepare(name: str, way: Way) -> Call:
        operator, shape = OPERATORS[name], _shape(way.case)
        count = 1
        if way.how == "graphs":
            count = max(2, math.ceil(_ROTATED / (math.prod(shape) * dtype.itemsize)))
            count = min(count, 24 if scratch(name, way) < 2**28 else 2)
        inputs, gradients = (random(shape, count, seed) for seed in (0, 1))
        assert operator.call is not None
        call = operator.call
        if operator.compiled:
            if compiled_for != [way]:
                # What was compiled for other shapes counts against the limit of recompilations.
                torch.compiler.reset()
                compiled_for[:] = [way]
            call = torch.compile(call, fullgraph=True)

        def train(pair: tuple[Tensor, Tensor]) -> Tensor:
            x, gradient = pair
            with torch.inference_mode(False), torch.enable_grad():
                return torch.autograd.grad(call(x), x, gradient)[0]

        run: Callable[[Any], Tensor] = call
        given: Sequence[Any] = inputs
        if way.work == "training":
            run, given = train, [(x.requires_grad_(), gradient) for x, gradient in zip(inputs, gradients, strict=True)]
        if way.how == "eager":
            return Call(lambda: run(given[0]))
        with torch.no_grad():
            return Call(replayed(run, given), count, once=lambda: run(given[0]))

    return compare(
        "operators",
        operators,
        ways,
        prepare,
        base="copy",
        limit=limit,
        device=device,
        dtype=dtype,
        settings={"channels_last": channels_last},
        seconds=seconds * len(operators),
        repeats=repeats,
        track=track,
        keep=keep,
    )


def _case(shape: Sequence[int]) -> dict[str, Any]:
    return Case(tuple(shape[2:]), shape[0], shape[1]).to_dict()


def _shape(case: Mapping[str, Any]) -> tuple[int, ...]:
    return case["batch"], case["channels"], *case["grid"]


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


def over_copy(found: Comparison, row: Row) -> float | None:
    """A row's time over that of a copy of the input, which has no backward of its own.

    >>> rows = [Row("copy", {}, time_ms=0.5), Row("kao_kv", {}, "training", time_ms=2.0)]
    >>> over_copy(Comparison("operators", "copy", rows), rows[1])
    4.0
    """
    copy = found.find("copy", Way(row.case, "inference", row.how))
    return None if copy is None or not copy.time_ms or row.time_ms is None else row.time_ms / copy.time_ms


def cost_table(found: Comparison) -> Table:
    """Return the costs as a table, one group for each shape.

    >>> rows = [Row("copy", {"batch": 1, "channels": 8, "grid": [4, 4]}, time_ms=0.5, memory_bytes=256)]
    >>> cost_table(Comparison("operators", "copy", rows)).groups[0].title
    '1×4²×8'
    """
    device = "graphs" if any(row.how == "graphs" for row in found.rows) else "eager"

    def of(row: Row, work: str, how: str) -> Row | None:
        return found.find(row.candidate, Way(row.case, work, how))

    def milliseconds(row: Row | None) -> str | None:
        if row is None or row.time_ms is None:
            return None
        return f"{row.time_ms:.4f}" if row.time_ms < 0.1 else format_significant(row.time_ms)

    def copies(row: Row | None) -> str | None:
        times = None if row is None else over_copy(found, row)
        return None if times is None else format_significant(times)

    def over_fused(row: Row) -> str | None:
        ratio = found.ratio(row, "attn_fused")
        return None if ratio is None else format_ratio(ratio.value)

    def beyond(row: Row) -> str | None:
        left = found.share(row, "copy", "memory_bytes")
        return None if left is None else f"{left - 1:.1%}"

    return tabulate(
        "Attention beside a copy of its input",
        {
            "operator": lambda row: OPERATORS[row.candidate].label,
            "ms": milliseconds,
            "÷ copy": copies,
            "fused ÷ it": over_fused,
            "eager ms": lambda row: milliseconds(of(row, "inference", "eager")) if device == "graphs" else None,
            "train ms": lambda row: milliseconds(of(row, "training", device)),
            "train ÷ copy": lambda row: copies(of(row, "training", device)),
            "memory ÷ x": beyond,
        },
        [row for row in found.measured if (row.work, row.how) == ("inference", device)],
        group=lambda row: Case.of(row.case).label,
        notes=found.left_out(
            lambda row: f"{OPERATORS[row.candidate].label} at {Case.of(row.case).label}",
            [row for row in found.rows if row.how == device and row.work == "inference"],
        ),
    )


def draw_costs(found: Comparison) -> object:
    """Draw each operator's time over that of a copy, forward and with backward, for every shape.

    >>> rows = [Row(name, {"batch": 1, "channels": 8, "grid": [4, 4]}, time_ms=0.5) for name in ("copy", "kao_kv")]
    >>> [axis.get_title() for axis in draw_costs(Comparison("operators", "copy", rows)).axes]
    ['Forward', 'Forward and backward']
    """
    device = "graphs" if any(row.how == "graphs" for row in found.rows) else "eager"
    shapes = list(dict.fromkeys(_shape(row.case) for row in found.rows))
    names = [name for name in OPERATORS if any(row.candidate == name for row in found.measured)]
    figure = new_figure("the figure", 12, 9)
    panels = (("Forward", "inference"), ("Forward and backward", "training"))
    for axis, (title, work) in zip(figure.subplots(2, 1, sharex=True), panels, strict=True):
        for index, name in enumerate(names):
            rows = [found.find(name, Way(_case(shape), work, device)) for shape in shapes]
            times = [(place, over_copy(found, row)) for place, row in enumerate(rows) if row is not None]
            bars = [(place + (index - len(names) / 2) * 0.8 / len(names), value) for place, value in times if value]
            style: dict[str, Any] = {"color": COLOURS.get(name, "#cbd5e0"), "label": OPERATORS[name].label}
            axis.bar([x for x, _ in bars], [y for _, y in bars], width=0.8 / len(names), align="edge", **style)
        axis.axhline(1, color="#2d3748", linewidth=0.8)
        axis.set(yscale="log", ylabel="times a copy of x", title=title)
        axis.set_xticks(range(len(shapes)), [Case.of(_case(shape)).label for shape in shapes])
        tidy(axis, "y")
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure
