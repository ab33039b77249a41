"""Which kernels run in which order: Kronecker self-attention of an image, forward and backward, and its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from kronattn.ops.triton.attend import attend_backward, attend_forward, attend_itself_backward
from kronattn.ops.triton.averages import averages_forward
from kronattn.ops.triton.launch import recorded
from kronattn.ops.triton.layout import is_channels_last
from kronattn.ops.triton.outer import attend_tokens_forward, outer_sum_forward
from kronattn.ops.triton.rules import attends_tokens_at_once, sample_backward_plan, sample_plan
from kronattn.ops.triton.sample import sample_backward, sample_forward

__all__ = ["self_attention_backward", "self_attention_forward", "tokens_forward"]


@recorded
def self_attention_forward(x: Tensor, mode: str, num_heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Kronecker attention of (N, C, height, width) to itself.

    Returns:
        y like x, and the averages (N, width + height, C) in x's dtype, which the backward starts from.
    """
    batch, channels, height, width = x.shape
    head = channels // num_heads
    plan = sample_plan(batch * num_heads, head, height, width, x.element_size(), mode, is_channels_last(x))
    if plan is not None:
        return sample_forward(x, mode=mode, num_heads=num_heads, scale=scale, plan=plan)
    tokens = averages_forward(x, height, width, dtype=x.dtype)
    if mode == "kv":
        return attend_forward(x, tokens, tokens, num_heads=num_heads, scale=scale), tokens
    return tokens_forward(tokens, tokens, tokens, x, num_heads=num_heads, scale=scale), tokens


@recorded
def tokens_forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    like: Tensor,
    *,
    num_heads: int,
    scale: float,
    key_bias: Tensor | None = None,
    added: Tensor | None = None,
    output: Tensor | None = None,
    variance: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """KAO_QKV once everything is averaged: attention of the tokens, and the outer sum of what they receive.

    Args:
        queries: (N, width + height, C).
        keys: (N, S, C).
        values: (N, S, P); may be ``keys`` itself.
        like: (N, any, height, width), which gives the result its grid, dtype and memory format.
        key_bias: (num_heads, S).
        added: (N, P, height, width).
        output: where to write.
        variance, gain, eps: as in :func:`~kronattn.ops.triton.attend.attend_forward`.

    Returns:
        (N, P, height, width).
    """
    height, width = like.shape[2:]
    heads = keys.shape[2] // num_heads, values.shape[2] // num_heads
    if is_channels_last(like) and attends_tokens_at_once(*heads, keys.shape[1]):
        return attend_tokens_forward(
            queries, keys, values, like, height, width,
            num_heads=num_heads, scale=scale, key_bias=key_bias, added=added, output=output,
            variance=variance, gain=gain, eps=eps,
        )  # fmt: skip
    received = attend_forward(
        queries.transpose(1, 2), keys, values,
        num_heads=num_heads, scale=scale, key_bias=key_bias, compute=like.dtype,
        variance=variance, gain=gain, eps=eps,
    )  # fmt: skip
    return outer_sum_forward(received.transpose(1, 2), like, height, width, added=added, output=output)


@recorded
def self_attention_backward(d_y: Tensor, x: Tensor, tokens: Tensor, mode: str, num_heads: int, scale: float) -> Tensor:
    """The gradient with respect to x, like x."""
    batch, channels, height, width = x.shape
    plan = sample_backward_plan(
        batch * num_heads, channels // num_heads, height, width, x.element_size(), mode, is_channels_last(x)
    )
    if plan is not None:
        return sample_backward(d_y, x, tokens, mode=mode, num_heads=num_heads, scale=scale, plan=plan)
    if mode == "kv":
        d_x, d_tokens, _, _ = attend_backward(x, tokens, tokens, d_y, num_heads=num_heads, scale=scale)
        return outer_sum_forward(
            d_tokens, x, height, width, column_scale=1 / height, row_scale=1 / width, added=d_x, output=d_x
        )
    received = averages_forward(d_y, height, width, dtype=torch.float32, mean=False)
    if attends_tokens_at_once(channels // num_heads, channels // num_heads, height + width):
        d_tokens = attend_itself_backward(tokens, received, num_heads=num_heads, scale=scale)
    else:
        queries = tokens.transpose(1, 2)
        _, d_tokens, _, _ = attend_backward(
            queries, tokens, tokens, received.transpose(1, 2), num_heads=num_heads, scale=scale, itself=True
        )
    return outer_sum_forward(d_tokens, x, height, width, column_scale=1 / height, row_scale=1 / width)
