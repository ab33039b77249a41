"""Results against the float64 reference: one question to the device for a whole call."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


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


def described(found: Mapping[str, float], tolerance: float) -> str:
    """The worst result, in words."""
    worst = max(found, key=found.__getitem__)
    return f"{worst} is off by {found[worst]:.2e}, where {tolerance:.0e} is the tolerance"
