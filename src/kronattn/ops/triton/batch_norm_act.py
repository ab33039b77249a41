"""Batch norm of channels-last maps and the clamp after it in as few passes as there can be, forward and backward.

In eager code PyTorch takes four passes for a norm and its activation in training, and these are most of what networks
of depth-wise convolutions spend their time on. Here the forward reads x for its statistics, reads it again and writes
the output; the backward reads x and dy twice and writes dx. Sums are added up in a fixed order.

A tensor that is to be concatenated with the output is written into the same memory in passing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.blocks import launch, sum_parts
from kronattn.ops.triton.layout import aligned, as_rows, empty_grid, on_device, row_distance
from kronattn.ops.triton.operators import differentiable
from kronattn.ops.triton.tuning import ceil_div, row_blocks

__all__ = ["batch_norm_act", "batch_norm_act_in_training"]


# What an activation clamps to, and whether it does.
Clamp = tuple[float, float, bool]


@triton.jit
def load_rows(x, first, last, b_c, stride, C, BR: tl.constexpr, ALIGN: tl.constexpr):
    """(BR, channels) from row ``first`` on, in float32; zero past the end. Rows are stride · ALIGN apart."""
    b_r = first + tl.arange(0, BR)
    b_mask = (b_r < last)[:, None] & (b_c < C)[None, :]
    b_at = b_r[:, None] * (stride * ALIGN) + b_c[None, :]
    return tl.load(x + b_at, mask=b_mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(y, b_y, first, last, b_c, stride, C, BR: tl.constexpr, ALIGN: tl.constexpr):
    b_r = first + tl.arange(0, BR)
    b_mask = (b_r < last)[:, None] & (b_c < C)[None, :]
    b_at = b_r[:, None] * (stride * ALIGN) + b_c[None, :]
    tl.store(y + b_at, b_y.to(y.dtype.element_ty), mask=b_mask)


@triton.jit
def place_of_program(blocks, per_program, rows, BC: tl.constexpr):
    """Which of the programs that share a block of channels this is, its first and last row, and its channels."""
    program = tl.program_id(0) // blocks
    first = program * per_program
    last = tl.minimum(first + per_program, rows)
    return program, first, last, tl.program_id(0) % blocks * BC + tl.arange(0, BC)


@triton.jit
def load_channels(x, b_c, C):
    return tl.load(x + b_c, mask=b_c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def moments_kernel(
    x, parts, rows, stride, per_program, c_over, blocks,
    BR: tl.constexpr, BC: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program's mean and squared deviations of its rows: parts is (programs, 2, C).

    Sums are of differences from the program's first row, so that a large mean takes nothing away from them.
    """
    C = c_over * ALIGN
    program, first, last, b_c = place_of_program(blocks, per_program, rows, BC)
    b_start = tl.load(x + first * (stride * ALIGN) + b_c, mask=b_c < C, other=0.0).to(tl.float32)[None, :]
    b_sum = tl.zeros([BR, BC], tl.float32)
    b_squares = tl.zeros([BR, BC], tl.float32)
    for r in tl.range(first, last, BR, num_stages=STAGES):
        b_x = load_rows(x, r, last, b_c, stride, C, BR, ALIGN) - b_start
        b_x = tl.where((r + tl.arange(0, BR) < last)[:, None], b_x, 0.0)
        b_sum += b_x
        b_squares += b_x * b_x
    b_total = tl.sum(b_sum, axis=0)
    count = (last - first).to(tl.float32)
    p_part = parts + program * 2 * C + b_c
    tl.store(p_part, tl.sum(b_start, axis=0) + b_total / count, mask=b_c < C)
    tl.store(p_part + C, tl.sum(b_squares, axis=0) - b_total * b_total / count, mask=b_c < C)


@triton.jit
def finish_moments_kernel(
    parts, mean, inverse, running_mean, running_var, batches, programs, rows, per_program, momentum, eps, C,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    b_c = tl.program_id(0) * BC + tl.arange(0, BC)
    b_mean = tl.zeros([BP, BC], tl.float32)
    for start in range(0, programs, BP):
        b_p = start + tl.arange(0, BP)
        b_mask = (b_p < programs)[:, None] & (b_c < C)[None, :]
        b_count = tl.minimum(rows - b_p * per_program, per_program).to(tl.float32)[:, None]
        b_mean += b_count * tl.load(parts + b_p[:, None] * (2 * C) + b_c[None, :], mask=b_mask, other=0.0)
    b_average = tl.sum(b_mean, axis=0) / rows
    b_squares = tl.zeros([BP, BC], tl.float32)
    for start in range(0, programs, BP):
        b_p = start + tl.arange(0, BP)
        b_mask = (b_p < programs)[:, None] & (b_c < C)[None, :]
        b_count = tl.minimum(rows - b_p * per_program, per_program).to(tl.float32)[:, None]
        p_part = parts + b_p[:, None] * (2 * C) + b_c[None, :]
        b_off = tl.load(p_part, mask=b_mask, other=0.0) - b_average[None, :]
        b_squares += tl.load(p_part + C, mask=b_mask, other=0.0) + tl.where(b_mask, b_count * b_off * b_off, 0.0)
    b_total = tl.sum(b_squares, axis=0)
    b_in = b_c < C
    tl.store(mean + b_c, b_average, mask=b_in)
    tl.store(inverse + b_c, tl.rsqrt(b_total / rows + eps), mask=b_in)
    b_old = tl.load(running_mean + b_c, mask=b_in, other=0.0)
    tl.store(running_mean + b_c, b_old + momentum * (b_average - b_old), mask=b_in)
    b_old = tl.load(running_var + b_c, mask=b_in, other=0.0)
    tl.store(running_var + b_c, b_old + momentum * (b_total / tl.maximum(rows - 1, 1) - b_old), mask=b_in)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def apply_kernel(
    x, concat, y, mean, deviation, weight, bias, rows, stride, concat_stride, y_stride, per_program, lowest, highest,
    eps, c_over, cb_over, blocks, concat_blocks,
    BR: tl.constexpr, BC: tl.constexpr, IS_VARIANCE: tl.constexpr, CLAMP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """y = clamp(norm(x)), and where there are concat_blocks the channels of ``concat`` after it."""
    C = c_over * ALIGN
    CB = cb_over * ALIGN
    block = tl.program_id(0) % (blocks + concat_blocks)
    first = tl.program_id(0) // (blocks + concat_blocks) * per_program
    last = tl.minimum(first + per_program, rows)
    if block < blocks:
        b_c = block * BC + tl.arange(0, BC)
        b_scale = load_channels(deviation, b_c, C)
        if IS_VARIANCE:
            b_scale = tl.rsqrt(b_scale + eps)
        b_scale = b_scale * load_channels(weight, b_c, C)
        b_shift = load_channels(bias, b_c, C) - load_channels(mean, b_c, C) * b_scale
        for r in tl.range(first, last, BR):
            b_y = load_rows(x, r, last, b_c, stride, C, BR, ALIGN) * b_scale + b_shift
            if CLAMP:
                b_y = tl.minimum(tl.maximum(b_y, lowest), highest)
            store_rows(y, b_y, r, last, b_c, y_stride, C, BR, ALIGN)
    else:
        b_c = (block - blocks) * BC + tl.arange(0, BC)
        for r in tl.range(first, last, BR):
            b_concat = load_rows(concat, r, last, b_c, concat_stride, CB, BR, ALIGN)
            store_rows(y + C, b_concat, r, last, b_c, y_stride, CB, BR, ALIGN)


@triton.jit
def normed_gradient(
    x, d_y, r, last, b_c, stride, dy_stride, b_mean, b_inverse, b_weight, b_bias, lowest, highest,
    C, BR: tl.constexpr, CLAMP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """x normed, and the gradient of what it was before the clamp: (BR, channels)."""
    b_x = (load_rows(x, r, last, b_c, stride, C, BR, ALIGN) - b_mean) * b_inverse
    b_dz = load_rows(d_y, r, last, b_c, dy_stride, C, BR, ALIGN)
    if CLAMP:
        b_z = b_x * b_weight + b_bias
        b_dz = tl.where((b_z > lowest) & (b_z < highest), b_dz, 0.0)
    return b_x, b_dz


@triton.jit
def gradient_sums_kernel(
    x, d_y, parts, mean, inverse, weight, bias, rows, stride, dy_stride, per_program, lowest, highest,
    c_over, blocks, BR: tl.constexpr, BC: tl.constexpr, CLAMP: tl.constexpr, ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Each program's sums of the norm's gradient and of that times the normed x: parts is (programs, 2, C)."""
    C = c_over * ALIGN
    program, first, last, b_c = place_of_program(blocks, per_program, rows, BC)
    b_mean, b_inverse = load_channels(mean, b_c, C), load_channels(inverse, b_c, C)
    b_weight, b_bias = load_channels(weight, b_c, C), load_channels(bias, b_c, C)
    b_sum = tl.zeros([BR, BC], tl.float32)
    b_product = tl.zeros([BR, BC], tl.float32)
    for r in tl.range(first, last, BR, num_stages=STAGES):
        b_x, b_dz = normed_gradient(
            x, d_y, r, last, b_c, stride, dy_stride, b_mean, b_inverse, b_weight, b_bias, lowest, highest,
            C, BR, CLAMP, ALIGN,
        )  # fmt: skip
        b_sum += b_dz
        b_product += b_dz * b_x
    p_part = parts + program * 2 * C + b_c
    tl.store(p_part, tl.sum(b_sum, axis=0), mask=b_c < C)
    tl.store(p_part + C, tl.sum(b_product, axis=0), mask=b_c < C)


@triton.jit
def input_gradient_kernel(
    x, d_y, sums, mean, inverse, weight, bias, d_x, rows, stride, dy_stride, dx_stride, per_program, lowest, highest,
    c_over, blocks, BR: tl.constexpr, BC: tl.constexpr, CLAMP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    C = c_over * ALIGN
    _, first, last, b_c = place_of_program(blocks, per_program, rows, BC)
    b_mean, b_inverse = load_channels(mean, b_c, C), load_channels(inverse, b_c, C)
    b_weight, b_bias = load_channels(weight, b_c, C), load_channels(bias, b_c, C)
    b_sum, b_product = load_channels(sums, b_c, C) / rows, load_channels(sums + C, b_c, C) / rows
    for r in tl.range(first, last, BR):
        b_x, b_dz = normed_gradient(
            x, d_y, r, last, b_c, stride, dy_stride, b_mean, b_inverse, b_weight, b_bias, lowest, highest,
            C, BR, CLAMP, ALIGN,
        )  # fmt: skip
        b_dx = (b_dz - b_sum - b_x * b_product) * (b_inverse * b_weight)
        store_rows(d_x, b_dx, r, last, b_c, dx_stride, C, BR, ALIGN)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _apply(
    x: Tensor, concat: Tensor | None, mean: Tensor, deviation: Tensor, weight: Tensor, bias: Tensor, eps: float,
    clamp: Clamp, *, is_variance: bool,
) -> Tensor:  # fmt: skip
    channels, more = x.shape[1], 0 if concat is None else concat.shape[1]
    y = empty_grid(x.shape[0], channels + more, x.shape[2:], True, x.dtype, x.device)
    rows = _rows(x)
    blocks = row_blocks(rows, channels, True)
    concat_blocks = ceil_div(more, blocks.channels)
    align, over, more_over, *distances = aligned(
        channels, more, row_distance(x), row_distance(x if concat is None else concat), channels + more
    )
    lowest, highest, clamps = clamp
    launch(
        apply_kernel, (blocks.programs * (blocks.channel_blocks + concat_blocks),),
        (x, x if concat is None else concat, y, mean, deviation, weight, bias),
        (rows, *distances, blocks.per_program, lowest, highest, eps, over, more_over, blocks.channel_blocks,
         concat_blocks), blocks.rows, blocks.channels, is_variance, clamps, align,
        num_warps=blocks.warps,
    )  # fmt: skip
    return y


def batch_norm_act(
    x: Tensor, concat: Tensor | None, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float,
    clamp: Clamp,
) -> Tensor:  # fmt: skip
    """Norm by known statistics and a clamp: (N, C, h, w) to (N, C + concat's channels, h, w).

    Everything is channels last; ``concat`` and ``x`` may be slices of more channels.
    """
    with on_device(x):
        return _apply(x, concat, mean, variance, weight, bias, eps, clamp, is_variance=True)


def batch_norm_act_in_training(
    x: Tensor, concat: Tensor | None, weight: Tensor, bias: Tensor, statistics: tuple[Any, ...], clamp: Clamp
) -> Tensor:
    """The same by the batch's own statistics, which the running ones follow; differentiable.

    ``statistics`` are the norm's running mean, running variance, number of batches, momentum and eps.
    """
    return _BatchNormAct.apply(x, concat, weight, bias, statistics, clamp)


class _BatchNormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, concat: Tensor | None, weight: Tensor, bias: Tensor, statistics: tuple[Any, ...],
        clamp: Clamp,
    ) -> Tensor:  # fmt: skip
        running_mean, running_var, batches, momentum, eps = statistics
        channels, rows = x.shape[1], _rows(x)
        blocks = row_blocks(rows, channels, False)
        align, over, distance = aligned(channels, row_distance(x))
        parts = torch.empty((blocks.programs, 2, channels), dtype=torch.float32, device=x.device)
        mean, inverse = (torch.empty((channels,), dtype=torch.float32, device=x.device) for _ in range(2))
        with on_device(x):
            launch(
                moments_kernel, (blocks.programs * blocks.channel_blocks,),
                (x, parts), (rows, distance, blocks.per_program, over, blocks.channel_blocks),
                blocks.rows, blocks.channels, align, blocks.stages,
                num_warps=blocks.warps,
            )  # fmt: skip
            launch(
                finish_moments_kernel, (ceil_div(channels, 16),),
                (parts, mean, inverse, running_mean, running_var, batches),
                (blocks.programs, rows, blocks.per_program, momentum, eps, channels), 128, 16,
            )  # fmt: skip
            y = _apply(x, concat, mean, inverse, weight, bias, eps, clamp, is_variance=False)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.clamp, ctx.eps, ctx.has_concat = clamp, eps, concat is not None
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        channels = x.shape[1]
        d_concat = d_y[:, channels:] if ctx.has_concat else None
        d_y = d_y[:, :channels] if ctx.has_concat else d_y
        if torch.is_grad_enabled():
            lowest, highest, clamps = ctx.clamp

            def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                y = F.batch_norm(x, None, None, weight, bias, training=True, eps=ctx.eps)
                return F.hardtanh(y, lowest, highest) if clamps else y

            d_x, d_weight, d_bias = differentiable(call, (x, weight, bias), d_y)
            return d_x, d_concat, d_weight, d_bias, None, None
        d_y, rows, (lowest, highest, clamps) = as_rows(d_y), _rows(x), ctx.clamp
        d_x = empty_grid(x.shape[0], channels, x.shape[2:], True, x.dtype, x.device)
        blocks = row_blocks(rows, channels, False)
        align, over, *distances = aligned(channels, row_distance(x), row_distance(d_y))
        parts = torch.empty((blocks.programs, 2 * channels), dtype=torch.float32, device=x.device)
        with on_device(x):
            launch(
                gradient_sums_kernel, (blocks.programs * blocks.channel_blocks,),
                (x, d_y, parts, mean, inverse, weight, bias),
                (rows, *distances, blocks.per_program, lowest, highest, over, blocks.channel_blocks),
                blocks.rows, blocks.channels, clamps, align, blocks.stages,
                num_warps=blocks.warps,
            )  # fmt: skip
            sums = sum_parts(parts, torch.float32, at_once=128)
            blocks = row_blocks(rows, channels, True)
            launch(
                input_gradient_kernel, (blocks.programs * blocks.channel_blocks,),
                (x, d_y, sums, mean, inverse, weight, bias, d_x),
                (rows, *distances, over, blocks.per_program, lowest, highest, over, blocks.channel_blocks),
                blocks.rows, blocks.channels, clamps, align,
                num_warps=blocks.warps,
            )  # fmt: skip
        d_bias, d_weight = sums.chunk(2)
        return d_x, d_concat, d_weight, d_bias, None, None
