"""Self-attention of a whole sample (and head) in one program: one kernel forward, one backward, for small maps.

The averages, the attention and the output follow each other in one program, so x comes from memory once: what is
read a second time is still in the cache. Columns and rows are each padded to B tokens and joined to 2·B keys. Where
a tile does not cover the sample, rows go through memory between the steps.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.attend import coefficients, load_tokens, token_gradient
from kronattn.ops.triton.averages import load_tile, sum_strip, tile_columns, tile_sums
from kronattn.ops.triton.blocks import grid_offsets, matmul, token_offsets
from kronattn.ops.triton.launch import empty, launch
from kronattn.ops.triton.layout import Strides, alignment, empty_like_grid, flat, flat_strides
from kronattn.ops.triton.outer import store_outer_sum
from kronattn.ops.triton.rules import SamplePlan, dot_precision

__all__ = ["sample_backward", "sample_forward"]


@triton.jit
def joined(b_columns, b_rows, B: tl.constexpr, BD: tl.constexpr):
    """Columns, then rows, (2 · B, BD): each list padded to B."""
    return tl.reshape(tl.permute(tl.join(b_columns, b_rows), (2, 0, 1)), [2 * B, BD])


@triton.jit
def parted(b_tokens, B: tl.constexpr, BD: tl.constexpr):
    """What :func:`joined` has put together: (B, BD) columns and rows."""
    return tl.split(tl.permute(tl.reshape(b_tokens, [2, B, BD]), (1, 2, 0)))


@triton.jit
def padded_tokens(height, width, C: tl.constexpr, D: tl.constexpr, B: tl.constexpr, BD: tl.constexpr):
    """Where joined columns and rows lie among a sample's tokens, which of them exist, and a bias that says so."""
    b_s = tl.arange(0, 2 * B)
    b_exists = (b_s % B) < tl.where(b_s < B, width, height)
    b_d = tl.arange(0, BD)
    b_offsets = token_offsets(tl.where(b_s < B, b_s, b_s - B + width), b_d, C)
    return b_offsets, b_exists[:, None] & (b_d < D)[None, :], tl.where(b_exists, 0.0, float("-inf"))


@triton.jit
def write_outer_sum(
    b_columns,
    b_tokens,
    rows,
    y,
    height,
    width,
    row_scale,
    y_p,
    y_c,
    C: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    Y_LAST: tl.constexpr,
    ADD: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The outer sum of one sample's columns and rows into y, or added to what y holds.

    Rows come from registers where one tile covers the sample (BR = B), from memory otherwise.
    """
    b_d = tl.arange(0, BD)
    b_w = tl.arange(0, B)
    if BR == B:
        store_outer_sum(
            b_columns, b_tokens, y, y, tl.arange(0, B), b_w, b_d, height, width, D, y_p, y_c, y_p, y_c,
            Y_LAST, Y_LAST, ADD, ALIGN, B, B, BD,
        )  # fmt: skip
    else:
        for r in range(0, height, BR):
            b_r = r + tl.arange(0, BR)
            b_rows = load_tokens(rows, b_r, b_d, height, C, D, tl.float32) * row_scale
            store_outer_sum(
                b_columns, b_rows, y, y, b_r, b_w, b_d, height, width, D, y_p, y_c, y_p, y_c,
                Y_LAST, Y_LAST, ADD, ALIGN, BR, B, BD,
            )  # fmt: skip


@triton.jit
def sample_forward_kernel(
    x,
    y,
    tokens,
    received,
    x_n,
    x_c,
    x_p,
    y_n,
    y_c,
    y_p,
    height,
    width,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    LANES: tl.constexpr,
    QKV: tl.constexpr,
    X_LAST: tl.constexpr,
    Y_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    DT: tl.constexpr = x.dtype.element_ty
    C: tl.constexpr = H * D
    x += n * x_n * ALIGN + (head * D if X_LAST else head * D * x_c * ALIGN)
    y += n * y_n * ALIGN + (head * D if Y_LAST else head * D * y_c * ALIGN)
    tokens += n * (height + width) * C + head * D
    b_d = tl.arange(0, BD)
    b_w = tl.arange(0, B)
    b_offsets, b_exists, b_bias = padded_tokens(height, width, C, D, B, BD)

    if BR == B:
        b_x = load_tile(x, 0, height, 0, b_d, width, x_p, x_c, D, B, B, LANES, X_LAST, ALIGN).to(tl.float32)
        b_columns = tile_columns(b_x, B, B, BD, LANES) * (1.0 / height)
        b_rows = tile_sums(b_x, B, B, BD, LANES) * (1.0 / width)
        b_k = joined(b_columns, b_rows, B, BD).to(DT)
        tl.store(tokens + b_offsets, b_k, mask=b_exists)
    else:
        b_columns = sum_strip(
            x, tokens + width * C, 0, height, 0, b_d, width, x_p, x_c, 1.0 / width, D,
            C, BR, B, BD, LANES, X_LAST, ALIGN, STAGES,
        )  # fmt: skip
        b_store = (b_w < width)[:, None] & (b_d < D)[None, :]
        tl.store(tokens + token_offsets(b_w, b_d, C), (b_columns * (1.0 / height)).to(DT), mask=b_store)
        tl.debug_barrier()
        b_k = tl.load(tokens + b_offsets, mask=b_exists, other=0.0)

    if QKV:
        b_a, b_factor = coefficients(b_k, b_k, b_bias, scale, PRECISION)
        b_t = matmul(b_a.to(DT), b_k, PRECISION) * b_factor[:, None]
        b_columns, b_rows = parted(b_t, B, BD)
        if BO != B:
            received += n * (height + width) * C + head * D + width * C
            b_store = (b_w < height)[:, None] & (b_d < D)[None, :]
            tl.store(received + token_offsets(b_w, b_d, C), b_rows.to(DT), mask=b_store)
            tl.debug_barrier()
        write_outer_sum(
            b_columns, b_rows, received, y, height, width, 1.0, y_p, y_c, C, D, B, BO, BD, Y_LAST, False, ALIGN
        )  # fmt: skip
    else:
        positions = height * width
        for start in range(0, positions, BM):
            b_m = start + tl.arange(0, BM)
            b_mask = (b_m < positions)[:, None] & (b_d < D)[None, :]
            b_q = tl.load(x + grid_offsets(b_m, b_d, x_p, x_c, X_LAST, ALIGN), mask=b_mask, other=0.0)
            b_a, b_factor = coefficients(b_q, b_k, b_bias, scale, PRECISION)
            b_y = matmul(b_a.to(DT), b_k, PRECISION) * b_factor[:, None]
            tl.store(y + grid_offsets(b_m, b_d, y_p, y_c, Y_LAST, ALIGN), b_y.to(DT), mask=b_mask)


@triton.jit
def sample_backward_kernel(
    x,
    tokens,
    d_y,
    d_x,
    d_tokens,
    x_n,
    x_c,
    x_p,
    dy_n,
    dy_c,
    dy_p,
    dx_n,
    dx_c,
    dx_p,
    height,
    width,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    BR: tl.constexpr,
    BO: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    LANES: tl.constexpr,
    QKV: tl.constexpr,
    X_LAST: tl.constexpr,
    DY_LAST: tl.constexpr,
    DX_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    DT: tl.constexpr = d_x.dtype.element_ty
    C: tl.constexpr = H * D
    x += n * x_n * ALIGN + (head * D if X_LAST else head * D * x_c * ALIGN)
    d_y += n * dy_n * ALIGN + (head * D if DY_LAST else head * D * dy_c * ALIGN)
    d_x += n * dx_n * ALIGN + (head * D if DX_LAST else head * D * dx_c * ALIGN)
    tokens += n * (height + width) * C + head * D
    d_tokens += n * (height + width) * C + head * D
    b_d = tl.arange(0, BD)
    b_w = tl.arange(0, B)
    b_offsets, b_exists, b_bias = padded_tokens(height, width, C, D, B, BD)
    b_k = tl.load(tokens + b_offsets, mask=b_exists, other=0.0)

    if QKV:
        if BR == B:
            b_dy = load_tile(d_y, 0, height, 0, b_d, width, dy_p, dy_c, D, B, B, LANES, DY_LAST, ALIGN).to(tl.float32)
            b_columns = tile_columns(b_dy, B, B, BD, LANES)
            b_rows = tile_sums(b_dy, B, B, BD, LANES)
            b_dt = joined(b_columns, b_rows, B, BD).to(DT)
        else:
            b_columns = sum_strip(
                d_y, d_tokens + width * C, 0, height, 0, b_d, width, dy_p, dy_c, 1.0, D,
                C, BR, B, BD, LANES, DY_LAST, ALIGN, STAGES,
            )  # fmt: skip
            b_store = (b_w < width)[:, None] & (b_d < D)[None, :]
            tl.store(d_tokens + token_offsets(b_w, b_d, C), b_columns, mask=b_store)
            tl.debug_barrier()
            b_dt = tl.load(d_tokens + b_offsets, mask=b_exists, other=0.0).to(DT)
        b_dk = token_gradient(b_k, b_dt, b_bias, scale, PRECISION)
    else:
        positions = height * width
        b_dk = tl.zeros([2 * B, BD], tl.float32)
        for start in range(0, positions, BM):
            b_m = start + tl.arange(0, BM)
            b_mask = (b_m < positions)[:, None] & (b_d < D)[None, :]
            b_q = tl.load(x + grid_offsets(b_m, b_d, x_p, x_c, X_LAST, ALIGN), mask=b_mask, other=0.0).to(DT)
            b_dy = tl.load(d_y + grid_offsets(b_m, b_d, dy_p, dy_c, DY_LAST, ALIGN), mask=b_mask, other=0.0).to(DT)
            b_a, b_factor = coefficients(b_q, b_k, b_bias, scale, PRECISION)
            b_a *= b_factor[:, None]
            b_da = matmul(b_dy, tl.trans(b_k), PRECISION)
            b_ds = (b_a * (b_da - tl.sum(b_a * b_da, axis=1)[:, None]) * scale).to(DT)
            b_dq = matmul(b_ds, b_k, PRECISION)
            tl.store(d_x + grid_offsets(b_m, b_d, dx_p, dx_c, DX_LAST, ALIGN), b_dq.to(DT), mask=b_mask)
            b_dk += matmul(tl.trans(b_ds), b_q, PRECISION)
            b_dk += matmul(tl.trans(b_a.to(DT)), b_dy, PRECISION)
    b_columns, b_rows = parted(b_dk, B, BD)
    if BO != B:
        # Every thread has read what lies there before any of it is overwritten.
        tl.debug_barrier()
        d_tokens += width * C
        b_store = (b_w < height)[:, None] & (b_d < D)[None, :]
        tl.store(d_tokens + token_offsets(b_w, b_d, C), b_rows, mask=b_store)
    # Orders the rows above, and in mode kv the queries' gradients, before what reads them.
    tl.debug_barrier()
    write_outer_sum(
        b_columns * (1.0 / height), b_rows * (1.0 / width), d_tokens, d_x, height, width, 1.0 / width, dx_p, dx_c,
        C, D, B, BO, BD, DX_LAST, not QKV, ALIGN,
    )  # fmt: skip


def sample_forward(x: Tensor, *, mode: str, num_heads: int, scale: float, plan: SamplePlan) -> tuple[Tensor, Tensor]:
    """Kronecker self-attention of (N, C, height, width), and the averages (N, width + height, C) in x's dtype."""
    x, x_strides = flat(x)
    batch, channels, height, width = x.shape
    y = empty_like_grid(x, channels, x_strides.channels_last)
    y_strides = _strides(y)
    align = alignment(x_strides, y_strides)
    tokens = empty((batch, width + height, channels), x.dtype, x.device)
    needs_room = mode == "qkv" and plan.block_rows_out != plan.block_width
    received = empty(tokens.shape, x.dtype, x.device) if needs_room else tokens
    launch(
        sample_forward_kernel,
        (batch * num_heads,),
        x,
        y,
        tokens,
        received,
        *x_strides.over(align),
        *y_strides.over(align),
        height,
        width,
        scale,
        num_heads,
        channels // num_heads,
        plan.block_width,
        plan.block_rows,
        plan.block_rows_out,
        plan.block_positions,
        plan.block_channels,
        plan.lanes,
        mode == "qkv",
        x_strides.channels_last,
        y_strides.channels_last,
        align,
        plan.stages,
        dot_precision(x.dtype),
        num_warps=plan.warps,
        maxnreg=plan.registers,
    )
    return y, tokens


def sample_backward(
    d_y: Tensor, x: Tensor, tokens: Tensor, *, mode: str, num_heads: int, scale: float, plan: SamplePlan
) -> Tensor:
    """The gradient of :func:`sample_forward` with respect to x, from x and its averages."""
    x, x_strides = flat(x)
    d_y, dy_strides = flat(d_y)
    batch, channels, height, width = x.shape
    d_x = empty_like_grid(x, channels, x_strides.channels_last)
    dx_strides = _strides(d_x)
    align = alignment(x_strides, dy_strides, dx_strides)
    d_tokens = empty(tokens.shape, torch.float32, x.device)
    launch(
        sample_backward_kernel,
        (batch * num_heads,),
        x,
        tokens,
        d_y,
        d_x,
        d_tokens,
        *x_strides.over(align),
        *dy_strides.over(align),
        *dx_strides.over(align),
        height,
        width,
        scale,
        num_heads,
        channels // num_heads,
        plan.block_width,
        plan.block_rows,
        plan.block_rows_out,
        plan.block_positions,
        plan.block_channels,
        plan.lanes,
        mode == "qkv",
        x_strides.channels_last,
        dy_strides.channels_last,
        dx_strides.channels_last,
        align,
        plan.stages,
        dot_precision(x.dtype),
        num_warps=plan.warps,
        maxnreg=plan.registers,
    )
    return d_x


def _strides(x: Tensor) -> Strides:
    strides = flat_strides(x)
    assert strides is not None
    return strides
