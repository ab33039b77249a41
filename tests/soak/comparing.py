"""Results against the float64 reference: one question to the device for a whole call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

_NEIGHBOURS = 8


def errors(
    actual: Mapping[str, Tensor], exact: Mapping[str, Tensor], floors: Mapping[str, float | None]
) -> dict[str, float]:
    """For each result its largest difference over its largest entry, or over its floor where that is more.

    Gradients have the largest gradient of the call for a floor, and their own where that is more and not None: where
    keys are all alike or the softmax saturates, large terms cancel and leave next to nothing for some of them. NaN is
    an infinite error.
    """
    names = [name for name in exact if exact[name].numel()]
    if not names:
        return {}
    sizes = torch.stack([exact[name].abs().max().double() for name in names])
    differences = torch.stack([(actual[name].double() - exact[name]).abs().max() for name in names])
    sizes, differences = torch.stack([sizes, differences]).tolist()
    largest = max([0.1, *(size for size, name in zip(sizes, names, strict=True) if floors[name] is None)])
    found = {}
    for name, size, difference in zip(names, sizes, differences, strict=True):
        floor = floors[name] or 0.0
        error = difference / max(size, floor, largest if name.startswith("gradient") else 0.0)
        found[name] = float("inf") if error != error else error
    return found


def plain_error(
    results: Callable[[list[Tensor]], Mapping[str, Tensor]],
    tensors: Sequence[Tensor],
    floors: Mapping[str, float | None],
) -> float:
    """How far off the literal equations are, computed in the input's own precision (by autocast in half precision).

    Where a softmax saturates, large terms cancel and leave their roundings, whoever computes it. The most of a few
    inputs that differ from this one by a rounding each.
    """
    furthest = 0.0
    kind, dtype = tensors[0].device.type, tensors[0].dtype
    generator = torch.Generator(tensors[0].device).manual_seed(3)
    for _ in range(_NEIGHBOURS):
        near = []
        for x in tensors:
            signs = torch.randint(-1, 2, x.shape, generator=generator, device=x.device)
            near.append((x.double() * (1 + signs * torch.finfo(dtype).eps)).to(dtype))
        exact = results([x.double() for x in near])
        with torch.autocast(kind, dtype=dtype, enabled=dtype in (torch.float16, torch.bfloat16)):
            plain = results(near)
        furthest = max([furthest, *errors(plain, exact, floors).values()])
    return furthest


def described(found: Mapping[str, float], tolerance: float) -> str:
    """The worst result, in words."""
    worst = max(found, key=found.__getitem__)
    return f"{worst} is off by {found[worst]:.2e}, where {tolerance:.0e} is the tolerance"
