"""The kernels in eager code: autograd functions that call the launchers straight, past the dispatcher.

A gradient that is itself to be differentiated is computed by the torch backend, whose gradients can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kronattn.ops import plain
from kronattn.ops.grid import axis_averages
from kronattn.ops.grid import outer_sum as plain_outer_sum
from kronattn.ops.triton.attend import attend_backward, attend_forward
from kronattn.ops.triton.averages import averages_forward
from kronattn.ops.triton.layout import empty_grid, is_channels_last
from kronattn.ops.triton.library import rows_and_width
from kronattn.ops.triton.outer import outer_sum_forward
from kronattn.ops.triton.selfattention import self_attention_backward, self_attention_forward, tokens_forward

__all__ = ["Attend", "AttendTokens", "Averages", "OuterSum", "SelfAttention"]


class SelfAttention(torch.autograd.Function):
    """Kronecker attention of (N, C, h, w) to itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: str, num_heads: int, scale: float) -> Tensor:
        y, tokens = self_attention_forward(x, mode, num_heads, scale)
        ctx.save_for_backward(x, tokens)
        ctx.settings = mode, num_heads, scale
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        x, tokens = ctx.saved_tensors
        mode, num_heads, scale = ctx.settings
        if torch.is_grad_enabled():
            (d_x,) = _differentiable(
                lambda x: plain.kronecker_attention(x, x, x, mode=mode, num_heads=num_heads, scale=scale), [x], d_y
            )
        else:
            d_x = self_attention_backward(d_y, x, tokens, mode, num_heads, scale)
        return d_x, None, None, None


class Averages(torch.autograd.Function):
    """Averages of (N, C, *grid), read as rows × last axis: (N, last + rows, C) in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = x.shape[2:], is_channels_last(x), x.dtype
        return averages_forward(x, *rows_and_width(x.shape[2:]), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, d_tokens: Tensor) -> Tensor:
        grid, channels_last, dtype = ctx.like
        height, width = rows_and_width(grid)
        if torch.is_grad_enabled():
            d_tokens = torch.cat([d_tokens[:, :width] / height, d_tokens[:, width:] / width], dim=1)
            return plain_outer_sum(d_tokens.transpose(1, 2), (height, width)).to(dtype).unflatten(2, grid[:-1])
        batch, _, channels = d_tokens.shape
        d_x = empty_grid(batch, channels, grid, channels_last, dtype, d_tokens.device)
        return outer_sum_forward(
            d_tokens.contiguous(), d_x, height, width, column_scale=1 / height, row_scale=1 / width, output=d_x
        )


class OuterSum(torch.autograd.Function):
    """(N, last + rows, C) spread over a grid: (N, C, *grid)."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, grid: Sequence[int], channels_last: bool, dtype: torch.dtype) -> Tensor:
        ctx.grid, ctx.dtype = grid, tokens.dtype
        batch, _, channels = tokens.shape
        y = empty_grid(batch, channels, grid, channels_last, dtype, tokens.device)
        return outer_sum_forward(tokens, y, *rows_and_width(grid), output=y)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        return _sums(d_y, ctx.grid).to(ctx.dtype), None, None, None


class Attend(torch.autograd.Function):
    """Attention of every position of (N, C, *grid) to (N, S, C) keys with (N, S, P) values: (N, P, *grid)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        key_bias: Tensor | None,
        added: Tensor | None,
        num_heads: int,
        scale: float,
        compute: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(query, keys, values, key_bias)
        ctx.settings = num_heads, scale, compute
        ctx.has_added = added is not None
        return attend_forward(
            query, keys, values, num_heads=num_heads, scale=scale, key_bias=key_bias, added=added, compute=compute
        )

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        gradients = _attend_gradients(ctx.saved_tensors, d_y, *ctx.settings)
        return *gradients, d_y if ctx.has_added else None, None, None, None


class AttendTokens(torch.autograd.Function):
    """Attention of (N, w + h, C) averaged queries, and the outer sum of what they receive: (N, P, h, w)."""

    @staticmethod
    def forward(
        ctx: Any,
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
        ctx.save_for_backward(queries, keys, values, key_bias)
        ctx.settings = num_heads, scale, compute
        ctx.grid, ctx.has_added = grid, added is not None
        y = empty_grid(keys.shape[0], values.shape[2], grid, channels_last, compute, keys.device)
        return tokens_forward(
            queries, keys, values, y,
            num_heads=num_heads, scale=scale, key_bias=key_bias, added=added, output=y,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        queries, *rest = ctx.saved_tensors
        received = _sums(d_y, ctx.grid).transpose(1, 2)
        d_queries, *gradients = _attend_gradients((queries.transpose(1, 2), *rest), received, *ctx.settings)
        assert d_queries is not None
        added = d_y if ctx.has_added else None
        return d_queries.transpose(1, 2), *gradients, added, None, None, None, None, None


def _sums(d_y: Tensor, grid: Sequence[int]) -> Tensor:
    """The outer sum's gradient: sums of (N, C, *grid) over each axis, (N, last + rows, C) in float32."""
    height, width = rows_and_width(grid)
    if not torch.is_grad_enabled():
        return averages_forward(d_y, height, width, dtype=torch.float32, mean=False)
    means = axis_averages(d_y.reshape(*d_y.shape[:2], height, width), dtype=torch.float32).transpose(1, 2)
    return torch.cat([means[:, :width] * height, means[:, width:] * width], dim=1)


def _attend_gradients(
    inputs: Sequence[Any], d_y: Tensor, num_heads: int, scale: float, compute: torch.dtype
) -> list[Tensor | None]:
    query, keys, values, key_bias = inputs
    if torch.is_grad_enabled():
        given = [x for x in inputs if x is not None]
        gradients = _differentiable(
            lambda query, keys, values, *bias: plain.attend_positions(
                query,
                keys.transpose(1, 2),
                values.transpose(1, 2),
                num_heads=num_heads,
                scale=scale,
                key_bias=bias[0] if bias else None,
            ),
            given,
            d_y,
        )
        return [*gradients, None] if key_bias is None else gradients
    d_query, d_keys, d_values, d_bias = attend_backward(
        query, keys, values, d_y, num_heads=num_heads, scale=scale, key_bias=key_bias, compute=compute, shared=False
    )
    assert d_values is not None
    return [
        d_query,
        d_keys.to(keys.dtype),
        d_values.to(values.dtype),
        None if key_bias is None or d_bias is None else d_bias.to(key_bias.dtype),
    ]


def _differentiable(call: Callable[..., Tensor], inputs: list[Tensor], d_y: Tensor) -> list[Tensor | None]:
    """Gradients of ``call`` that can be differentiated again; None for an input that needs none."""
    leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(call(*leaves), leaves, d_y, create_graph=True)
    return list(gradients)
