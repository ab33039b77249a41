"""Measuring heads by themselves, on features that are there already; and counting whole networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.measure import (
    Timing,
    available_memory,
    count_madd,
    describe_environment,
    peak_memory,
    resolve_device,
    time_calls,
)
from kronattn.models.registry import create_model
from kronattn.nn import resize_scores
from kronattn.tables.segmentation.candidates import HEADS, Case

__all__ = ["RESIZE", "WORKS", "Counted", "HeadCost", "HeadCosts", "LeftOut", "count_networks", "measure_heads"]

WORKS = ("inference", "training")
# What all of them are followed by: scores brought to the size of the image. Measured for comparison.
RESIZE = "resize"
_MEMORY_BUDGET = 4 * 10**9


@dataclass(frozen=True)
class HeadCost:
    """What a head costs on one case: from features to scores at the features' resolution.

    ``madd`` is for one image, time and memory are for the batch; memory is what is allocated at the peak beyond the
    features and the weights. Ratios are over regular attention that builds its coefficients (``attn``) and over the
    fused one; None where those were not run.
    """

    case: Case
    head: str
    work: str
    madd: int
    memory_bytes: int
    timing: Timing
    speedup: float | None
    speedup_over_fused: float | None
    memory_over_attn: float | None
    memory_over_fused: float | None

    @property
    def time_ms(self) -> float:
        """The median time of a batch, in milliseconds."""
        return self.timing.median * 1e3

    @property
    def images_per_second(self) -> float:
        """Images a second of the head alone."""
        return self.case.batch / self.timing.median


@dataclass(frozen=True)
class LeftOut:
    """A head that was not run on a case, and why."""

    case: Case
    head: str
    work: str
    reason: str


@dataclass(frozen=True)
class HeadCosts:
    """All costs, what is missing among them, and what they were measured with."""

    rows: list[HeadCost] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    environment: dict[str, str | int] = field(default_factory=dict)


def measure_heads(
    cases: Sequence[Case],
    heads: Sequence[str] = tuple(HEADS),
    *,
    works: Sequence[str] = ("inference",),
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    with_resize: bool = False,
    seconds: float = 4.0,
    memory_budget: int | None = None,
    track: Callable[[Sequence[tuple[Case, str]]], Iterable[tuple[Case, str]]] = lambda items: items,
) -> HeadCosts:
    """Measure multiply-adds, memory and time of heads by themselves; on each case they take turns.

    Args:
        cases: the features.
        heads: names in ``HEADS``.
        works: "inference", and "training" (forward and backward, to the features and the weights).
        device, dtype, channels_last: of the features and the weights.
        with_resize: measure the resizing of scores too, which is the same for all.
        seconds: of timing for each case; every head runs a few times however long that takes.
        memory_budget: bytes; heads that would need more are left out. By default 4 GB, or half of what is available if
            that is less; on a GPU half of what is available.
        track: may wrap the loop over cases, in a progress bar for instance.

    Example:
        >>> found = measure_heads([Case(33, channels=16, num_classes=3)], ["attn", "kao_kv"], seconds=0.01)
        >>> [(row.head, row.work, row.madd) for row in found.rows]
        [('attn', 'inference', 11300), ('kao_kv', 'inference', 5950)]
    """
    device = resolve_device(str(device))
    for name in heads:
        if name not in HEADS:
            raise ValueError(f"unknown head {name!r}: known are {', '.join(HEADS)}")
    budget = _default_budget(device) if memory_budget is None else memory_budget
    costs = HeadCosts(environment=describe_environment(device, dtype))
    for case, work in track([(case, work) for case in cases for work in works]):
        chosen = []
        for name in heads:
            needed = HEADS[name].bytes_needed(case, dtype.itemsize, training=work == "training")
            if needed > budget:
                reason = f"would need {needed / 1e9:,.1f} GB, more than {budget / 1e9:,.1f} GB"
                costs.left_out.append(LeftOut(case, name, work, reason))
            else:
                chosen.append(name)
        costs.rows.extend(_measure(case, work, chosen, device, dtype, channels_last, with_resize, seconds))
    return costs


def _measure(
    case: Case,
    work: str,
    chosen: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    channels_last: bool,
    with_resize: bool,
    seconds: float,
) -> list[HeadCost]:
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    shape = (case.batch, case.channels, case.grid, case.grid)
    # Post-ReLU, as a backbone's are.
    features = torch.randn(shape).relu().to(device, dtype).contiguous(memory_format=layout)
    modules = {name: _module(name, case).to(device, dtype, memory_format=layout) for name in chosen}  # type: ignore[call-overload]
    calls = {name: _call(module, features, work) for name, module in modules.items()}
    if with_resize:
        scores = torch.randn(case.batch, case.num_classes, case.grid, case.grid).to(device, dtype)
        calls[RESIZE] = _call(_Resize(case), scores.contiguous(memory_format=layout), work)
    if not calls:
        return []
    timings = time_calls(calls, device=device, seconds=seconds)
    memory = {name: peak_memory(call, device=device, warm_up=False) for name, call in calls.items()}

    def times(as_what: str, name: str) -> float | None:
        return timings[as_what].median / timings[name].median if as_what in timings and name != RESIZE else None

    def share(of_what: str, name: str) -> float | None:
        return memory[name] / memory[of_what] if of_what in memory and name != RESIZE else None

    return [
        HeadCost(
            case=case,
            head=name,
            work=work,
            madd=0 if name == RESIZE else _madd(name, case),
            memory_bytes=memory[name],
            timing=timings[name],
            speedup=times("attn", name),
            speedup_over_fused=times("attn_fused", name),
            memory_over_attn=share("attn", name),
            memory_over_fused=share("attn_fused", name),
        )
        for name in calls
    ]


class _Resize(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, scores: Tensor) -> Tensor:
        return resize_scores(scores, (self.case.size, self.case.size), stride=self.case.stride)


def _module(name: str, case: Case) -> nn.Module:
    return HEADS[name].build(case.channels, case.num_classes)


def _call(module: nn.Module, x: Tensor, work: str) -> Callable[[], Any]:
    if work == "inference":
        module.eval()
        return lambda: module(x)
    module.train()
    leaf = x.clone().requires_grad_()
    wanted = [leaf, *module.parameters()]

    def train() -> Any:
        # Timing runs in inference mode, which training has to leave.
        with torch.inference_mode(False), torch.enable_grad():
            scores = module(leaf)
            return torch.autograd.grad(scores, wanted, torch.ones_like(scores))

    return train


def _madd(name: str, case: Case) -> int:
    with torch.device("meta"):
        return count_madd(_module(name, case).eval(), torch.empty(1, case.channels, case.grid, case.grid))


def _default_budget(device: torch.device) -> int:
    available = available_memory(device)
    if available is None:
        return _MEMORY_BUDGET
    return available // 2 if device.type == "cuda" else min(_MEMORY_BUDGET, available // 2)


@dataclass(frozen=True)
class Counted:
    """A whole network, counted: parameters, those of its head, features' channels, and MAdd at each image size."""

    network: str
    params: int
    head_params: int
    channels: int
    stride: int
    madd: dict[int, int]


def count_networks(
    sizes: Sequence[int], *, backbone: str = "resnet101", num_classes: int = 21, output_stride: int = 8
) -> list[Counted]:
    """Count the parameters and multiply-adds of the four networks, for one image of each size; nothing is computed.

    Example:
        >>> [(found.network, found.head_params) for found in count_networks([], backbone="kanet_kv")][2]
        ('deeplabv2_kao_kv', 85222)
    """
    counted = []
    for network in dict.fromkeys(head.network for head in HEADS.values()):
        with torch.device("meta"):
            model: Any = create_model(
                network, backbone=backbone, num_classes=num_classes, output_stride=output_stride
            ).eval()
            madd = {size: count_madd(model, torch.empty(1, 3, size, size)) for size in sizes}
        counted.append(
            Counted(
                network=network,
                params=sum(parameter.numel() for parameter in model.parameters()),
                head_params=sum(parameter.numel() for parameter in model.head.parameters()),
                channels=model.backbone.num_features,
                stride=model.output_stride,
                madd=madd,
            )
        )
    return counted
