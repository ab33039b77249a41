"""What one call of an attention layer looked at: its coefficients, by row, by column and as a map of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kronattn.ops.grid import outer_sum
from kronattn.ops.masks import NO_MASKS, Masks, axis_means, cleared
from kronattn.ops.plan import Plan
from kronattn.ops.stages import combine_tokens

__all__ = ["PositionWeights", "RecordedAttention"]


# Recorded calls are looked at, wherever they lie.
_PLAN = Plan("torch", "torch", "recorded")


class _ByAxis:
    """What has weights for each axis of the keys' grid, first axis first."""

    axes: tuple[Tensor, ...]

    @property
    def rows(self) -> Tensor:
        """(N, H, h), or (N, H, h, *grid) of all positions: the weight of each row of keys."""
        if len(self.axes) < 2:
            raise ValueError("a grid of one axis has columns alone")
        return self.axes[-2]

    @property
    def columns(self) -> Tensor:
        """(N, H, w), or (N, H, w, *grid) of all positions: the weight of each column of keys."""
        return self.axes[-1]


@dataclass(frozen=True)
class PositionWeights(_ByAxis):
    """Where one position attends, for every sample and head.

    ``axes`` holds a (N, H, size) tensor for each axis of the keys' grid, first axis first, and ``map`` the weight of
    every position of that grid, (N, H, *key_grid).

    For Kronecker attention the axes are the layer's coefficients, one weight a row and one a column, and the map is
    what they imply: a row's weight is spread evenly over its positions, and so is a column's, because their keys and
    values are averages. Nothing is multiplied. For the regular operator the map is the coefficients, and the axes
    are its sums. The map adds up to ``total``: 1, but in mode "qkv" with the mean counted for each axis, or with a
    product, as many as there are axes: what a position's row and what its column asked for. With the mean counted once,
    weights may be negative. With a mask, a row's weight is of what there is in it, and the map spreads it over all.
    """

    axes: tuple[Tensor, ...]
    map: Tensor
    total: int


@dataclass(eq=False, repr=False)
class RecordedAttention(_ByAxis):
    """One call of one attention layer, as :func:`kronattn.record_coefficients` keeps it.

    Queries, keys and values are kept; the coefficient matrix is materialised on first use, and :meth:`at`
    does without it.

    Attributes:
        name: of the layer inside the model.
        mode: "kv", "qkv" or "regular".
        grid: of the queries.
        key_grid: of the keys, after pooling where there is any.
        queries: (N, H, d, m) as columns: every position's, or in mode "qkv" the averages, last axis first.
        keys: (N, H, d, n) as columns, with the scale and the norm of the coefficients multiplied in.
        bias: (H, n), or with a mask (N, H, n), added to each key's coefficients before the softmax, or None.
        values: (N, P, n) as columns: averages for Kronecker attention, positions for the regular operator.
        mean_once: in mode "qkv", whether the mean is counted once; positions then ask for what their averages do, less
            what all positions ask for on the average.
        per_axis: whether the keys of each axis have a softmax of their own.
        product: in mode "qkv", whether rows and columns are multiplied rather than added.
        masks: what of queries and keys holds data; see :mod:`kronattn.ops.masks`.

    Example:
        >>> from kronattn.nn import KroneckerAttention
        >>> from kronattn.nn.recording import record_coefficients
        >>> layer, x = KroneckerAttention(8).eval(), torch.randn(1, 8, 4, 6)
        >>> with record_coefficients(layer) as recorded:
        ...     y = layer(x)
        >>> recorded[0].rows.shape, recorded[0].columns.shape, recorded[0].at(1, 2).map.shape
        (torch.Size([1, 1, 4, 4, 6]), torch.Size([1, 1, 6, 4, 6]), torch.Size([1, 1, 4, 6]))
        >>> torch.allclose(recorded[0].output(), y, atol=1e-6)
        True
    """

    name: str
    mode: str
    grid: tuple[int, ...]
    key_grid: tuple[int, ...]
    queries: Tensor
    keys: Tensor
    bias: Tensor | None
    values: Tensor
    mean_once: bool = False
    per_axis: bool = False
    product: bool = False
    masks: Masks = NO_MASKS

    @property
    def num_heads(self) -> int:
        return self.queries.shape[1]

    @cached_property
    def coefficients(self) -> Tensor:
        """(N, H, n, m): one column a query, which sums to one over the n keys.

        The keys, and in mode "qkv" the queries, are the averages that belong to the last axis's indices first, as in
        :func:`kronattn.axis_averages`.
        """
        return self._coefficients(self.queries)

    @property
    def axes(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """(N, H, size, *grid) for each axis of the keys' grid: the weights of its indices for every position.

        In mode "qkv", the sum of what a position's averages asked for.
        """
        coefficients = self.coefficients
        if self.mode != "qkv":
            return self._by_axis(coefficients.unflatten(-1, self.grid))
        if self.mean_once:
            coefficients = coefficients - self._counted_again().unsqueeze(-1) / len(self.grid)
        return self._by_axis(outer_sum(coefficients.flatten(1, 2), self.grid).unflatten(1, (self.num_heads, -1)))

    def at(self, *position: int) -> PositionWeights:
        """Where a position attends: ``at(y, x)`` on an image's grid. Negative indices count from the end."""
        weights = self._coefficients(self._queries_of(position)).sum(dim=-1)
        if self.mean_once:
            weights = weights - self._counted_again()
        axes = self._by_axis(weights)
        if self.mode == "regular":
            return PositionWeights(axes, weights.unflatten(-1, self.key_grid), 1)
        positions = math.prod(self.key_grid)
        implied = torch.cat([axis * (axis.shape[-1] / positions) for axis in reversed(axes)], dim=-1)
        total = len(self.grid) if self.mode == "qkv" and not self.mean_once else 1
        return PositionWeights(axes, outer_sum(implied, self.key_grid), total)

    def output(self) -> Tensor:
        """(N, P, *grid): the coefficients applied to the values, which is the layer's output without any residual.

        With ``gate=True``, what the gate is the sigmoid of.
        """
        values = self.values.unflatten(1, (self.num_heads, -1))
        output = (values @ self.coefficients).flatten(1, 2)
        if self.mode != "qkv":
            return cleared(output.unflatten(-1, self.grid), self.masks.mask)
        combine, mean = "product" if self.product else "sum", "once" if self.mean_once else "each"
        like = output.new_empty(()).expand(len(output), 1, *self.grid)
        y = combine_tokens(output.transpose(1, 2), like, _PLAN, mean=mean, combine=combine, shares=self.masks.shares)
        return cleared(y, self.masks.mask)

    def _coefficients(self, queries: Tensor) -> Tensor:
        logits = self.keys.transpose(-2, -1) @ queries
        if self.bias is not None:
            logits = logits + self.bias.unsqueeze(-1)
        parts = logits.split(self.key_grid[::-1] if self.per_axis else logits.shape[-2], dim=-2)
        return torch.cat([part.softmax(dim=-2) for part in parts], dim=-2) / len(parts)

    def _counted_again(self) -> Tensor:
        """(N, H, n): what the outer sum of all axes counts too often, of every position alike."""
        rows = self.coefficients.flatten(1, 2).transpose(1, 2)
        total = torch.cat(axis_means(rows, self.grid[::-1], self.masks.shares), dim=1).sum(dim=1)
        return total.unflatten(1, (self.num_heads, -1)) * (1 - 1 / len(self.grid))

    def _by_axis(self, weights: Tensor) -> tuple[Tensor, ...]:
        """(N, H, n, ...) to one (N, H, size, ...) for each axis of the keys' grid, first axis first."""
        if self.mode != "regular":
            return weights.split(self.key_grid[::-1], dim=2)[::-1]
        places = weights.unflatten(2, self.key_grid)
        dims = range(2, 2 + len(self.key_grid))
        others = [[dim for dim in dims if dim != kept] for kept in dims]
        return tuple(places.sum(dim=away) if away else places for away in others)

    def _queries_of(self, position: tuple[int, ...]) -> Tensor:
        """The queries that ask for a position, as columns: its own or, in mode "qkv", one for each axis."""
        if len(position) != len(self.grid):
            raise ValueError(f"the grid {self.grid} has {len(self.grid)} axes, but the position is {position}")
        if any(not -size <= index < size for index, size in zip(position, self.grid, strict=True)):
            raise ValueError(f"position {position} is outside the grid {self.grid}")
        if self.mode != "qkv":
            return self.queries.unflatten(-1, self.grid)[(..., *position)].unsqueeze(-1)
        axes = self.queries.split(self.grid[::-1], dim=-1)
        return torch.stack([axis[..., index] for axis, index in zip(axes, position[::-1], strict=True)], dim=-1)

    def __repr__(self) -> str:
        grids = f"grid={self.grid}" + (f", key_grid={self.key_grid}" if self.key_grid != self.grid else "")
        return f"RecordedAttention({self.name!r}, mode={self.mode!r}, {grids}, num_heads={self.num_heads})"
