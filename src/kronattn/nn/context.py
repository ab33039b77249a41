"""Cheaper ways to global context than attention, as layers: what attention has to be compared with.

Each takes (N, channels, *grid) of any size to the same shape, with one positional argument like
:class:`kronattn.nn.KroneckerAttention`, and adds ``residual`` where it is given. ``GlobalMean`` and ``AxisMeans`` are
controls with the parameters of KroneckerAttention's value map: where attention does no better, it is not the attention
that helps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kronattn.nn.context_layer import (
    ContextLayer,
    add_residual,
    axis_tokens,
    grid_mean,
    split_axes,
    spread_vector,
)
from kronattn.nn.grid_attention import map_positions
from kronattn.nn.squeeze_axial import SqueezeAxial
from kronattn.ops.attend import at_least_float32
from kronattn.ops.autocast import without_autocast
from kronattn.ops.checks import check_positive_int
from kronattn.ops.fx import leaf_function
from kronattn.ops.torch_backend import spread_tokens

__all__ = ["AxisMeans", "CoordinateGate", "GlobalContext", "GlobalMean", "NoContext", "SqueezeAxial"]

# Fewer channels than this in a bottleneck leave its norm nothing to work on.
_NARROWEST = 8


class NoContext(ContextLayer):
    """Zeros, or the residual alone: the control that looks at nothing.

    Example:
        >>> NoContext(8)(torch.randn(2, 8, 5, 6)).count_nonzero()
        tensor(0)
    """

    def _context(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return add_residual(torch.zeros_like(x), residual)


class _MappedMeans(ContextLayer):
    """Averages, mapped as KroneckerAttention maps its values, and initialised so."""

    def __init__(self, channels: int, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__(channels)
        self.value_map = nn.Linear(channels, channels, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier's initialisation."""
        nn.init.xavier_uniform_(self.value_map.weight)


class GlobalMean(_MappedMeans):
    """The mean of the grid, mapped, at every position: y = W·mean(x).

    Global average pooling in the place of attention; the squeeze of squeeze-and-excitation (Hu et al., CVPR 2018,
    https://arxiv.org/abs/1709.01507) without its gate.

    Example:
        >>> y = GlobalMean(8)(torch.randn(2, 8, 5, 6))
        >>> y.shape, bool((y == y[..., :1, :1]).all())
        (torch.Size([2, 8, 5, 6]), True)
    """

    def _context(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return spread_vector(self.value_map(grid_mean(x)), x, residual)


class AxisMeans(_MappedMeans):
    """The averages of rows and columns, mapped and added up over the grid: KAO_QKV without its attention.

    y[i, j] = W·(column average j + row average i − mean), and likewise for any number of axes.

    Args:
        channels: of the input.
        mean: "once" as written above, or "each": every axis's averages bring the mean with them, and it is counted
            once for each axis.

    Example:
        >>> AxisMeans(8)(torch.randn(2, 8, 3, 5, 6)).shape
        torch.Size([2, 8, 3, 5, 6])
    """

    shown = ("mean",)

    def __init__(self, channels: int, *, mean: str = "once", device: Any = None, dtype: Any = None) -> None:
        super().__init__(channels, device=device, dtype=dtype)
        if mean not in ("once", "each"):
            raise ValueError(f"mean must be 'once' or 'each', not {mean!r}")
        self.mean = mean

    def _context(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return spread_tokens(self.value_map(axis_tokens(x, self.mean)), x, residual=residual)


class CoordinateGate(ContextLayer):
    """Coordinate attention: a gate for each index of each axis, from the averages along the axes.

    y = x · Π over the axes a of σ(W_a·f_a), where f = h-swish(norm(W·averages)) and f_a are axis a's vectors of it.
    Hou, Zhou, Feng: *Coordinate Attention for Efficient Mobile Network Design*, CVPR 2021,
    https://arxiv.org/abs/2103.02907; for any number of axes in place of two.

    Args:
        channels: of the input.
        axes: of the grid, 1 to 4: each has a map of its own.
        reduction: by which the shared map W divides the channels, down to 8 of them.

    Example:
        >>> CoordinateGate(64, axes=3)(torch.randn(2, 64, 3, 5, 6)).shape
        torch.Size([2, 64, 3, 5, 6])
    """

    shown = ("axes", "hidden_channels")

    def __init__(
        self, channels: int, *, axes: int = 2, reduction: int = 32, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(channels, axes=axes)
        self.hidden_channels = _bottleneck(channels, reduction)
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        # A bias would go under in the norm.
        self.reduce = nn.Linear(channels, self.hidden_channels, bias=False, **like)
        self.reduce_norm = nn.BatchNorm1d(self.hidden_channels, **like)
        self.act = nn.Hardswish()
        self.gates = nn.ModuleList(nn.Linear(self.hidden_channels, channels, **like) for _ in range(axes))

    def _context(self, x: Tensor, residual: Tensor | None) -> Tensor:
        hidden = self.reduce_norm(self.reduce(axis_tokens(x)).transpose(1, 2))
        vectors = split_axes(self.act(hidden).transpose(1, 2), x)
        return gated(x, [gate(vectors[axis]) for axis, gate in enumerate(self.gates)], residual)


class GlobalContext(ContextLayer):
    """GCNet's global context: one softmax over all positions, the same for every query, and a bottleneck.

    y = W₂·ReLU(LayerNorm(W₁·Σⱼ αⱼ xⱼ)) with α = softmax over positions of wᵀx. Cao, Xu, Lin, Wei, Hu: *GCNet: Non-local
    Networks Meet Squeeze-Excitation Networks and Beyond*, ICCV workshops 2019, https://arxiv.org/abs/1904.11492. The
    input that the paper adds is ``residual=x``.

    Args:
        channels: of the input.
        reduction: by which W₁ divides the channels, down to 8 of them.

    Example:
        >>> x = torch.randn(2, 64, 5, 6)
        >>> GlobalContext(64)(x, residual=x).shape
        torch.Size([2, 64, 5, 6])
    """

    shown = ("hidden_channels",)

    def __init__(self, channels: int, *, reduction: int = 16, device: Any = None, dtype: Any = None) -> None:
        super().__init__(channels)
        self.hidden_channels = _bottleneck(channels, reduction)
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        # The softmax ignores a common shift, so there is no bias to learn.
        self.key_map = nn.Linear(channels, 1, bias=False, **like)
        self.reduce = nn.Linear(channels, self.hidden_channels, **like)
        self.reduce_norm = nn.LayerNorm(self.hidden_channels, **like)
        self.act = nn.ReLU()
        self.expand = nn.Linear(self.hidden_channels, channels, **like)

    def _context(self, x: Tensor, residual: Tensor | None) -> Tensor:
        pooled = softmax_pool(x, map_positions(self.key_map, x))
        return spread_vector(self.expand(self.act(self.reduce_norm(self.reduce(pooled)))), x, residual)


def _bottleneck(channels: int, reduction: int) -> int:
    check_positive_int("reduction", reduction)
    return max(_NARROWEST, channels // reduction)


@leaf_function
def gated(x: Tensor, logits: list[Tensor], residual: Tensor | None) -> Tensor:
    """(N, C, *grid) times the sigmoid of each axis's (N, size, C) logits, plus ``residual``."""
    y, axes = x, len(logits)
    for axis, vectors in enumerate(logits):
        # (N, size, C) to (N, C, 1, ..., size, ..., 1)
        gate = vectors.sigmoid().to(x.dtype).transpose(1, 2)
        y = y * gate[(slice(None), slice(None), *[None] * axis, slice(None), *[None] * (axes - 1 - axis))]
    return add_residual(y, residual)


@leaf_function
def softmax_pool(x: Tensor, logits: Tensor) -> Tensor:
    """The average of (N, C, *grid) weighted by the softmax over positions of (N, 1, *grid) logits: (N, C)."""
    weights = at_least_float32(logits).flatten(2).softmax(dim=2).transpose(1, 2)
    # In float16 the weights of a large grid would be rounded to nothing.
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    with without_autocast(x):
        return torch.bmm(x.flatten(2).to(dtype), weights.to(dtype)).squeeze(2).to(x.dtype)
