"""The outer sum: every position receives its column's token plus its row's, in one pass of writing.

Also the gradient of the averages, where it is added to what a position has already received; and KAO_QKV's second
half, where each program first computes the attention of its own few rows and columns, so that what the tokens
received is never written down.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.attend import attend_tile, normed_scale
from kronattn.ops.triton.blocks import grid_offsets, token_offsets
from kronattn.ops.triton.launch import launch, recorded
from kronattn.ops.triton.layout import alignment, empty_like_grid, flat, flat_strides, is_channels_last
from kronattn.ops.triton.rules import dot_precision, outer_plan, token_attention_plan

__all__ = ["attend_tokens_forward", "outer_sum_forward"]


@triton.jit
def store_outer_sum(
    b_columns,
    b_rows,
    y,
    added,
    b_r,
    b_w,
    b_c,
    height,
    width,
    channels,
    y_p,
    y_c,
    added_p,
    added_c,
    Y_LAST: tl.constexpr,
    ADDED_LAST: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    ALIGN: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
    BC: tl.constexpr,
):
    """y[r, w] = columns[w] + rows[r] (+ added[r, w]) for a tile of BR rows and BW columns."""
    b_tile = tl.reshape(b_rows[:, None, :] + b_columns[None, :, :], [BR * BW, BC])
    b_p = tl.reshape(b_r[:, None] * width + b_w[None, :], [BR * BW])
    b_inside = tl.reshape((b_r < height)[:, None] & (b_w < width)[None, :], [BR * BW])
    b_mask = b_inside[:, None] & (b_c < channels)[None, :]
    if HAS_ADDED:
        b_added = tl.load(added + grid_offsets(b_p, b_c, added_p, added_c, ADDED_LAST, ALIGN), mask=b_mask, other=0.0)
        b_tile += b_added.to(tl.float32)
    p_y = y + grid_offsets(b_p, b_c, y_p, y_c, Y_LAST, ALIGN)
    tl.store(p_y, b_tile.to(y.dtype.element_ty), mask=b_mask)


@triton.jit
def outer_sum_forward_kernel(
    tokens,
    added,
    y,
    added_n,
    added_c,
    added_p,
    y_n,
    y_c,
    y_p,
    height,
    width,
    row_blocks,
    column_scale,
    row_scale,
    C: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
    BC: tl.constexpr,
    Y_LAST: tl.constexpr,
    ADDED_LAST: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    ALIGN: tl.constexpr,
):
    n = (tl.program_id(0) // row_blocks).to(tl.int64)
    b_r = (tl.program_id(0) % row_blocks) * BR + tl.arange(0, BR)
    b_w = tl.program_id(1) * BW + tl.arange(0, BW)
    b_c = tl.program_id(2) * BC + tl.arange(0, BC)
    p_tokens = tokens + n * (height + width) * C
    b_in = (b_c < C)[None, :]
    b_columns = tl.load(p_tokens + token_offsets(b_w, b_c, C), mask=(b_w < width)[:, None] & b_in, other=0.0)
    b_rows = tl.load(p_tokens + token_offsets(width + b_r, b_c, C), mask=(b_r < height)[:, None] & b_in, other=0.0)
    store_outer_sum(
        b_columns.to(tl.float32) * column_scale,
        b_rows.to(tl.float32) * row_scale,
        y + n * y_n * ALIGN,
        added + n * added_n * ALIGN,
        b_r,
        b_w,
        b_c,
        height,
        width,
        C,
        y_p,
        y_c,
        added_p,
        added_c,
        Y_LAST,
        ADDED_LAST,
        HAS_ADDED,
        ALIGN,
        BR,
        BW,
        BC,
    )


@triton.jit
def attend_tokens_forward_kernel(
    queries,
    keys,
    values,
    bias,
    variance,
    gain,
    added,
    y,
    added_n,
    added_c,
    added_p,
    y_n,
    y_c,
    y_p,
    height,
    width,
    key_count,
    row_blocks,
    scale,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    Y_LAST: tl.constexpr,
    ADDED_LAST: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n = (tl.program_id(0) // row_blocks).to(tl.int64)
    head = tl.program_id(2)
    b_r = (tl.program_id(0) % row_blocks) * BR + tl.arange(0, BR)
    b_w = tl.program_id(1) * BW + tl.arange(0, BW)
    b_d = tl.arange(0, BD)
    b_e = tl.arange(0, BDV)
    p_queries = queries + n * (height + width) * (H * D) + head * D
    p_columns = p_queries + token_offsets(b_w, b_d, H * D)
    b_columns = tl.load(p_columns, mask=(b_w < width)[:, None] & (b_d < D)[None, :], other=0.0)
    p_rows = p_queries + token_offsets(width + b_r, b_d, H * D)
    b_rows = tl.load(p_rows, mask=(b_r < height)[:, None] & (b_d < D)[None, :], other=0.0)
    p_keys = keys + n * key_count * (H * D) + head * D
    p_values = values + n * key_count * (H * DV) + head * DV
    p_bias = bias + head * key_count
    scale = normed_scale(scale, variance, gain, eps, head, HAS_NORM)
    DT: tl.constexpr = y.dtype.element_ty
    b_columns = attend_tile(
        b_columns.to(DT), p_keys, p_values, p_bias, key_count, scale,
        H, D, DV, BW, BS, BD, BDV, True, False, SHARED, HAS_BIAS, PRECISION,
    )  # fmt: skip
    b_rows = attend_tile(
        b_rows.to(DT), p_keys, p_values, p_bias, key_count, scale,
        H, D, DV, BR, BS, BD, BDV, True, False, SHARED, HAS_BIAS, PRECISION,
    )  # fmt: skip
    store_outer_sum(
        b_columns,
        b_rows,
        y + n * y_n * ALIGN + (head * DV if Y_LAST else head * DV * y_c * ALIGN),
        added + n * added_n * ALIGN + (head * DV if ADDED_LAST else head * DV * added_c * ALIGN),
        b_r,
        b_w,
        b_e,
        height,
        width,
        DV,
        y_p,
        y_c,
        added_p,
        added_c,
        Y_LAST,
        ADDED_LAST,
        HAS_ADDED,
        ALIGN,
        BR,
        BW,
        BDV,
    )


@recorded
def outer_sum_forward(
    tokens: Tensor,
    like: Tensor,
    height: int,
    width: int,
    *,
    column_scale: float = 1.0,
    row_scale: float = 1.0,
    added: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """columns[w] · column_scale + rows[r] · row_scale (+ added) at every position of a height × width grid.

    Args:
        tokens: (N, width + height, C).
        like: (N, any, *grid), which gives the result its grid, dtype and memory format.
        added: (N, C, *grid).
        output: where to write; it may be ``added`` itself.

    Returns:
        (N, C, *grid).
    """
    batch, _, channels = tokens.shape
    if output is None:
        output = empty_like_grid(like, channels, is_channels_last(like))
    y_strides = flat_strides(output)
    assert y_strides is not None
    has_added = added is not None
    added, added_strides = (output, y_strides) if added is None else flat(added)
    plan = outer_plan(batch, channels, height, width, y_strides.channels_last)
    align = alignment(y_strides, added_strides)
    row_blocks = triton.cdiv(height, plan.block_rows)
    launch(
        outer_sum_forward_kernel,
        (batch * row_blocks, triton.cdiv(width, plan.block_width), triton.cdiv(channels, plan.block_channels)),
        tokens,
        added,
        output,
        *added_strides.over(align),
        *y_strides.over(align),
        height,
        width,
        row_blocks,
        column_scale,
        row_scale,
        channels,
        plan.block_rows,
        plan.block_width,
        plan.block_channels,
        y_strides.channels_last,
        added_strides.channels_last,
        has_added,
        align,
        num_warps=plan.warps,
    )
    return output


@recorded
def attend_tokens_forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    like: Tensor,
    height: int,
    width: int,
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
        keys: (N, S, C), few enough for one block.
        values: (N, S, P); may be ``keys`` itself.
        like: (N, any, *grid), which gives the result its grid, dtype and memory format.
        key_bias: (num_heads, S) in float32.
        added: (N, P, *grid).
        variance, gain, eps: as in :func:`~kronattn.ops.triton.attend.attend_forward`.

    Returns:
        (N, P, *grid).
    """
    batch, key_count, channels = keys.shape
    value_channels = values.shape[2]
    head, value_head = channels // num_heads, value_channels // num_heads
    y = empty_like_grid(like, value_channels, is_channels_last(like)) if output is None else output
    y_strides = flat_strides(y)
    assert y_strides is not None
    has_added = added is not None
    added, added_strides = (y, y_strides) if added is None else flat(added)
    align = alignment(y_strides, added_strides)
    plan = token_attention_plan(batch * num_heads, head, value_head, height, width, key_count)
    row_blocks = triton.cdiv(height, plan.block_rows)
    launch(
        attend_tokens_forward_kernel,
        (batch * row_blocks, triton.cdiv(width, plan.block_width), num_heads),
        queries,
        keys,
        values,
        keys if key_bias is None else key_bias,
        keys if variance is None else variance,
        keys if gain is None else gain,
        added,
        y,
        *added_strides.over(align),
        *y_strides.over(align),
        height,
        width,
        key_count,
        row_blocks,
        scale,
        eps,
        num_heads,
        head,
        value_head,
        plan.block_rows,
        plan.block_width,
        plan.block_keys,
        plan.block_channels,
        plan.block_value_channels,
        values is keys,
        key_bias is not None,
        variance is not None,
        y_strides.channels_last,
        added_strides.channels_last,
        has_added,
        align,
        dot_precision(like.dtype),
        num_warps=plan.warps,
    )
    return y
