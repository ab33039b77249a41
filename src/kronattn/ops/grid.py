"""Axis averages and the outer sum: from a grid to one vector for each index of each axis, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kronattn.ops.checks import DTYPES, check_choice, check_grid_tensor, check_tokens
from kronattn.ops.fx import is_captured, leaf_function

__all__ = ["axis_averages", "outer_sum"]

_HALF = (torch.float16, torch.bfloat16)


@leaf_function
def axis_averages(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Average a grid over all axes but one, for every axis: the paper's C = [Hᵀ, Lᵀ].

    Args:
        x: (N, C, *grid), 1 to 4 axes.
        dtype: of the result; ``x``'s own by default. Sums are accumulated in float32 at least.

    Returns:
        (N, C, sum(grid)). The last axis comes first: on a (height, width) grid, the w columns' averages over
        the rows, then the h rows' averages over the columns. One axis has nothing to average over: ``x``.

    Example:
        >>> x = torch.arange(6.0).reshape(1, 1, 2, 3)  # [[0, 1, 2], [3, 4, 5]]
        >>> axis_averages(x)
        tensor([[[1.5000, 2.5000, 3.5000, 1.0000, 4.0000]]])
    """
    check_grid_tensor(x, "x")
    check_choice("dtype", dtype, (None, *DTYPES))
    averages = wide_averages(x)
    dtype = dtype or x.dtype
    return averages if averages.dtype == dtype else averages.to(dtype)


@leaf_function
def outer_sum(tokens: Tensor, grid: Sequence[int]) -> Tensor:
    """Give every position the sum of its axes' vectors: the counterpart of :func:`axis_averages`.

    Args:
        tokens: (N, C, sum(grid)), the last axis first.
        grid: the sizes of 1 to 4 axes.

    Returns:
        (N, C, *grid); on a (height, width) grid, ``y[..., i, j] = tokens[..., j] + tokens[..., w + i]``.

    Example:
        >>> outer_sum(torch.tensor([[[1.0, 2.0, 3.0, 10.0, 20.0]]]), (2, 3))
        tensor([[[[11., 12., 13.],
                  [21., 22., 23.]]]])
    """
    check_tokens(tokens, grid)
    return spread(tokens, grid)


def wide_averages(x: Tensor) -> Tensor:
    """:func:`axis_averages` of input that has been checked, in float32 at least."""
    parts = _axis_averages(x, torch.float32 if x.dtype in _HALF else None)
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def _axis_averages(x: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """One (N, C, size) tensor for each axis, the last axis first, in ``dtype`` or x's own.

    The full tensor is read twice however many axes there are: once for the first axis, and once to average
    the first axis away, which leaves a smaller grid with the same averages over the axes that remain.
    """
    if x.dim() == 3:
        return [x if dtype is None else x.to(dtype)]
    rest = x.mean(dim=2, dtype=dtype)
    first = x.mean(dim=tuple(range(3, x.dim())), dtype=dtype)
    return [*_axis_averages(rest, None), first]


def spread(tokens: Tensor, grid: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """:func:`outer_sum` of input that has been checked, in ``dtype`` or the tokens' own."""
    dtype = dtype or tokens.dtype
    by_hand = dtype in _HALF and len(grid) > 1 and tokens.requires_grad and torch.is_grad_enabled()
    return _Spread.apply(tokens, tuple(grid), dtype) if by_hand and not is_captured() else _spread(tokens, grid, dtype)


def _spread(
    tokens: Tensor, grid: Sequence[int], dtype: torch.dtype, combine: Callable[..., Tensor] = torch.add
) -> Tensor:
    tokens = tokens.to(dtype)
    start, total = grid[-1], tokens[..., : grid[-1]]
    for size in reversed(grid[:-1]):
        # Small sums first: the vectors of the last axes, then one axis more with each step.
        vector = tokens[..., start : start + size]
        total = combine(vector[(..., *[None] * (total.dim() - 2))], total.unsqueeze(2))
        start += size
    return total


def outer_product(tokens: Tensor, grid: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The product of each position's vectors in the place of :func:`outer_sum`."""
    return _spread(tokens, grid, dtype, torch.mul)


class _Spread(torch.autograd.Function):
    """Half precision whose gradient is summed in float32: autograd would round after each axis, and what nearly cancels
    would be lost."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor, grid: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _spread(tokens, grid, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        tokens, ctx.grid, _ = inputs
        ctx.dtype = tokens.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        positions = math.prod(ctx.grid)
        parts = zip(_axis_averages(gradient, torch.float32), reversed(ctx.grid), strict=True)
        received = torch.cat([average * (positions // size) for average, size in parts], dim=-1)
        return received.to(ctx.dtype), None, None
