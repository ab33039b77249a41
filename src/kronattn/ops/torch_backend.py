"""The stages in plain PyTorch, on any device, without the coefficient matrix.

Grids are (N, C, *grid), tokens (N, S, C).
"""

from __future__ import annotations

from torch import Tensor

from kronattn.ops import grid
from kronattn.ops.attend import at_least_float32, attend
from kronattn.ops.autocast import without_autocast
from kronattn.ops.coefficients import Moments, coefficient_moments, masked_moments
from kronattn.ops.fx import leaf_function

__all__ = ["attention", "moments", "multiply_tokens", "pool", "spread", "spread_tokens"]


def attention(query: Tensor, key: Tensor, value: Tensor, *, num_heads: int, scale: float | Tensor) -> Tensor:
    """Eq. 1 on the flattened grids; shapes as in :func:`kronattn.attention`."""
    keys = key.flatten(2).transpose(1, 2)
    values = keys if value is key else value.flatten(2).transpose(1, 2)
    return spread(query, scaled(keys, scale, num_heads), values, num_heads=num_heads)


@leaf_function
def scaled(keys: Tensor, scale: float | Tensor, num_heads: int) -> Tensor:
    """(N, S, C) keys times the coefficients' scale: a number, or a (1,), (num_heads,) or (num_heads, S) tensor."""
    if not isinstance(scale, Tensor):
        return keys if scale == 1 else _unrounded(keys) * scale
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
    return grid.wide_averages(x).transpose(1, 2), x


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
    y = _attend(columns, keys.transpose(1, 2), values.transpose(1, 2), num_heads, key_bias)
    if query.dim() > 3:
        y = y.unflatten(2, query.shape[2:])
    return y if residual is None else y + residual


@leaf_function
def spread_tokens(tokens: Tensor, like: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """The last stage of KAO_QKV: every position receives the sum of its axes' tokens.

    Args:
        tokens: (N, sum(grid), P), the last axis first.
        like: (N, any, *grid), which gives the result its grid, dtype and memory format.
        residual: (N, P, *grid), added to the result.

    Returns:
        (N, P, *grid).
    """
    y = grid.spread(_laid_out(tokens, like), like.shape[2:], like.dtype)
    return y if residual is None else y + residual


def multiply_tokens(tokens: Tensor, like: Tensor) -> Tensor:
    """The same with the product of each position's tokens."""
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


def _attend(query: Tensor, keys: Tensor, values: Tensor, num_heads: int, key_bias: Tensor | None) -> Tensor:
    """(N, C, m), (N, C, n) and (N, p, n) columns, cut into heads, to (N, p, m)."""
    if num_heads == 1:
        return attend(query, keys, values, key_bias)
    heads = [x.unflatten(1, (num_heads, -1)) for x in (query, keys, values)]
    output = attend(heads[0], heads[1], heads[2], key_bias)
    # Head after head, and channels side by side where the query's are.
    by_rows = query.stride(1) == 1
    return output.permute(0, 3, 1, 2).flatten(2).transpose(1, 2) if by_rows else output.flatten(1, 2)
