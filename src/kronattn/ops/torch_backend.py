"""The stages in plain PyTorch, on any device, without the coefficient matrix.

Grids are (N, C, *grid), tokens (N, S, C).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kronattn.ops import grid
from kronattn.ops.attend import at_least_float32, attend
from kronattn.ops.autocast import without_autocast
from kronattn.ops.checks import check_product_grid
from kronattn.ops.coefficients import Moments, coefficient_moments, masked_moments
from kronattn.ops.fx import leaf_function
from kronattn.ops.masks import axis_means
from kronattn.ops.matrices import eager_matrices_of

__all__ = ["count_mean_once", "moments", "multiply_tokens", "pool", "spread", "spread_tokens"]

# Nothing over nothing is nothing.
_SMALLEST_SQUARE = 1e-12


@leaf_function
def scaled(keys: Tensor, scale: float | Tensor, num_heads: int) -> Tensor:
    """(N, S, C) keys times the coefficients' scale: a number, or a (1,), (num_heads,) or (num_heads, S) tensor."""
    if not isinstance(scale, Tensor):
        return keys if scale == 1 else _unrounded(keys) * scale
    scale = scale.to(torch.promote_types(keys.dtype, torch.float32))
    if scale.numel() == 1:
        return _unrounded(keys) * scale.reshape(())
    # One for each head, or for each key of each head: (H, 1) or (S, H, 1).
    by_head = scale.unsqueeze(1) if scale.dim() == 1 else scale.t().unsqueeze(2)
    return (_unrounded(keys).unflatten(2, (num_heads, -1)) * by_head).flatten(2)


def _unrounded(keys: Tensor) -> Tensor:
    # The CPU computes attention in float32, so nothing need be rounded; fused attention takes half precision alone.
    return at_least_float32(keys) if keys.device.type == "cpu" else keys


def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Averages as :func:`kronattn.axis_averages` in float32 at least, (N, sum(grid), C), and ``x`` to go on with."""
    matrices = eager_matrices_of(x)
    if matrices is None:
        return grid.wide_averages(x).transpose(1, 2), x
    matrix, columns = matrices[0], x.flatten(2)
    if x.stride(1) == 1:
        return torch.bmm(matrix.expand(x.shape[0], -1, -1), columns.transpose(1, 2)), x
    return torch.matmul(columns, matrix.t()).transpose(1, 2), x


@leaf_function
def spread(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int = 1,
    key_bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The last stage of KAO_KV: every position attends to the keys, head by head.

    Args:
        query: (N, C, *grid).
        keys: (N, S, C), the scale of the coefficients multiplied in.
        values: (N, S, P).
        num_heads: divides C and P.
        key_bias: (num_heads, S) or (N, num_heads, S), added to every coefficient of a key.
        residual: (N, P, *grid), added to the result.

    Returns:
        (N, P, *grid) in query's dtype and memory format.
    """
    columns = query if query.dim() == 3 else query.flatten(2)
    y = attend(columns, keys.transpose(1, 2), values.transpose(1, 2), key_bias, num_heads=num_heads)
    if query.dim() > 3:
        y = y.unflatten(2, query.shape[2:])
    return y if residual is None else y + residual


@leaf_function
def spread_tokens(tokens: Tensor, like: Tensor, *, residual: Tensor | None = None, mean_once: bool = False) -> Tensor:
    """The last stage of KAO_QKV: every position receives the sum of its axes' tokens.

    Args:
        tokens: (N, sum(grid), P), the last axis first.
        like: (N, any, *grid), which gives the result its grid, dtype and memory format.
        residual: (N, P, *grid), added to the result.
        mean_once: whether the tokens' mean is counted once, not once for each axis.

    Returns:
        (N, P, *grid).
    """
    if mean_once:
        matrices = eager_matrices_of(like)
        if matrices is not None and tokens.dtype == like.dtype:
            return _spread_by_product(tokens, matrices[1], like, residual)
        tokens = count_mean_once(tokens, like.shape[2:])
    y = grid.spread(_laid_out(tokens, like), like.shape[2:], like.dtype)
    return y if residual is None else y + residual


def _spread_by_product(tokens: Tensor, matrix: Tensor, like: Tensor, residual: Tensor | None) -> Tensor:
    """(N, P, h, w) of (N, w + h, P) tokens and what gives every position its part of them, (h·w, w + h)."""
    matrix, channels_last = matrix.expand(like.shape[0], -1, -1), like.stride(1) == 1
    factors = (matrix, tokens) if channels_last else (tokens.transpose(1, 2), matrix.transpose(1, 2))
    if residual is None:
        y = torch.bmm(*factors)
    else:
        columns = residual.flatten(2)
        y = torch.baddbmm(columns.transpose(1, 2) if channels_last else columns, *factors)
    return (y.transpose(1, 2) if channels_last else y).unflatten(2, like.shape[2:])


def count_mean_once(tokens: Tensor, axes: Sequence[int], shares: Tensor | None = None) -> Tensor:
    """(N, sum(axes), P) tokens whose outer sum has their mean once, not once for each axis.

    Every axis's tokens average to the mean of the whole, so their sum over d axes counts it d times: each axis gives
    up all but 1/d of its mean.
    """
    if len(axes) == 1:
        return tokens
    sizes, excess = list(reversed(axes)), 1 - 1 / len(axes)
    parts = zip(tokens.split(sizes, dim=1), axis_means(tokens, sizes, shares), strict=True)
    return torch.cat([torch.sub(part, average, alpha=excess) for part, average in parts], dim=1)


def multiply_tokens(tokens: Tensor, like: Tensor, shares: Tensor | None = None) -> Tensor:
    """:func:`spread_tokens` with the product of each position's tokens, Π tₐ · (m / r²)ᵈ⁻¹ over d axes.

    m is their mean and r² the mean of their squares, so that what is the same everywhere comes out as it is. One over
    the mean would do that too, and be boundless where the mean is nothing.
    """
    check_product_grid(like.shape[2:])
    sizes, tokens = list(reversed(like.shape[2:])), at_least_float32(tokens)
    mean, squares = (torch.stack(axis_means(x, sizes, shares)).mean(dim=0) for x in (tokens, tokens.square()))
    # All factors but one are about one then, which keeps the product of half precision within bounds.
    factor = mean / (squares + _SMALLEST_SQUARE)
    tokens = torch.cat([tokens[:, : sizes[0]], tokens[:, sizes[0] :] * factor], dim=1)
    return grid.outer_product(_laid_out(tokens, like), like.shape[2:], like.dtype)


def _laid_out(tokens: Tensor, like: Tensor) -> Tensor:
    """Tokens as columns. What is made of them takes their layout: with channels side by side it comes out
    channels_last."""
    return tokens.contiguous().transpose(1, 2) if like.stride(1) == 1 else tokens.transpose(1, 2).contiguous()


@leaf_function
def moments(
    query: Tensor,
    keys: Tensor,
    *,
    num_heads: int = 1,
    per_key: bool = False,
    query_mean: Tensor | None = None,
    there: tuple[Tensor, Tensor] | None = None,
) -> Moments:
    """Batch statistics of the coefficients of (N, C, *grid) queries and (N, S, C) keys, for each head (and key).

    ``query_mean`` is (N, C), each sample's mean query where it is known already: it saves a pass. ``there`` says which
    positions and keys count.
    """
    heads = (num_heads, -1)
    mean = None if query_mean is None else query_mean.unflatten(1, heads).unsqueeze(3)
    columns, key_columns = query.flatten(2).unflatten(1, heads), keys.transpose(1, 2).unflatten(1, heads)
    with without_autocast(query):
        if there is not None:
            return masked_moments(columns, key_columns, *there)
        return coefficient_moments(columns, key_columns, per_key=per_key, query_mean=mean)
