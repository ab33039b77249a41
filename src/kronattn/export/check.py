"""How far another runtime's outputs are from PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["LIMIT", "Difference", "largest_difference"]

LIMIT = 1e-4
# Outputs of an untrained network can be so small that any difference is: relative to the largest output, too.
_RELATIVE_LIMIT = 1e-3


@dataclass(frozen=True)
class Difference:
    """The largest difference at one size, and the largest output there.

    Example:
        >>> print(Difference((224, 224), 2e-7, 1.5))
        2.0e-07 at 224×224 (outputs up to 1.5)
    """

    size: tuple[int, int]
    absolute: float
    outputs: float

    @property
    def small_enough(self) -> bool:
        return self.absolute <= LIMIT and self.absolute <= _RELATIVE_LIMIT * self.outputs

    def __str__(self) -> str:
        height, width = self.size
        return f"{self.absolute:.1e} at {height}×{width} (outputs up to {self.outputs:.2g})"


def largest_difference(model: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> Difference:
    """Compare ``run`` with ``model`` on (N, C, height, width); anything that is not a number is infinitely far.

    Example:
        >>> largest_difference(nn.Identity(), lambda x: x + 0.5, torch.ones(1, 3, 4, 5))
        Difference(size=(4, 5), absolute=0.5, outputs=1.0)
    """
    with torch.no_grad():
        expected, found = model(images), run(images)
    if expected.shape != found.shape:
        raise ValueError(f"the exported network gives {tuple(found.shape)} where PyTorch gives {tuple(expected.shape)}")
    absolute = (expected - found).abs().max().nan_to_num(float("inf"))
    height, width = images.shape[2:]
    return Difference((height, width), float(absolute), float(expected.abs().max()))
