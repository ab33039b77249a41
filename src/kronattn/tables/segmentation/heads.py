"""Heads by themselves, on features that are there already: time, memory and multiply-adds of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.measure import Call, Comparison, Row, Way, calls, compare, count_madd, memory_budget
from kronattn.measure.calls import training_of
from kronattn.measure.environment import resolve_device, resolve_dtype
from kronattn.measure.processes import OLD, Job, compare_in_processes
from kronattn.measure.timing import replayed
from kronattn.nn import resize_scores
from kronattn.present import Table, format_ratio, format_significant, tabulate
from kronattn.present.charts import Panel, Series, draw_panels
from kronattn.tables.segmentation.candidates import HEADS, Case

__all__ = ["HOWS", "RESIZE", "WORKS", "draw_heads", "head_table", "measure_heads", "parse_sizes"]

WORKS = ("inference", "training")
HOWS = ("eager", "graphs")
# What all of them are followed by: scores brought to the size of the image. Measured for comparison.
RESIZE = "resize"
_MEMORY_BUDGET = 4 * 10**9


def measure_heads(
    cases: Sequence[Case],
    heads: Sequence[str] = tuple(HEADS),
    *,
    works: Sequence[str] = ("inference",),
    hows: Sequence[str] = ("eager",),
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = torch.float32,
    channels_last: bool = False,
    with_resize: bool = False,
    seconds: float = 4.0,
    budget: int | None = None,
    rounds: int = 7,
    against: Path | None = None,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    keep: Callable[[Comparison], None] = lambda found: None,
) -> Comparison:
    """Measure multiply-adds, memory and time of heads by themselves; on each case they take turns.

    Args:
        cases: the features.
        heads: names in ``HEADS``.
        works: "inference", and "training" (forward and backward, to the features and the weights).
        hows: "eager" and, on a GPU, "graphs": all of it as a CUDA graph, as training captures it.
        device, dtype, channels_last: of the features and the weights.
        with_resize: measure the resizing of scores too, which is the same for all.
        seconds: of timing for each case; every head runs a few times however long that takes.
        budget: bytes; heads that would need more are left out. By default 4 GB, or half of what is available if that
            is less; on a GPU half of what is available.
        rounds: of turns, with ``against``.
        against: another source tree, whose heads of the same names take part: a process for each.
        track: may wrap the loop over cases, in a progress bar for instance.
        keep: called with what was found so far after each case and way, for a run that may be cut short.

    Example:
        >>> found = measure_heads([Case(33, channels=16, num_classes=3)], ["attn", "kao_kv"], seconds=0.01)
        >>> [(row.candidate, row.work, row.madd) for row in found.rows]
        [('attn', 'inference', 11300), ('kao_kv', 'inference', 5950)]
    """
    device, dtype = resolve_device(str(device)), resolve_dtype(dtype)
    if "graphs" in hows and device.type != "cuda":
        raise ValueError("--how graphs is for CUDA devices: give --device cuda")
    for name in heads:
        if name not in HEADS:
            raise ValueError(f"unknown head {name!r}: known are {', '.join(HEADS)}")
    allowed = memory_budget(device, _MEMORY_BUDGET) if budget is None else budget

    def limit(name: str, way: Way, found: Comparison) -> str:
        if name == RESIZE:
            return ""
        needed = HEADS[name].bytes_needed(Case(**way.case), dtype.itemsize, training=way.work == "training")
        return "" if needed <= allowed else f"would need {needed / 1e9:,.1f} GB, more than {allowed / 1e9:,.1f} GB"

    def count(name: str, way: Way) -> dict[str, int]:
        case = Case(**way.case)
        if name == RESIZE:
            return {}
        with torch.device("meta"):
            head = HEADS[name].module(case.channels, case.num_classes).eval()
            return {"madd": count_madd(head, torch.empty(1, case.channels, case.grid, case.grid))}

    def arguments(name: str, way: Way) -> dict[str, Any]:
        case, head = Case(**way.case), HEADS[name.removesuffix(OLD)]
        return {
            "build": head.build,
            "mode": head.mode,
            "work": way.work,
            "batch": case.batch,
            "grid": case.grid,
            "channels": case.channels,
            "num_classes": case.num_classes,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "channels_last": channels_last,
        }

    def prepare(name: str, way: Way) -> Call:
        call = resize_call(way) if name == RESIZE else calls.head_call(**arguments(name, way))
        with torch.no_grad():
            return Call(replayed(lambda _: call(), [None]) if way.how == "graphs" else call)

    def resize_call(way: Way) -> Callable[[], Any]:
        case, layout = Case(**way.case), torch.channels_last if channels_last else torch.contiguous_format
        scores = torch.randn(case.batch, case.num_classes, case.grid, case.grid).to(device, dtype)
        scores, module = scores.contiguous(memory_format=layout), _Resize(case)
        return training_of(module, scores) if way.work == "training" else lambda: module(scores)

    def job(name: str, way: Way) -> Job:
        return Job(Path(calls.__file__), "head_call", arguments(name, way), against if name.endswith(OLD) else None)

    ways = [Way(asdict(case), work, how) for case in cases for how in hows for work in works]
    settings = {"channels_last": channels_last}
    shared: dict[str, Any] = {"device": device, "dtype": dtype, "settings": settings, "track": track, "keep": keep}
    if against is None:
        names = [*heads, *([RESIZE] if with_resize else [])]
        return compare("heads", names, ways, prepare, base="attn", limit=limit, count=count, seconds=seconds, **shared)
    # The regular head that materialises its coefficients is the base, and is the same in all trees.
    names = [one for name in heads for one in ([name] if HEADS[name].materialises else [name, name + OLD])]
    turn = seconds / rounds / len(names)
    return compare_in_processes("heads", names, ways, job, base="attn", rounds=rounds, seconds=turn, **shared)


class _Resize(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, scores: Tensor) -> Tensor:
        return resize_scores(scores, (self.case.size, self.case.size), stride=self.case.stride)


def head_table(found: Comparison) -> Table:
    """The heads by themselves: a group for each size of image and way of running."""
    with_resize = any(row.candidate == RESIZE for row in found.rows)
    shapes = dict.fromkeys(f"{c.batch}×{c.channels}×{c.grid}²" for row in found.rows for c in [Case(**row.case)])

    def share(row: Row, base: str) -> str | None:
        left = found.share(row, base, "memory_bytes")
        return None if left is None or row.candidate == RESIZE else f"{left:.1%}"

    def over(row: Row, base: str) -> str | None:
        ratio = found.ratio(row, base)
        return None if ratio is None or row.candidate == RESIZE else format_ratio(ratio.value)

    return tabulate(
        "What the heads cost",
        {
            "Head": lambda row: _label(row.candidate),
            "GMAdd": lambda row: f"{row.madd / 1e9:.3f}" if row.madd else None,
            # A graph's replay allocates nothing: what it needs was allocated when it was captured.
            "MB": lambda row: format_significant(row.memory_bytes / 1e6) if row.memory_bytes else None,
            "of Attn": lambda row: share(row, "attn"),
            "of fused": lambda row: share(row, "attn_fused"),
            "ms": lambda row: format_significant(row.time_ms),
            "images/s": lambda row: format_significant(row.case["batch"] / row.time_ms * 1e3),
            "over Attn": lambda row: over(row, "attn"),
            "over fused": lambda row: over(row, "attn_fused"),
        },
        found.measured,
        group=lambda row: ", ".join(
            [f"{row.case['size']}²", *([row.work] * (row.work != "inference")), *([row.how] * (row.how != "eager"))]
        ),
        notes=[
            f"Features: {', '.join(shapes)} (batch × channels × grid).",
            "The head by itself, from features to scores at their resolution. MB: 10⁶ bytes at the peak beyond "
            "features and weights. ms: median for the batch. Attn materialises its coefficient matrix, as the paper's "
            "does; fused is the same head by PyTorch's fused attention (in blocks on the CPU). GMAdd for one image.",
            *(["resize: scores to the size of the image, which follows every head."] if with_resize else []),
            *found.left_out(lambda row: f"{_label(row.candidate)} at {row.case['size']}², {row.work}"),
        ],
    )


def _label(name: str) -> str:
    return HEADS[name].label if name in HEADS else name


def draw_heads(found: Comparison) -> object:
    """Draw time and memory of each head against the image's size, on logarithmic scales; eager inference alone.

    Example:
        >>> cases = [Case(size, channels=16) for size in (17, 33)]
        >>> [axis.get_ylabel() for axis in draw_heads(measure_heads(cases, seconds=0.01)).axes]
        ['milliseconds an image', 'megabytes an image']
    """
    rows = sorted(
        (row for row in found.measured if (row.work, row.how) == ("inference", "eager")),
        key=lambda row: row.case["size"],
    )
    panels: list[tuple[str, str, Callable[[Row], float]]] = [
        ("Time of the head", "milliseconds an image", lambda row: row.time_ms or 0),
        ("Memory beyond the features", "megabytes an image", lambda row: (row.memory_bytes or 0) / 1e6),
    ]

    def series(name: str, value: Callable[[Row], float]) -> Series:
        points = [(row.case["size"], value(row) / row.case["batch"]) for row in rows if row.candidate == name]
        return Series(name, HEADS[name].label, points)

    return draw_panels(
        [Panel(title, unit, [series(name, value) for name in HEADS]) for title, unit, value in panels],
        xlabel="height and width of the image",
        ticks={size: str(size) for size in sorted({row.case["size"] for row in rows})},
        width=10,
    )


def parse_sizes(given: str) -> list[int]:
    """Sizes of images from "321,513".

    Example:
        >>> parse_sizes("321, 513")
        [321, 513]
    """
    try:
        sizes = [int(size) for size in given.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must be whole numbers from 1 up with commas between, like 321,513, not {given!r}")
    return sizes
