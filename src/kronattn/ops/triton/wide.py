"""What wide layers do to their materialised coefficients between PyTorch's matrix products, in one pass each.

The same as in :mod:`kronattn.ops.matrix_products`, for eager code; the compiler fuses that by itself. With it the head
of DeepLabV2 launched 68 times in training, with kernels 37, when norm and softmax were still one each; launching is
most of what it takes its host. ``results/stages-heads-h200.json`` has its time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops import matrix_products
from kronattn.ops.coefficients import Moments
from kronattn.ops.triton.blocks import launch
from kronattn.ops.triton.layout import on_device
from kronattn.ops.triton.moments import finish_moments, slope_and_level
from kronattn.ops.triton.operators import differentiable, records
from kronattn.ops.triton.tuning import ceil_div, power_of_two

__all__ = ["centred", "moments"]

# Elements of a program's tile, and programs that read a whole matrix.
_TILE = 4096
_PROGRAMS = 528


def centred(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """As :func:`kronattn.ops.matrix_products.centred`."""
    return _Centred.apply(keys, dtype) if records(keys) else _centre(keys, keys.shape[1], dtype, backward=False)


def moments(matrix: Tensor, count: int) -> tuple[Moments, Tensor]:
    """As :func:`kronattn.ops.matrix_products.moments`."""
    mean, squares, matrix = _Moments.apply(matrix, count)
    return Moments(matrix.shape[0] * matrix.shape[1] * count, mean, squares), matrix


@triton.jit
def centre_kernel(
    x, output, x_n, x_s, x_c, count, padded,
    C: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Keys less their mean, then that mean, then zeros; backward, the transpose of it: (padded, C) to (count, C)."""
    n = tl.program_id(0).to(tl.int64)
    b_c = tl.program_id(1) * BC + tl.arange(0, BC)
    b_in = b_c < C
    x += n * x_n + b_c * x_c
    output += n * (count if BACKWARD else padded) * C + b_c
    b_mean = tl.zeros([BC], tl.float32)
    for start in range(0, count, BS):
        b_s = start + tl.arange(0, BS)
        b_mask = (b_s < count)[:, None] & b_in[None, :]
        b_mean += tl.sum(tl.load(x[None, :] + b_s[:, None] * x_s, mask=b_mask, other=0.0).to(tl.float32), axis=0)
    b_mean = b_mean / count
    b_shift = -b_mean
    if BACKWARD:
        b_shift += tl.load(x + count * x_s, mask=b_in, other=0.0).to(tl.float32) / count
    for start in range(0, count if BACKWARD else padded, BS):
        b_s = start + tl.arange(0, BS)
        b_key = (b_s < count)[:, None]
        b_y = tl.load(x[None, :] + b_s[:, None] * x_s, mask=b_key & b_in[None, :], other=0.0).to(tl.float32)
        b_y = tl.where(b_key, b_y + b_shift[None, :], tl.where((b_s == count)[:, None], b_mean[None, :], 0.0))
        b_mask = (b_s < (count if BACKWARD else padded))[:, None] & b_in[None, :]
        tl.store(output[None, :] + b_s[:, None] * C, b_y.to(output.dtype.element_ty), mask=b_mask)


@triton.jit
def load_matrix_rows(matrix, b_r, last, b_k, width):
    """(rows, columns) in float32; zero past the end."""
    b_mask = (b_r < last)[:, None] & (b_k < width)[None, :]
    return tl.load(matrix + b_r[:, None] * width + b_k[None, :], mask=b_mask, other=0.0).to(tl.float32)


@triton.jit
def matrix_moments_kernel(matrix, parts, rows, per_program, count, M: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """What a range of rows adds to the moments; parts as in :mod:`.moments`."""
    first = tl.program_id(0).to(tl.int64) * per_program
    last = tl.minimum(first + per_program, rows)
    b_k = tl.arange(0, BK)
    # Of a coefficient, what its key differs by averages to zero over the keys; what the keys share is in one column.
    centre = tl.load(matrix + first * M + count).to(tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    b_squares = tl.zeros([BR], tl.float32)
    for start in range(0, per_program, BR):
        b_r = first + start + tl.arange(0, BR)
        b_e = load_matrix_rows(matrix, b_r, last, b_k, M)
        b_own = tl.where((b_k < count)[None, :], b_e, 0.0)
        b_shared = tl.sum(tl.where((b_k == count)[None, :], b_e, 0.0), axis=1) - centre
        b_shared = tl.where(b_r < last, b_shared, 0.0)
        b_sum += b_shared * count
        b_squares += tl.sum(b_own * b_own, axis=1) + b_shared * b_shared * count
    p_part = parts + tl.program_id(0) * 4
    tl.store(p_part, ((last - first) * count).to(tl.float32))
    tl.store(p_part + 1, tl.sum(b_sum, axis=0))
    tl.store(p_part + 2, tl.sum(b_squares, axis=0))
    tl.store(p_part + 3, centre)


@triton.jit
def matrix_moments_backward_kernel(
    matrix, mean, d_mean, d_squares, d_matrix, output, rows, count, members,
    M: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, HAS_D_MEAN: tl.constexpr, HAS_D_MATRIX: tl.constexpr,
):  # fmt: skip
    """output = d_matrix + what comes through the moments."""
    b_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    b_k = tl.arange(0, BK)
    slope, level = slope_and_level(mean, d_mean, d_squares, 0, members, HAS_D_MEAN)
    b_e = load_matrix_rows(matrix, b_r, rows, b_k, M)
    b_shared = tl.where((b_k == count)[None, :], (b_e * slope + level) * count, 0.0)
    b_d = tl.where((b_k < count)[None, :], b_e * slope, b_shared)
    if HAS_D_MATRIX:
        b_d += load_matrix_rows(d_matrix, b_r, rows, b_k, M)
    b_mask = (b_r < rows)[:, None] & (b_k < M)[None, :]
    tl.store(output + b_r[:, None] * M + b_k[None, :], b_d.to(output.dtype.element_ty), mask=b_mask)


def _blocks(matrix: Tensor) -> tuple[int, tuple[int, int, int]]:
    """Rows of a matrix; its columns, and how many rows and columns a program takes at a time."""
    width = matrix.shape[-1]
    block = max(16, power_of_two(width))
    return matrix.numel() // width, (width, max(1, _TILE // block), block)


def _centre(x: Tensor, count: int, dtype: torch.dtype, *, backward: bool) -> Tensor:
    """(N, count, C) keys to (N, padded(count), C) in ``dtype``; backward, the other way round."""
    batch, _, channels = x.shape
    padded = matrix_products.padded(count)
    output = torch.empty((batch, count if backward else padded, channels), dtype=dtype, device=x.device)
    block = min(64, power_of_two(channels))
    with on_device(x):
        launch(
            centre_kernel, (batch, ceil_div(channels, block)), (x, output), (*x.stride(), count, padded),
            channels, 32, block, backward,
        )  # fmt: skip
    return output


class _Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.count, ctx.dtype = keys.shape[1], keys.dtype
        return _centre(keys, ctx.count, dtype, backward=False)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            d_keys = d_rows[:, : ctx.count] + d_rows[:, ctx.count :][:, :1] / ctx.count
            return (d_keys - d_rows[:, : ctx.count].mean(dim=1, keepdim=True)).to(ctx.dtype), None
        return _centre(d_rows, ctx.count, ctx.dtype, backward=True), None


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        rows, blocks = _blocks(matrix)
        per_program = ceil_div(ceil_div(rows, _PROGRAMS), blocks[1]) * blocks[1]
        programs = ceil_div(rows, per_program)
        parts = torch.empty((programs, 4), dtype=torch.float32, device=matrix.device)
        with on_device(matrix):
            launch(matrix_moments_kernel, (programs,), (matrix, parts), (rows, per_program, count), *blocks)
            mean, squares = finish_moments(parts, 1, 1, float(rows * count))
        ctx.save_for_backward(matrix, mean)
        ctx.count = count
        ctx.set_materialize_grads(False)
        return mean, squares, matrix.view_as(matrix)

    @staticmethod
    def backward(
        ctx: Any, d_mean: Tensor | None, d_squares: Tensor | None, d_matrix: Tensor | None
    ) -> tuple[Tensor | None, None]:
        if d_mean is None and d_squares is None:
            return d_matrix, None
        matrix, mean = ctx.saved_tensors
        d_squares = torch.zeros_like(mean) if d_squares is None else d_squares
        if torch.is_grad_enabled():

            def call(matrix: Tensor) -> Tensor:
                found, _ = matrix_products.moments(matrix, ctx.count)
                return (found.squares * d_squares).sum() + (0 if d_mean is None else (found.mean * d_mean).sum())

            (through,) = differentiable(call, (matrix,), None)
            return through if d_matrix is None else d_matrix + through, None
        received = matrix if d_matrix is None else d_matrix.contiguous()
        others = mean, mean if d_mean is None else d_mean, d_squares, received
        rows, blocks = _blocks(matrix)
        output = torch.empty_like(matrix)
        with on_device(matrix):
            launch(
                matrix_moments_backward_kernel, (ceil_div(rows, blocks[1]),), (matrix, *others, output),
                (rows, ctx.count, float(rows * ctx.count)), *blocks, d_mean is not None, d_matrix is not None,
            )  # fmt: skip
        return output, None
