"""The outer sum: every position receives its column's token plus its row's, in one pass of writing.

The last stage of KAO_QKV, with a residual added on the way; and the gradient of the averages, added to what a position
has received already. And what KAO_QKV's tokens give up so that the sum counts their mean once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.blocks import grid_offsets, launch, token_offsets
from kronattn.ops.triton.layout import alignment, dense_strides, empty_grid, flat, rows_and_width
from kronattn.ops.triton.tuning import ceil_div, outer_blocks, power_of_two

__all__ = ["mean_once_forward", "outer_sum_forward"]


# Tokens up to which every program of the outer sum works out their means for itself: one launch less.
_FEW_TOKENS = 256


@triton.jit
def excess_mean(tokens, b_c, first, count, excess, C: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr):
    """``excess`` times the mean of ``count`` of a sample's tokens, for a block of channels: (1, BC)."""
    b_sum = tl.zeros([BC], tl.float32)
    for start in range(0, count, BS):
        b_s = start + tl.arange(0, BS)
        b_mask = (b_s < count)[:, None] & (b_c < C)[None, :]
        b_tokens = tl.load(tokens + token_offsets(first + b_s, b_c, C), mask=b_mask, other=0.0)
        b_sum += tl.sum(b_tokens.to(tl.float32), axis=0)
    return (b_sum * (excess / count))[None, :]


@triton.jit
def outer_sum_forward_kernel(
    tokens, residual, y, residual_n, residual_c, residual_p, y_n, y_c, y_p, height, width, row_blocks, column_scale,
    row_scale,
    C: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr, Y_LAST: tl.constexpr,
    RESIDUAL_LAST: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ALIGN: tl.constexpr, MEAN_ONCE: tl.constexpr,
):  # fmt: skip
    """y[r, w] = columns[w] · column_scale + rows[r] · row_scale (+ residual[r, w]) for BR rows and BW columns.

    With MEAN_ONCE, both axes' tokens less half of their mean.
    """
    n = (tl.program_id(0) // row_blocks).to(tl.int64)
    b_r = (tl.program_id(0) % row_blocks) * BR + tl.arange(0, BR)
    b_w = tl.program_id(1) * BW + tl.arange(0, BW)
    b_c = tl.program_id(2) * BC + tl.arange(0, BC)
    tokens += n * (height + width) * C
    b_in = (b_c < C)[None, :]
    b_columns = tl.load(tokens + token_offsets(b_w, b_c, C), mask=(b_w < width)[:, None] & b_in, other=0.0)
    b_rows = tl.load(tokens + token_offsets(width + b_r, b_c, C), mask=(b_r < height)[:, None] & b_in, other=0.0)
    b_columns = b_columns.to(tl.float32) * column_scale
    b_rows = b_rows.to(tl.float32) * row_scale
    if MEAN_ONCE:
        b_columns -= excess_mean(tokens, b_c, 0, width, 0.5, C, 32, BC)
        b_rows -= excess_mean(tokens, b_c, width, height, 0.5, C, 32, BC)
    b_tile = tl.reshape(b_rows[:, None, :] + b_columns[None, :, :], [BR * BW, BC])
    b_p = tl.reshape(b_r[:, None] * width + b_w[None, :], [BR * BW])
    b_inside = tl.reshape((b_r < height)[:, None] & (b_w < width)[None, :], [BR * BW])
    b_mask = b_inside[:, None] & b_in
    if HAS_RESIDUAL:
        residual += n * residual_n * ALIGN
        p_residual = residual + grid_offsets(b_p, b_c, residual_p, residual_c, RESIDUAL_LAST, ALIGN)
        b_tile += tl.load(p_residual, mask=b_mask, other=0.0).to(tl.float32)
    p_y = y + n * y_n * ALIGN + grid_offsets(b_p, b_c, y_p, y_c, Y_LAST, ALIGN)
    tl.store(p_y, b_tile.to(y.dtype.element_ty), mask=b_mask)


def outer_sum_forward(
    tokens: Tensor,
    residual: Tensor | None,
    grid: Sequence[int],
    channels_last: bool,
    dtype: torch.dtype,
    of_averages: bool,
    mean_once: bool = False,
) -> Tensor:
    """Every position's column token plus its row token, plus the residual.

    Args:
        tokens: (N, last + rows, C) of a grid read as rows × its last axis, contiguous.
        residual: (N, C, *grid).
        channels_last, dtype: of the result.
        of_averages: as the gradient of averages: tokens are divided by the number of positions that each is of.
        mean_once: of what :func:`mean_once_forward` makes of the tokens, which are no averages then.

    Returns:
        (N, C, *grid).
    """
    height, width = rows_and_width(grid)
    if mean_once and height + width > _FEW_TOKENS:
        tokens, mean_once = mean_once_forward(tokens, grid), False
    column_scale, row_scale = (1 / height, 1 / width) if of_averages else (1.0, 1.0)
    batch, _, channels = tokens.shape
    output = empty_grid(batch, channels, grid, channels_last, dtype, tokens.device)
    strides = dense_strides(output, channels_last)
    has_residual = residual is not None
    residual, residual_strides = (output, strides) if residual is None else flat(residual)
    blocks = rows, columns, wide = outer_blocks(channels, height, width, strides.channels_last)
    align = alignment(strides, residual_strides)
    row_blocks = ceil_div(height, rows)
    launch(
        outer_sum_forward_kernel, (batch * row_blocks, ceil_div(width, columns), ceil_div(channels, wide)),
        (tokens, residual, output),
        (*residual_strides.over(align), *strides.over(align), height, width, row_blocks, column_scale, row_scale),
        channels, *blocks, strides.channels_last, residual_strides.channels_last, has_residual, align, mean_once,
        num_warps=8,
    )  # fmt: skip
    return output


@triton.jit
def mean_once_kernel(
    tokens, output, height, width, excess, C: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """A block of channels of one sample's columns, or of its rows, less their mean times ``excess``."""
    n = tl.program_id(0).to(tl.int64)
    b_c = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.where(tl.program_id(2) == 0, 0, width)
    count = tl.where(tl.program_id(2) == 0, width, height)
    at = (n * (height + width) + first) * C
    b_less = excess_mean(tokens + at, b_c, 0, count, excess, C, BS, BC)
    for start in range(0, count, BS):
        b_s = start + tl.arange(0, BS)
        b_mask = (b_s < count)[:, None] & (b_c < C)[None, :]
        b_tokens = tl.load(tokens + at + token_offsets(b_s, b_c, C), mask=b_mask, other=0.0).to(tl.float32)
        b_tokens -= b_less
        tl.store(output + at + token_offsets(b_s, b_c, C), b_tokens.to(output.dtype.element_ty), mask=b_mask)


def mean_once_forward(tokens: Tensor, grid: Sequence[int]) -> Tensor:
    """(N, width + height, C) tokens of two axes, contiguous, each axis's less half of its mean."""
    batch, _, channels = tokens.shape
    height, width = grid
    output = torch.empty_like(tokens)
    block = min(64, power_of_two(channels))
    launch(
        mean_once_kernel, (batch, ceil_div(channels, block), 2),
        (tokens, output), (height, width, 0.5), channels, 2048 // block, block,
    )  # fmt: skip
    return output
