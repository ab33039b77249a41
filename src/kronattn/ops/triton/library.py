"""The kernels as operators of PyTorch's own library: what torch.compile, fake tensors and flop counters see.

Each operator has a real implementation (the launchers), a fake one (shapes, dtypes, strides), a gradient made of the
same operators, and a count of its floating-point operations. Eager code goes through :mod:`.eager` instead, which
costs less for each call.

Tokens are (N, S, C) here, channels side by side; grids are (N, C, *grid).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kronattn.ops.triton.attend import attend_backward, attend_forward
from kronattn.ops.triton.averages import averages_forward
from kronattn.ops.triton.layout import empty_grid, empty_like_grid, is_channels_last
from kronattn.ops.triton.outer import outer_sum_forward
from kronattn.ops.triton.selfattention import self_attention_backward, self_attention_forward, tokens_forward

__all__ = ["attend", "attend_tokens", "averages", "outer_sum", "self_attention"]


@torch.library.custom_op("kronattn::self_attention", mutates_args=())
def self_attention(x: Tensor, mode: str, num_heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Kronecker attention of (N, C, h, w) to itself, and the averages (N, w + h, C) that its gradient starts from."""
    return self_attention_forward(x, mode, num_heads, scale)


@torch.library.custom_op("kronattn::self_attention_backward", mutates_args=())
def _self_attention_backward(d_y: Tensor, x: Tensor, tokens: Tensor, mode: str, num_heads: int, scale: float) -> Tensor:
    return self_attention_backward(d_y, x, tokens, mode, num_heads, scale)


@torch.library.custom_op("kronattn::averages", mutates_args=())
def averages(x: Tensor, mean: bool) -> Tensor:
    """Averages (or sums) of (N, C, *grid), read as rows × last axis: (N, last + rows, C) in float32."""
    return averages_forward(x, *rows_and_width(x.shape[2:]), dtype=torch.float32, mean=mean)


@torch.library.custom_op("kronattn::outer_sum", mutates_args=())
def outer_sum(
    tokens: Tensor, grid: Sequence[int], channels_last: bool, dtype: torch.dtype, column_scale: float, row_scale: float
) -> Tensor:
    """(N, last + rows, C) spread over the grid: (N, C, *grid)."""
    output = empty_grid(tokens.shape[0], tokens.shape[2], grid, channels_last, dtype, tokens.device)
    height, width = rows_and_width(grid)
    return outer_sum_forward(
        tokens, output, height, width, column_scale=column_scale, row_scale=row_scale, output=output
    )


@torch.library.custom_op("kronattn::attend", mutates_args=())
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bias: Tensor | None,
    added: Tensor | None,
    num_heads: int,
    scale: float,
    compute: torch.dtype,
) -> Tensor:
    """Attention of every position of (N, C, *grid) to (N, S, C) keys with (N, S, P) values: (N, P, *grid)."""
    if keys.data_ptr() == values.data_ptr() and keys.shape == values.shape:
        values = keys
    return attend_forward(
        query, keys, values, num_heads=num_heads, scale=scale, key_bias=key_bias, added=added, compute=compute
    )


@torch.library.custom_op("kronattn::attend_backward", mutates_args=())
def _attend_backward(
    d_y: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bias: Tensor | None,
    num_heads: int,
    scale: float,
    compute: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_query, d_keys, d_values, d_bias = attend_backward(
        query, keys, values, d_y, num_heads=num_heads, scale=scale, key_bias=key_bias, compute=compute, shared=False
    )
    assert d_values is not None
    return d_query, d_keys, d_values, query.new_empty(0, dtype=torch.float32) if d_bias is None else d_bias


@torch.library.custom_op("kronattn::attend_tokens", mutates_args=())
def attend_tokens(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bias: Tensor | None,
    added: Tensor | None,
    grid: Sequence[int],
    channels_last: bool,
    num_heads: int,
    scale: float,
    compute: torch.dtype,
) -> Tensor:
    """Attention of (N, w + h, C) averaged queries, and the outer sum of what they receive: (N, P, h, w)."""
    output = empty_grid(keys.shape[0], values.shape[2], grid, channels_last, compute, keys.device)
    return tokens_forward(
        queries,
        keys,
        values,
        output,
        num_heads=num_heads,
        scale=scale,
        key_bias=key_bias,
        added=added,
        output=output,
    )


def rows_and_width(grid: Sequence[int]) -> tuple[int, int]:
    """A grid of any number of axes as the two that the kernels know: all but the last, and the last."""
    return math.prod(grid[:-1]), grid[-1]


@self_attention.register_fake
def _(x: Tensor, mode: str, num_heads: int, scale: float) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = x.shape
    return empty_like_grid(x, channels, is_channels_last(x)), x.new_empty((batch, width + height, channels))


@_self_attention_backward.register_fake
def _(d_y: Tensor, x: Tensor, tokens: Tensor, mode: str, num_heads: int, scale: float) -> Tensor:
    return empty_like_grid(x, x.shape[1], is_channels_last(x))


@averages.register_fake
def _(x: Tensor, mean: bool) -> Tensor:
    height, width = rows_and_width(x.shape[2:])
    return x.new_empty((x.shape[0], width + height, x.shape[1]), dtype=torch.float32)


@outer_sum.register_fake
def _(
    tokens: Tensor, grid: Sequence[int], channels_last: bool, dtype: torch.dtype, column_scale: float, row_scale: float
) -> Tensor:
    return empty_grid(tokens.shape[0], tokens.shape[2], grid, channels_last, dtype, tokens.device)


@attend.register_fake
def _(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bias: Tensor | None,
    added: Tensor | None,
    num_heads: int,
    scale: float,
    compute: torch.dtype,
) -> Tensor:
    return empty_like_grid(query, values.shape[2], is_channels_last(query))


@_attend_backward.register_fake
def _(
    d_y: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bias: Tensor | None,
    num_heads: int,
    scale: float,
    compute: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        empty_like_grid(query, query.shape[1], is_channels_last(query)),
        keys.new_empty(keys.shape, dtype=torch.float32),
        values.new_empty(values.shape, dtype=torch.float32),
        query.new_empty(0 if key_bias is None else key_bias.shape, dtype=torch.float32),
    )


@attend_tokens.register_fake
def _(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bias: Tensor | None,
    added: Tensor | None,
    grid: Sequence[int],
    channels_last: bool,
    num_heads: int,
    scale: float,
    compute: torch.dtype,
) -> Tensor:
    return empty_grid(keys.shape[0], values.shape[2], grid, channels_last, compute, keys.device)


def _save_self_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.mode, ctx.num_heads, ctx.scale = inputs
    ctx.save_for_backward(x, output[1])
    ctx.set_materialize_grads(False)


def _self_attention_gradient(ctx: Any, d_y: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None, None, None]:
    if d_y is None:
        return None, None, None, None
    x, tokens = ctx.saved_tensors
    return _self_attention_backward(d_y, x, tokens, ctx.mode, ctx.num_heads, ctx.scale), None, None, None


def _save_averages(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.mean = inputs
    ctx.grid, ctx.channels_last, ctx.dtype = x.shape[2:], is_channels_last(x), x.dtype


def _averages_gradient(ctx: Any, d_tokens: Tensor) -> tuple[Tensor, None]:
    height, width = rows_and_width(ctx.grid)
    scales = (1 / height, 1 / width) if ctx.mean else (1.0, 1.0)
    return outer_sum(d_tokens.contiguous(), ctx.grid, ctx.channels_last, ctx.dtype, *scales), None


def _save_outer_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tokens, grid, _, _, *ctx.scales = inputs
    ctx.grid, ctx.dtype = grid, tokens.dtype


def _outer_sum_gradient(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
    sums = averages(d_y, False)
    width = ctx.grid[-1]
    column_scale, row_scale = ctx.scales
    if column_scale != 1 or row_scale != 1:
        sums = torch.cat([sums[:, :width] * column_scale, sums[:, width:] * row_scale], dim=1)
    return sums.to(ctx.dtype), None, None, None, None, None


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, keys, values, key_bias, added, ctx.num_heads, ctx.scale, ctx.compute = inputs
    ctx.has_added = added is not None
    ctx.save_for_backward(query, keys, values, key_bias)


def _attend_gradient(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
    query, keys, values, key_bias = ctx.saved_tensors
    d_query, d_keys, d_values, d_bias = _attend_backward(
        d_y, query, keys, values, key_bias, ctx.num_heads, ctx.scale, ctx.compute
    )
    return (
        d_query,
        d_keys.to(keys.dtype),
        d_values.to(values.dtype),
        None if key_bias is None else d_bias.to(key_bias.dtype),
        d_y if ctx.has_added else None,
        None,
        None,
        None,
    )


def _save_attend_tokens(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    queries, keys, values, key_bias, added, _, _, ctx.num_heads, ctx.scale, ctx.compute = inputs
    ctx.has_added = added is not None
    ctx.save_for_backward(queries, keys, values, key_bias)


def _attend_tokens_gradient(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
    queries, keys, values, key_bias = ctx.saved_tensors
    d_queries, d_keys, d_values, d_bias = _attend_backward(
        averages(d_y, False).transpose(1, 2),
        queries.transpose(1, 2),
        keys,
        values,
        key_bias,
        ctx.num_heads,
        ctx.scale,
        ctx.compute,
    )
    return (
        d_queries.transpose(1, 2),
        d_keys.to(keys.dtype),
        d_values.to(values.dtype),
        None if key_bias is None else d_bias.to(key_bias.dtype),
        d_y if ctx.has_added else None,
        *[None] * 5,
    )


self_attention.register_autograd(_self_attention_gradient, setup_context=_save_self_attention)
averages.register_autograd(_averages_gradient, setup_context=_save_averages)
outer_sum.register_autograd(_outer_sum_gradient, setup_context=_save_outer_sum)
attend.register_autograd(_attend_gradient, setup_context=_save_attend)
attend_tokens.register_autograd(_attend_tokens_gradient, setup_context=_save_attend_tokens)


# A multiply-add counts as two operations, as in PyTorch's own formulas; averages and outer sums only add.
@register_flop_formula(torch.ops.kronattn.self_attention)
def _self_attention_flops(x: Sequence[int], mode: str, *args: Any, **kwargs: Any) -> int:
    batch, channels, height, width = x
    queries = height * width if mode == "kv" else height + width
    return 4 * batch * queries * (height + width) * channels


@register_flop_formula(torch.ops.kronattn.self_attention_backward)
def _self_attention_backward_flops(
    d_y: Sequence[int], x: Sequence[int], tokens: Sequence[int], mode: str, *args: Any, **kwargs: Any
) -> int:
    return 5 * _self_attention_flops(x, mode) // 2


@register_flop_formula(torch.ops.kronattn.attend)
def _attend_flops(query: Sequence[int], keys: Sequence[int], values: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return 2 * query[0] * math.prod(query[2:]) * keys[1] * (keys[2] + values[2])


@register_flop_formula(torch.ops.kronattn.attend_backward)
def _attend_backward_flops(
    d_y: Sequence[int], query: Sequence[int], keys: Sequence[int], values: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return 2 * query[0] * math.prod(query[2:]) * keys[1] * (3 * keys[2] + 2 * values[2])


@register_flop_formula(torch.ops.kronattn.attend_tokens)
def _attend_tokens_flops(
    queries: Sequence[int], keys: Sequence[int], values: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return 2 * queries[0] * queries[1] * keys[1] * (keys[2] + values[2])
