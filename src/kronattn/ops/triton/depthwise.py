"""The backward of depth-wise 3×3 convolutions of channels-last maps, of stride 1 or 2 and padded by 1.

Such a convolution moves bytes and computes next to nothing. cuDNN's forward is hard to beat; its backward reads the
gradient once for each of its two results and, with a stride, spends twice the time that this one does.

With dy_k the gradient of the output shifted by tap k, dx is the sum of weight_k · dy_k, and the gradient of weight_k is
the sum of x · dy_k over all positions: one walk finds both. A program takes a few columns, of one sample or of several
side by side, and walks down their rows; those that the next row needs again stay in registers. Sums are added up in a
fixed order.
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
from kronattn.ops.triton.tuning import column_blocks

__all__ = ["depthwise_backward", "depthwise_conv"]


@triton.jit
def place_of_item(item, splits, columns, rows, width, per_split, BL: tl.constexpr):
    """The samples and columns of a piece of the output, which of them there are, and its first and last row."""
    b_l = item // splits * BL + tl.arange(0, BL)
    first = item % splits * per_split
    return b_l // width, b_l % width, (b_l < columns)[:, None], first, tl.minimum(first + per_split, rows)


@triton.jit
def load_tap(weight, b_c, C, tap: tl.constexpr, DT: tl.constexpr):
    """One of the nine weights of each channel, rounded as the forward rounded it."""
    return tl.load(weight + b_c * 9 + tap, mask=b_c < C, other=0.0).to(DT).to(tl.float32)[None, :]


@triton.jit
def load_taps(weight, b_c, C, DT: tl.constexpr):
    b_w0 = load_tap(weight, b_c, C, 0, DT)
    b_w1 = load_tap(weight, b_c, C, 1, DT)
    b_w2 = load_tap(weight, b_c, C, 2, DT)
    b_w3 = load_tap(weight, b_c, C, 3, DT)
    b_w4 = load_tap(weight, b_c, C, 4, DT)
    b_w5 = load_tap(weight, b_c, C, 5, DT)
    b_w6 = load_tap(weight, b_c, C, 6, DT)
    b_w7 = load_tap(weight, b_c, C, 7, DT)
    b_w8 = load_tap(weight, b_c, C, 8, DT)
    return b_w0, b_w1, b_w2, b_w3, b_w4, b_w5, b_w6, b_w7, b_w8


@triton.jit
def is_within(row, rows):
    """Whether there is such a row, as a mask: the interpreter knows no other truth."""
    b_row = tl.full([1, 1], row, tl.int32)
    return (b_row >= 0) & (b_row < rows)


@triton.jit
def load_three(p_x, row, rows, row_distance, distance, b_left, b_middle, b_right):
    """A row's positions to the left of each column, in it and to its right; zero outside."""
    p_row = p_x + row * row_distance
    is_row = is_within(row, rows)
    b_0 = tl.load(p_row - distance, mask=b_left & is_row, other=0.0)
    b_1 = tl.load(p_row, mask=b_middle & is_row, other=0.0)
    b_2 = tl.load(p_row + distance, mask=b_right & is_row, other=0.0)
    return b_0, b_1, b_2


@triton.jit
def as_floats(b_0, b_1, b_2):
    return b_0.to(tl.float32), b_1.to(tl.float32), b_2.to(tl.float32)


@triton.jit
def store_tap(p_part, b_sum, b_in, tap: tl.constexpr):
    tl.store(p_part + tap, tl.sum(b_sum, axis=0), mask=b_in)


@triton.jit
def store_taps(parts, b_c, C, blocks, s0, s1, s2, s3, s4, s5, s6, s7, s8):
    """A program's sums for each weight: parts is (programs, 9 · C)."""
    b_in = b_c < C
    p_part = parts + tl.program_id(0) // blocks * (9 * C) + b_c * 9
    store_tap(p_part, s0, b_in, 0)
    store_tap(p_part, s1, b_in, 1)
    store_tap(p_part, s2, b_in, 2)
    store_tap(p_part, s3, b_in, 3)
    store_tap(p_part, s4, b_in, 4)
    store_tap(p_part, s5, b_in, 5)
    store_tap(p_part, s6, b_in, 6)
    store_tap(p_part, s7, b_in, 7)
    store_tap(p_part, s8, b_in, 8)


@triton.jit
def backward_kernel(
    x, d_y, weight, d_x, parts, columns, height, width, y_height, y_width, splits, per_split, x_distance, dy_distance,
    c_over, blocks, items, BL: tl.constexpr, BC: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Of stride 1: the gradient is shifted the other way round, so its last row meets the first weights. The output's
    height and width, which are the input's, are there for a launch like the other one's."""
    C = c_over * ALIGN
    distance = dy_distance * ALIGN
    b_c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    b_c_in = (b_c < C)[None, :]
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = load_taps(weight, b_c, C, x.dtype.element_ty)
    row_step = width * distance
    x_step = width * (x_distance * ALIGN)
    zero = tl.zeros([BL, BC], tl.float32)
    s0, s1, s2, s3, s4, s5, s6, s7, s8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    for item in range(tl.program_id(0) // blocks, items, tl.num_programs(0) // blocks):
        b_n, b_j, b_in, first, last = place_of_item(item, splits, columns, height, width, per_split, BL)
        b_in = b_in & b_c_in
        b_position = (b_n * (height * width) + b_j)[:, None]
        p_x = x + b_position * (x_distance * ALIGN) + b_c[None, :]
        p_dy = d_y + b_position * distance + b_c[None, :]
        p_dx = d_x + b_position * C + b_c[None, :]
        b_left = b_in & (b_j > 0)[:, None]
        b_right = b_in & (b_j + 1 < width)[:, None]
        a0, a1, a2 = load_three(p_dy, first - 1, height, row_step, distance, b_left, b_in, b_right)
        m0, m1, m2 = load_three(p_dy, first, height, row_step, distance, b_left, b_in, b_right)
        n0, n1, n2 = load_three(p_dy, first + 1, height, row_step, distance, b_left, b_in, b_right)
        a0, a1, a2 = as_floats(a0, a1, a2)
        m0, m1, m2 = as_floats(m0, m1, m2)
        b_next_x = tl.load(p_x + first * x_step, mask=b_in, other=0.0)
        for i in range(first, last):
            z0, z1, z2 = as_floats(n0, n1, n2)
            b_x = b_next_x.to(tl.float32)
            # What the next row needs is on its way while this one is computed.
            n0, n1, n2 = load_three(p_dy, i + 2, height, row_step, distance, b_left, b_in, b_right)
            b_next_x = tl.load(p_x + (i + 1) * x_step, mask=b_in & is_within(i + 1, height), other=0.0)
            b_dx = z2 * w0 + z1 * w1 + z0 * w2 + m2 * w3 + m1 * w4 + m0 * w5 + a2 * w6 + a1 * w7 + a0 * w8
            tl.store(p_dx + i * width * C, b_dx.to(d_x.dtype.element_ty), mask=b_in)
            s0 += b_x * z2
            s1 += b_x * z1
            s2 += b_x * z0
            s3 += b_x * m2
            s4 += b_x * m1
            s5 += b_x * m0
            s6 += b_x * a2
            s7 += b_x * a1
            s8 += b_x * a0
            a0, a1, a2, m0, m1, m2 = m0, m1, m2, z0, z1, z2
    store_taps(parts, b_c, C, blocks, s0, s1, s2, s3, s4, s5, s6, s7, s8)


@triton.jit
def backward_strided_kernel(
    x, d_y, weight, d_x, parts, columns, height, width, y_height, y_width, splits, per_split, x_distance, dy_distance,
    c_over, blocks, items, BL: tl.constexpr, BC: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Of stride 2: each position of the output answers for the two by two of the input that begin where it looked."""
    C = c_over * ALIGN
    distance = dy_distance * ALIGN
    from_x = x_distance * ALIGN
    b_c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    b_c_in = (b_c < C)[None, :]
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = load_taps(weight, b_c, C, x.dtype.element_ty)
    row_step = y_width * distance
    zero = tl.zeros([BL, BC], tl.float32)
    s0, s1, s2, s3, s4, s5, s6, s7, s8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    for item in range(tl.program_id(0) // blocks, items, tl.num_programs(0) // blocks):
        b_n, b_j, b_in, first, last = place_of_item(item, splits, columns, y_height, y_width, per_split, BL)
        b_in = b_in & b_c_in
        b_position = (b_n * (height * width) + b_j * 2)[:, None]
        p_x = x + b_position * from_x + b_c[None, :]
        p_dx = d_x + b_position * C + b_c[None, :]
        p_dy = d_y + (b_n * (y_height * y_width) + b_j)[:, None] * distance + b_c[None, :]
        b_next = b_in & (b_j + 1 < y_width)[:, None]
        b_odd = b_in & (b_j * 2 + 1 < width)[:, None]
        b_here = tl.load(p_dy + first * row_step, mask=b_in, other=0.0).to(tl.float32)
        b_right = tl.load(p_dy + first * row_step + distance, mask=b_next, other=0.0).to(tl.float32)
        for i in range(first, last):
            is_next, is_odd = is_within(i + 1, y_height), is_within(i * 2 + 1, height)
            b_below = tl.load(p_dy + (i + 1) * row_step, mask=b_in & is_next, other=0.0).to(tl.float32)
            b_last = tl.load(p_dy + (i + 1) * row_step + distance, mask=b_next & is_next, other=0.0).to(tl.float32)
            p_row = p_x + i * 2 * width * from_x
            b_x0 = tl.load(p_row, mask=b_in, other=0.0).to(tl.float32)
            b_x1 = tl.load(p_row + from_x, mask=b_odd, other=0.0).to(tl.float32)
            b_x2 = tl.load(p_row + width * from_x, mask=b_in & is_odd, other=0.0).to(tl.float32)
            b_x3 = tl.load(p_row + (width + 1) * from_x, mask=b_odd & is_odd, other=0.0).to(tl.float32)
            b_dx0 = b_here * w4
            b_dx1 = b_right * w3 + b_here * w5
            b_dx2 = b_below * w1 + b_here * w7
            b_dx3 = b_last * w0 + b_below * w2 + b_right * w6 + b_here * w8
            p_row = p_dx + i * 2 * width * C
            tl.store(p_row, b_dx0.to(d_x.dtype.element_ty), mask=b_in)
            tl.store(p_row + C, b_dx1.to(d_x.dtype.element_ty), mask=b_odd)
            tl.store(p_row + width * C, b_dx2.to(d_x.dtype.element_ty), mask=b_in & is_odd)
            tl.store(p_row + (width + 1) * C, b_dx3.to(d_x.dtype.element_ty), mask=b_odd & is_odd)
            s0 += b_x3 * b_last
            s1 += b_x2 * b_below
            s2 += b_x3 * b_below
            s3 += b_x1 * b_right
            s4 += b_x0 * b_here
            s5 += b_x1 * b_here
            s6 += b_x3 * b_right
            s7 += b_x2 * b_here
            s8 += b_x3 * b_here
            b_here, b_right = b_below, b_last
    store_taps(parts, b_c, C, blocks, s0, s1, s2, s3, s4, s5, s6, s7, s8)


def depthwise_conv(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Each channel convolved with its own 3×3 weights: (N, C, h, w) to (N, C, ⌈h/stride⌉, ⌈w/stride⌉); differentiable.

    Args:
        x: channels last; may be a slice of more channels.
        weight: (C, 1, 3, 3), contiguous; of x's dtype, or of any that autocast brings to it.
        stride: 1 or 2.
    """
    return _DepthwiseConv.apply(x, weight, stride)


def depthwise_backward(x: Tensor, weight: Tensor, d_y: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    batch, channels, height, width = x.shape
    d_y = as_rows(d_y)
    y_height, y_width = d_y.shape[2:]
    d_x = empty_grid(batch, channels, (height, width), True, x.dtype, x.device)
    blocks = column_blocks(batch * y_width, y_height, channels)
    align, over, *distances = aligned(channels, row_distance(x), row_distance(d_y))
    parts = torch.empty((blocks.programs, 9 * channels), dtype=torch.float32, device=x.device)
    with on_device(x):
        launch(
            backward_kernel if stride == 1 else backward_strided_kernel, (blocks.programs * blocks.channel_blocks,),
            (x, d_y, weight, d_x, parts),
            (batch * y_width, height, width, y_height, y_width, blocks.splits, blocks.per_split, *distances, over,
             blocks.channel_blocks, blocks.items),
            blocks.columns, blocks.channels, align,
            num_warps=blocks.warps,
        )  # fmt: skip
        d_weight = sum_parts(parts, weight.dtype, at_once=128)
    return d_x, d_weight.view(weight.shape)


class _DepthwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return F.conv2d(x, weight, None, stride, 1, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *depthwise_backward(x, weight, d_y, ctx.stride), None

        def call(x: Tensor, weight: Tensor) -> Tensor:
            return F.conv2d(x, weight.to(x.dtype), None, ctx.stride, 1, groups=len(weight))

        return *differentiable(call, (x, weight), d_y), None
