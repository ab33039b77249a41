"""How far another runtime's outputs are from PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["LIMIT", "Difference", "largest_difference"]

# Of the largest output: those of an untrained network can be 1e-3 or 6e4, and float32 has seven digits either way.
LIMIT = 1e-4


@dataclass(frozen=True)
class Difference:
    """The largest difference at one size, and the largest output there.

    Example:
        >>> difference = Difference((224, 224), 0.12, 6e4)
        >>> print(difference, difference.small_enough)
        1.2e-01 at 224×224 (outputs up to 6e+04) True
    """

    size: tuple[int, int]
    absolute: float
    outputs: float

    @property
    def small_enough(self) -> bool:
        return self.absolute <= LIMIT * self.outputs

    @property
    def relative(self) -> float:
        """The difference over the largest output."""
        return self.absolute / self.outputs if self.outputs else self.absolute

    def to_json(self) -> dict[str, object]:
        return {"size": list(self.size), "largest": self.absolute, "largest_output": self.outputs}

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
