"""Kronecker attention on the kernels: for images in one operator, for other grids and inputs in a few.

A grid of any number of axes is read as two: all but the last, and the last. What is left to do for the axes that were
read as one happens on their averages, which are few.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from kronattn.ops import grid as plain_grid
from kronattn.ops.triton import eager, library
from kronattn.ops.triton.layout import as_tokens, is_channels_last
from kronattn.ops.triton.selfattention import self_attention_forward

__all__ = [
    "attend_averages",
    "attend_positions",
    "axis_averages",
    "kronecker_attention",
    "seen_by_others",
]


def kronecker_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mode: str, num_heads: int, scale: float | Tensor
) -> Tensor:
    """KAO_KV and KAO_QKV; shapes as in :func:`kronattn.kronecker_attention`."""
    if query is key and key is value and query.dim() == 4 and not isinstance(scale, Tensor):
        if seen_by_others():
            return library.self_attention(query, mode, num_heads, float(scale))[0]
        if not (query.requires_grad and torch.is_grad_enabled()):
            return self_attention_forward(query, mode, num_heads, float(scale))[0]
        return eager.SelfAttention.apply(query, mode, num_heads, float(scale))
    keys = axis_averages(key)
    values = keys if value is key else axis_averages(value)
    queries = None
    if mode == "qkv":
        queries = keys if query is key else axis_averages(query)
    return attend_averages(query, keys, values, queries=queries, num_heads=num_heads, scale=scale)


def axis_averages(x: Tensor) -> Tensor:
    """Averages of (N, C, *grid) over all axes but one, the last axis first: (N, C, sum(grid)) in float32."""
    if x.dim() == 3:
        return x.float()
    tokens = (library.averages(x, True) if seen_by_others() else eager.Averages.apply(x)).transpose(1, 2)
    if x.dim() == 4:
        return tokens
    width = x.shape[-1]
    rest = plain_grid.axis_averages(tokens[..., width:].unflatten(2, x.shape[2:-1]))
    return torch.cat([tokens[..., :width], rest], dim=-1)


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
    """The second half of Kronecker attention, as :func:`kronattn.ops.plain.attend_averages`, plus ``added``.

    Args:
        query: (N, C, *grid).
        keys: (N, C, n) averaged keys.
        values: (N, p, n) averaged values.
        queries: (N, C, sum(grid)) averaged queries: KAO_QKV. Without them every position asks: KAO_KV.
        added: (N, p, *grid), a skip connection that costs no pass of its own.

    Returns:
        (N, p, *grid) in query's dtype and memory format.
    """
    if queries is None:
        return attend_positions(query, keys, values, num_heads=num_heads, scale=scale, key_bias=key_bias, added=added)
    grid, heads = query.shape[2:], num_heads
    if len(grid) == 1:
        y = _attend(queries, keys, values, key_bias, None, heads, scale, query.dtype).to(query.dtype)
        y = y if added is None else y + added
        return as_tokens(y).transpose(1, 2) if is_channels_last(query) else y.contiguous()
    if len(grid) == 2:
        keys, values, factor = _tokens(keys, values, heads, scale)
        settings = (key_bias, added, grid, is_channels_last(query), heads, factor, query.dtype)
        if seen_by_others():
            return library.attend_tokens(as_tokens(queries), keys, values, *settings)
        return eager.AttendTokens.apply(as_tokens(queries), keys, values, *settings)
    received = _attend(queries, keys, values, key_bias, None, heads, scale, query.dtype)
    rows = plain_grid.outer_sum(received[..., grid[-1] :], grid[:-1]).flatten(2)
    received = torch.cat([received[..., : grid[-1]], rows], dim=-1)
    y = _outer_sum(as_tokens(received), grid, is_channels_last(query), query.dtype)
    return y if added is None else y + added


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
    """Attention of every position to a list of keys, as :func:`kronattn.ops.plain.attend_positions`."""
    return _attend(query, keys, values, key_bias, added, num_heads, scale, query.dtype)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bias: Tensor | None,
    added: Tensor | None,
    num_heads: int,
    scale: float | Tensor,
    compute: torch.dtype,
) -> Tensor:
    keys, values, factor = _tokens(keys, values, num_heads, scale)
    if seen_by_others():
        return library.attend(query, keys, values, key_bias, added, num_heads, factor, compute)
    return eager.Attend.apply(query, keys, values, key_bias, added, num_heads, factor, compute)


def _tokens(keys: Tensor, values: Tensor, num_heads: int, scale: float | Tensor) -> tuple[Tensor, Tensor, float]:
    """Keys and values as the kernels read them; a scale that is a tensor goes into the keys, which are few."""
    rows = as_tokens(keys)
    value_rows = rows if values is keys else as_tokens(values)
    if not isinstance(scale, Tensor):
        return rows, value_rows, float(scale)
    scaled = rows.unflatten(2, (num_heads, -1)) * scale.reshape(-1, 1)
    return scaled.flatten(2), value_rows, 1.0


def _outer_sum(tokens: Tensor, grid: Sequence[int], channels_last: bool, dtype: torch.dtype) -> Tensor:
    if seen_by_others():
        return library.outer_sum(tokens, grid, channels_last, dtype, 1.0, 1.0)
    return eager.OuterSum.apply(tokens, grid, channels_last, dtype)


def seen_by_others() -> bool:
    """Whether something watches the operators that run: torch.compile, a flop counter, fake tensors."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
