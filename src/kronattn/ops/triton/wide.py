"""What wide layers do to their materialised coefficients between PyTorch's matrix products, in one pass each.

The same functions as in :mod:`kronattn.ops.matrix_products`, for eager code; the compiler fuses those by itself. With
them the head of DeepLabV2 launches 68 times in training, with these 37; launching is most of what it takes its host
(``results/stages-h200.json``).
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
from kronattn.ops.triton.moments import finish_moments
from kronattn.ops.triton.tuning import ceil_div, power_of_two

__all__ = ["centred", "moments", "softmax"]

# Elements of a program's tile, and programs that read a whole matrix.
_TILE = 4096
_PROGRAMS = 528


def centred(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """As :func:`kronattn.ops.matrix_products.centred`."""
    return _Centred.apply(keys, dtype) if _records(keys) else _centre_keys(keys, dtype)


def moments(matrix: Tensor, count: int) -> tuple[Moments, Tensor]:
    """As :func:`kronattn.ops.matrix_products.moments`."""
    mean, squares, matrix = _Moments.apply(matrix, count)
    return Moments(matrix.shape[0] * matrix.shape[1] * count, mean, squares), matrix


def softmax(matrix: Tensor, count: int) -> Tensor:
    """As :func:`kronattn.ops.matrix_products.softmax`."""
    return _Softmax.apply(matrix, count) if _records(matrix) else _softmax(matrix, count)[..., :count]


def _records(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


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
def load_matrix_rows(matrix, b_r, last, b_k, stride, width):
    """(rows, columns) in float32; zero past the end."""
    b_mask = (b_r < last)[:, None] & (b_k < width)[None, :]
    return tl.load(matrix + b_r[:, None] * stride + b_k[None, :], mask=b_mask, other=0.0).to(tl.float32)


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
        b_e = load_matrix_rows(matrix, b_r, last, b_k, M, M)
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
    slope = 2.0 * tl.load(d_squares)
    level = -slope * tl.load(mean)
    if HAS_D_MEAN:
        level += tl.load(d_mean) / members
    b_e = load_matrix_rows(matrix, b_r, rows, b_k, M, M)
    b_shared = tl.where((b_k == count)[None, :], (b_e * slope + level) * count, 0.0)
    b_d = tl.where((b_k < count)[None, :], b_e * slope, b_shared)
    if HAS_D_MATRIX:
        b_d += load_matrix_rows(d_matrix, b_r, rows, b_k, M, M)
    b_mask = (b_r < rows)[:, None] & (b_k < M)[None, :]
    tl.store(output + b_r[:, None] * M + b_k[None, :], b_d.to(output.dtype.element_ty), mask=b_mask)


@triton.jit
def softmax_kernel(matrix, output, rows, count, M: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    b_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    b_k = tl.arange(0, BK)
    b_e = load_matrix_rows(matrix, b_r, rows, b_k, M, M)
    b_e = tl.where((b_k < count)[None, :], b_e, float("-inf"))
    b_a = tl.exp(b_e - tl.max(b_e, axis=1)[:, None])
    b_a = b_a / tl.sum(b_a, axis=1)[:, None]
    b_mask = (b_r < rows)[:, None] & (b_k < M)[None, :]
    tl.store(output + b_r[:, None] * M + b_k[None, :], b_a.to(output.dtype.element_ty), mask=b_mask)


@triton.jit
def softmax_backward_kernel(
    softmax, d_softmax, output, rows, count, d_stride, M: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    b_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    b_k = tl.arange(0, BK)
    b_a = load_matrix_rows(softmax, b_r, rows, b_k, M, M)
    b_da = load_matrix_rows(d_softmax, b_r, rows, b_k, d_stride, count)
    b_d = b_a * (b_da - tl.sum(b_a * b_da, axis=1)[:, None])
    b_mask = (b_r < rows)[:, None] & (b_k < M)[None, :]
    tl.store(output + b_r[:, None] * M + b_k[None, :], b_d.to(output.dtype.element_ty), mask=b_mask)


def _blocks(matrix: Tensor) -> tuple[int, int, int]:
    """Columns, and how many rows and columns a program takes at a time."""
    width = matrix.shape[-1]
    block = max(16, power_of_two(width))
    return width, max(1, _TILE // block), block


def _centre(x: Tensor, output: Tensor, count: int, *, backward: bool) -> Tensor:
    batch, channels = x.shape[0], x.shape[2]
    block = min(64, power_of_two(channels))
    padded = x.shape[1] if backward else output.shape[1]
    with on_device(x):
        launch(
            centre_kernel, (batch, ceil_div(channels, block)), (x, output), (*x.stride(), count, padded),
            channels, 32, block, backward,
        )  # fmt: skip
    return output


def _centre_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    batch, count, channels = keys.shape
    rows = torch.empty((batch, matrix_products.padded(count), channels), dtype=dtype, device=keys.device)
    return _centre(keys, rows, count, backward=False)


def _softmax(matrix: Tensor, count: int) -> Tensor:
    width, block_rows, block = _blocks(matrix)
    rows, output = matrix.numel() // width, torch.empty_like(matrix)
    with on_device(matrix):
        tensors = matrix, output
        launch(softmax_kernel, (ceil_div(rows, block_rows),), tensors, (rows, count), width, block_rows, block)
    return output


class _Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.count, ctx.dtype = keys.shape[1], keys.dtype
        return _centre_keys(keys, dtype)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            d_keys = d_rows[:, : ctx.count] + d_rows[:, ctx.count :][:, :1] / ctx.count
            return (d_keys - d_rows[:, : ctx.count].mean(dim=1, keepdim=True)).to(ctx.dtype), None
        d_keys = torch.empty((d_rows.shape[0], ctx.count, d_rows.shape[2]), dtype=ctx.dtype, device=d_rows.device)
        return _centre(d_rows, d_keys, ctx.count, backward=True), None


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        width, block_rows, block = _blocks(matrix)
        rows = matrix.numel() // width
        per_program = ceil_div(ceil_div(rows, _PROGRAMS), block_rows) * block_rows
        programs = ceil_div(rows, per_program)
        parts = torch.empty((programs, 4), dtype=torch.float32, device=matrix.device)
        with on_device(matrix):
            launch(
                matrix_moments_kernel, (programs,), (matrix, parts), (rows, per_program, count),
                width, block_rows, block,
            )  # fmt: skip
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
            leaf = matrix.view_as(matrix) if matrix.requires_grad else matrix.detach().requires_grad_()
            found, _ = matrix_products.moments(leaf, ctx.count)
            total = (found.squares * d_squares).sum() + (0 if d_mean is None else (found.mean * d_mean).sum())
            (through,) = torch.autograd.grad(total, leaf, create_graph=True)
            return through if d_matrix is None else d_matrix + through, None
        width, block_rows, block = _blocks(matrix)
        rows, output = matrix.numel() // width, torch.empty_like(matrix)
        received = matrix if d_matrix is None else d_matrix.contiguous()
        with on_device(matrix):
            launch(
                matrix_moments_backward_kernel, (ceil_div(rows, block_rows),),
                (matrix, mean, mean if d_mean is None else d_mean, d_squares, received, output),
                (rows, ctx.count, float(rows * ctx.count)),
                width, block_rows, block, d_mean is not None, d_matrix is not None,
            )  # fmt: skip
        return output, None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, count: int) -> Tensor:
        output = _softmax(matrix, count)
        ctx.save_for_backward(matrix, output)
        return output[..., :count]

    @staticmethod
    def backward(ctx: Any, d_softmax: Tensor) -> tuple[Tensor, None]:
        matrix, output = ctx.saved_tensors
        if torch.is_grad_enabled():
            leaf = matrix.view_as(matrix) if matrix.requires_grad else matrix.detach().requires_grad_()
            y = matrix_products.softmax(leaf, d_softmax.shape[-1])
            return torch.autograd.grad(y, leaf, d_softmax, create_graph=True)[0], None
        width, block_rows, block = _blocks(matrix)
        rows, d_matrix = matrix.numel() // width, torch.empty_like(matrix)
        d_softmax = d_softmax.contiguous()
        with on_device(matrix):
            launch(
                softmax_backward_kernel, (ceil_div(rows, block_rows),), (output, d_softmax, d_matrix),
                (rows, d_softmax.shape[-1], d_softmax.shape[-1]), width, block_rows, block,
            )  # fmt: skip
        return d_matrix, None
