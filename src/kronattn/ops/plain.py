"""The torch backend: both operators in plain PyTorch, on any device, without the coefficient matrix."""

from __future__ import annotations

from torch import Tensor

from kronattn.ops import grid
from kronattn.ops.attend import at_least_float32, attend

__all__ = [
    "attend_averages",
    "attend_positions",
    "attention",
    "axis_averages",
    "kronecker_attention",
]


def attention(query: Tensor, key: Tensor, value: Tensor, *, num_heads: int, scale: float | Tensor) -> Tensor:
    """Eq. 1 on the flattened grids; shapes as in :func:`kronattn.attention`."""
    return attend_positions(query, key.flatten(2), value.flatten(2), num_heads=num_heads, scale=scale)


def kronecker_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mode: str, num_heads: int, scale: float | Tensor
) -> Tensor:
    """KAO_KV and KAO_QKV; shapes as in :func:`kronattn.kronecker_attention`."""
    keys = axis_averages(key)
    values = keys if value is key else axis_averages(value)
    if mode == "qkv":
        queries = keys if query is key else axis_averages(query)
        return attend_averages(query, keys, values, queries=queries, num_heads=num_heads, scale=scale)
    return attend_averages(query, keys, values, num_heads=num_heads, scale=scale)


def axis_averages(x: Tensor) -> Tensor:
    """The averages of (N, C, *grid) as :func:`kronattn.axis_averages`, in float32 at least."""
    return grid.wide_averages(x)


def attend_averages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    queries: Tensor | None = None,
    num_heads: int = 1,
    scale: float | Tensor = 1.0,
    key_bias: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """The second half of Kronecker attention: what follows once keys and values are averaged.

    Args:
        query: (N, C, *grid).
        keys: (N, C, n) averaged keys, in float32 at least.
        values: (N, p, n) averaged values.
        queries: (N, C, sum(grid)) averaged queries: KAO_QKV. Without them every position asks: KAO_KV.
        num_heads: divides C and p.
        scale: a number, or a tensor of one element or one for each head.
        key_bias: (num_heads, n), added to every coefficient of a key.
        added: (N, p, *grid), added to the result: a skip connection.

    Returns:
        (N, p, *grid) in query's dtype and memory format.
    """
    if queries is None:
        return attend_positions(query, keys, values, num_heads=num_heads, scale=scale, key_bias=key_bias, added=added)
    tokens = attend_positions(queries, keys, values, num_heads=num_heads, scale=scale, key_bias=key_bias)
    if query.stride(1) == 1:
        # The sum takes its layout from the tokens: with channels side by side, it comes out channels_last.
        tokens = tokens.transpose(1, 2).contiguous().transpose(1, 2)
    output = grid.spread(tokens, query.shape[2:], query.dtype)
    return output if added is None else output + added


def attend_positions(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int = 1,
    scale: float | Tensor = 1.0,
    key_bias: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """Attention of every position of a grid to a list of keys, head by head.

    Args:
        query: (N, C, *grid).
        keys: (N, C, n).
        values: (N, p, n).
        num_heads, scale, key_bias, added: as in :func:`attend_averages`.

    Returns:
        (N, p, *grid) in query's dtype and memory format.
    """
    if isinstance(scale, Tensor) and scale.dim() and num_heads > 1:
        scale = scale.repeat_interleave(keys.shape[1] // num_heads).unsqueeze(1)
    if isinstance(scale, Tensor) or scale != 1:
        # The scale goes into the keys: they are the fewer. On the CPU, where attention is computed in float32, they
        # are not rounded with it; the fused kernels take half precision alone.
        keys = (at_least_float32(keys) if keys.device.type == "cpu" else keys) * scale
    columns = query if query.dim() == 3 else query.flatten(2)
    if num_heads == 1:
        output = attend(columns, keys, values, key_bias)
    else:
        output = _attend_heads(columns, keys, values, num_heads, key_bias)
    if query.dim() > 3:
        output = output.unflatten(2, query.shape[2:])
    return output if added is None else output + added


def _attend_heads(query: Tensor, keys: Tensor, values: Tensor, num_heads: int, key_bias: Tensor | None) -> Tensor:
    """(N, C, m), (N, C, n) and (N, p, n), cut into heads, to (N, p, m)."""
    query_heads, key_heads, value_heads = (x.unflatten(1, (num_heads, -1)) for x in (query, keys, values))
    output = attend(query_heads, key_heads, value_heads, key_bias)
    # Head after head, and channels side by side where the query's are.
    by_rows = query.stride(1) == 1
    return output.permute(0, 3, 1, 2).flatten(2).transpose(1, 2) if by_rows else output.flatten(1, 2)
