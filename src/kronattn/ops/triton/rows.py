"""Rows for products on tensor cores: averages as :func:`kronattn.ops.built.deviations`, and room that is all zeros.

Each of these is a few operators in PyTorch, on tensors so small that asking for them takes longer than they do.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.gpu import aligned
from kronattn.ops.triton.blocks import token_offsets
from kronattn.ops.triton.launch import empty, launch, recorded
from kronattn.ops.triton.layout import flat
from kronattn.ops.triton.rules import pixels_plan, rows_plan

__all__ = ["centre", "padded_pixels", "padded_rows", "uncentre"]


@triton.jit
def sum_tokens(tokens, b_c, count, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """The sum of a sample's first ``count`` tokens: (BC,)."""
    b_sum = tl.zeros([BT, BC], tl.float32)
    for start in range(0, count, BT):
        b_t = start + tl.arange(0, BT)
        b_mask = (b_t < count)[:, None] & (b_c < C)[None, :]
        b_sum += tl.load(tokens + token_offsets(b_t, b_c, C), mask=b_mask, other=0.0).to(tl.float32)
    return tl.sum(b_sum, axis=0)


@triton.jit
def centre_kernel(
    tokens, rows, count, room, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SUMS: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    b_c = tl.program_id(1) * BC + tl.arange(0, BC)
    tokens += n * count * C
    rows += n * room * C
    b_last = sum_tokens(tokens, b_c, count, C, BT, BC)
    if not SUMS:
        b_last = b_last / count
    for start in range(0, room, BT):
        b_t = start + tl.arange(0, BT)
        b_in = (b_c < C)[None, :]
        b_x = tl.load(tokens + token_offsets(b_t, b_c, C), mask=(b_t < count)[:, None] & b_in, other=0.0)
        b_x = b_x.to(tl.float32)
        if not SUMS:
            b_x -= b_last[None, :]
        b_x = tl.where((b_t < count)[:, None], b_x, tl.where((b_t == count)[:, None], b_last[None, :], 0.0))
        tl.store(rows + token_offsets(b_t, b_c, C), b_x.to(rows.dtype.element_ty), mask=(b_t < room)[:, None] & b_in)


@triton.jit
def uncentre_kernel(
    rows, tokens, count, room, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, GRADIENT: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    b_c = tl.program_id(1) * BC + tl.arange(0, BC)
    rows += n * room * C
    tokens += n * count * C
    b_all = tl.load(rows + count * C + b_c, mask=b_c < C, other=0.0).to(tl.float32)
    if GRADIENT:
        b_all = (b_all - sum_tokens(rows, b_c, count, C, BT, BC)) / count
    for start in range(0, count, BT):
        b_t = start + tl.arange(0, BT)
        b_at = token_offsets(b_t, b_c, C)
        b_mask = (b_t < count)[:, None] & (b_c < C)[None, :]
        b_x = tl.load(rows + b_at, mask=b_mask, other=0.0).to(tl.float32)
        tl.store(tokens + b_at, (b_x + b_all[None, :]).to(tokens.dtype.element_ty), mask=b_mask)


@triton.jit
def padded_rows_kernel(
    x, padded, count, first, room, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    b_c = tl.program_id(1) * BC + tl.arange(0, BC)
    b_in = (b_c < C)[None, :]
    padded += (n * (first + room) + first) * C
    for start in range(0, room, BT):
        b_t = start + tl.arange(0, BT)
        b_at = token_offsets(b_t, b_c, C)
        b_x = tl.load(x + b_at, mask=(b_t < count)[:, None] & b_in, other=0.0)
        tl.store(padded + b_at, b_x.to(padded.dtype.element_ty), mask=(b_t < room)[:, None] & b_in)


@triton.jit
def padded_pixels_kernel(
    x, padded, x_n, x_c, x_p, positions, channels, room, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    b_p = tl.program_id(1) * BM + tl.arange(0, BM)
    b_c = tl.program_id(2) * BC + tl.arange(0, BC)
    b_inside = (b_p < positions)[:, None]
    p_x = x + n * x_n + b_p.to(tl.int64)[:, None] * x_p + b_c.to(tl.int64)[None, :] * x_c
    b_x = tl.load(p_x, mask=b_inside & (b_c < channels)[None, :], other=0.0)
    p_padded = padded + (n * positions + b_p)[:, None] * room + b_c[None, :]
    tl.store(p_padded, b_x, mask=b_inside & (b_c < room)[None, :])


@recorded
def centre(tokens: Tensor, dtype: torch.dtype, sums: bool = False) -> Tensor:
    """(N, n, C) as what they differ from their mean by, then the mean, then zeros: (N, aligned(n + 1), C) in ``dtype``.

    With ``sums``, as they are, then their sum, then zeros: the gradient of :func:`uncentre`.
    """
    batch, count, channels = tokens.shape
    room = aligned(count + 1)
    rows = empty((batch, room, channels), dtype, tokens.device)
    plan = rows_plan(batch, channels)
    launch(
        centre_kernel,
        (batch, triton.cdiv(channels, plan.block_channels)),
        tokens, rows, count, room, channels, plan.block_rows, plan.block_channels, sums,
        num_warps=plan.warps,
    )  # fmt: skip
    return rows


@recorded
def uncentre(rows: Tensor, count: int, gradient: bool = False) -> Tensor:
    """The (N, count, C) tokens, in float32, that a linear map of what :func:`centre` gave stands for.

    With ``gradient``, what those tokens receive from the gradient of :func:`centre`.
    """
    batch, room, channels = rows.shape
    tokens = empty((batch, count, channels), torch.float32, rows.device)
    plan = rows_plan(batch, channels)
    launch(
        uncentre_kernel,
        (batch, triton.cdiv(channels, plan.block_channels)),
        rows, tokens, count, room, channels, plan.block_rows, plan.block_channels, gradient,
        num_warps=plan.warps,
    )  # fmt: skip
    return tokens


@recorded
def padded_rows(x: Tensor, copies: int, first: int, dtype: torch.dtype) -> Tensor:
    """(K, C, ...) rows with zeros below, ``copies`` times, and each time with room for ``first`` rows above.

    Returns:
        (copies, first + aligned(K), C) in ``dtype``, its first rows yet to be written.
    """
    x = x.contiguous()
    count = x.shape[0]
    channels, room = x.numel() // count, aligned(count)
    padded = empty((copies, first + room, channels), dtype, x.device)
    plan = rows_plan(copies, channels)
    launch(
        padded_rows_kernel,
        (copies, triton.cdiv(channels, plan.block_channels)),
        x, padded, count, first, room, channels, plan.block_rows, plan.block_channels,
        num_warps=plan.warps,
    )  # fmt: skip
    return padded


@recorded
def padded_pixels(x: Tensor, room: int) -> Tensor:
    """(N, C, h, w) in any layout as rows with zeros after each: (N, h·w, room)."""
    x, strides = flat(x)
    batch, channels, height, width = x.shape
    positions = height * width
    padded = empty((batch, positions, room), x.dtype, x.device)
    plan = pixels_plan(room)
    launch(
        padded_pixels_kernel,
        (batch, triton.cdiv(positions, plan.block_rows), triton.cdiv(room, plan.block_channels)),
        x, padded, strides.sample, strides.channel, strides.position, positions, channels, room,
        plan.block_rows, plan.block_channels,
        num_warps=plan.warps,
    )  # fmt: skip
    return padded
