"""Learned vectors that tell queries and keys where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.ops.autocast import without_autocast
from kronattn.ops.checks import check_grid
from kronattn.ops.fx import leaf_module

__all__ = ["AxisPositions"]

# Small beside features of size one, as vision transformers start theirs.
_STD = 0.02


class AxisPositions(nn.Module):
    """A vector for each place of each axis, interpolated linearly to grids of any size.

    Args:
        channels: of the vectors.
        grid: how many places each axis has vectors for.

    Shape:
        (N, C, *grid) of any size with as many axes to (1, sum(grid), channels), the last axis first as
        :func:`kronattn.axis_averages` has it; with ``shares``, (N, sum(grid)), to (N, sum(grid), channels): a sample's
        size along an axis is then the number of places that are there.

    Example:
        >>> positions = AxisPositions(8, (16, 16))
        >>> positions(torch.randn(2, 3, 10, 20)).shape
        torch.Size([1, 30, 8])
    """

    def __init__(self, channels: int, grid: Sequence[int], device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_grid(grid)
        self.grid = tuple(grid)
        self.vectors = nn.Parameter(torch.empty(sum(grid), channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.vectors, std=_STD)

    @leaf_module
    def forward(self, like: Tensor, shares: Tensor | None = None) -> Tensor:
        grid = like.shape[2:]
        if len(grid) != len(self.grid):
            raise ValueError(
                f'positions="learned" was built for {len(self.grid)} axes (grid={self.grid}), '
                f"but the grid {tuple(grid)} has {len(grid)}"
            )
        with without_autocast(like):
            vectors = self.vectors.to(torch.promote_types(self.vectors.dtype, torch.float32))
            there = vectors.new_ones(1, sum(grid)) if shares is None else (shares > 0).to(vectors.dtype)
            axes = zip(vectors.split(self.grid[::-1]), there.split(list(grid)[::-1], dim=1), strict=True)
            return torch.cat([_interpolated(table, places) for table, places in axes], dim=1)

    def extra_repr(self) -> str:
        return f"{self.vectors.shape[1]}, grid={self.grid}"


def _interpolated(table: Tensor, there: Tensor) -> Tensor:
    """A (places, C) table at the centres of the places of (N, size) that are there: (N, size, C).

    Linear interpolation as a product with the weight that each entry has at each place: no gather, and of any size.
    """
    places = len(table)
    size = there.sum(dim=1, keepdim=True).clamp_min(1)
    at = ((there.cumsum(dim=1) - 0.5) * (places / size) - 0.5).clamp(0, places - 1)
    weights = (1 - (at.unsqueeze(2) - torch.arange(places, device=at.device, dtype=at.dtype)).abs()).clamp_min(0)
    return weights @ table
