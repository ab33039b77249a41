"""The norm of the coefficients from their moments, multiplied into the keys, in one launch where PyTorch takes ten.

Batch statistics, running statistics and the scale are a few numbers a head: in eager code launching their arithmetic,
operator by operator, took half of a layer's time in training (NVIDIA H200, torch 2.11). Here every
program works the scale out for itself and multiplies its rows by it; the first one moves the running statistics on.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.blocks import launch
from kronattn.ops.triton.tuning import ceil_div, power_of_two

__all__ = ["coefficient_scale", "finish_normalise_backward", "normalise_backward", "normalise_forward"]

# Elements of a program's tile; rows of it are a head's channels, or a block of them.
_TILE = 4096
_WIDEST = 1024


@triton.jit
def coefficient_scale(
    weight, mean, squares, running_mean, running_var, batches, inverse, head, members, eps, momentum,
    BATCH: tl.constexpr,
):  # fmt: skip
    """weight / √(variance + eps) of one head; the variance is the batch's, or the running one."""
    variance = tl.load(squares + head) / members if BATCH else tl.load(running_var + head).to(tl.float32)
    # As PyTorch computes it: the GPU's own reciprocal root is an approximation.
    root = 1.0 / tl.sqrt(variance + eps)
    scale = root * tl.load(weight + head).to(tl.float32)
    # Two conditions: the first is known when the kernel is compiled, and what it guards then goes.
    if BATCH:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(inverse + head, root)
            old = tl.load(running_mean + head).to(tl.float32)
            new = old + momentum * (tl.load(mean + head) - old)
            tl.store(running_mean + head, new.to(running_mean.dtype.element_ty))
            old = tl.load(running_var + head).to(tl.float32)
            new = old + momentum * (tl.load(squares + head) / (members - 1.0) - old)
            tl.store(running_var + head, new.to(running_var.dtype.element_ty))
            if head == 0:
                tl.store(batches, tl.load(batches) + 1)
    return scale


@triton.jit
def normalise_kernel(
    x, output, weight, mean, squares, running_mean, running_var, batches, inverse,
    rows, members, eps, momentum,
    H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """output = x · scale for BR rows of one head."""
    head = tl.program_id(1)
    scale = coefficient_scale(
        weight, mean, squares, running_mean, running_var, batches, inverse, head, members, eps, momentum, BATCH
    )  # fmt: skip
    b_r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    for start in tl.static_range(0, D, BD):
        b_d = start + tl.arange(0, BD)
        b_mask = (b_r < rows)[:, None] & (b_d < D)[None, :]
        b_at = b_r[:, None] * (H * D) + head * D + b_d[None, :]
        b_x = tl.load(x + b_at, mask=b_mask, other=0.0).to(tl.float32)
        tl.store(output + b_at, (b_x * scale).to(output.dtype.element_ty), mask=b_mask)


@triton.jit
def normalise_backward_kernel(
    x, d_y, weight, inverse, d_x, parts, rows,
    H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """d_x = d_y · scale, and each program's part (programs, H) of the scale's gradient."""
    head = tl.program_id(1)
    scale = tl.load(inverse + head) * tl.load(weight + head).to(tl.float32)
    b_r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    b_sum = tl.zeros([BR], tl.float32)
    for start in tl.static_range(0, D, BD):
        b_d = start + tl.arange(0, BD)
        b_mask = (b_r < rows)[:, None] & (b_d < D)[None, :]
        b_at = b_r[:, None] * (H * D) + head * D + b_d[None, :]
        b_dy = tl.load(d_y + b_at, mask=b_mask, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_dy * tl.load(x + b_at, mask=b_mask, other=0.0).to(tl.float32), axis=1)
        tl.store(d_x + b_at, (b_dy * scale).to(d_x.dtype.element_ty), mask=b_mask)
    tl.store(parts + tl.program_id(0) * H + head, tl.sum(b_sum, axis=0))


@triton.jit
def finish_normalise_backward_kernel(
    parts, weight, inverse, d_squares, d_weight, count, members, H: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The gradients of a head's squared deviations and weight from ``count`` parts of its scale's gradient."""
    head = tl.program_id(0)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        b_i = start + tl.arange(0, BLOCK)
        b_sum += tl.load(parts + b_i * H + head, mask=b_i < count, other=0.0)
    d_scale = tl.sum(b_sum, axis=0)
    root = tl.load(inverse + head)
    tl.store(d_weight + head, (d_scale * root).to(d_weight.dtype.element_ty))
    slope = -0.5 * root * root * root / members
    tl.store(d_squares + head, d_scale * tl.load(weight + head).to(tl.float32) * slope)


def normalise_forward(
    x: Tensor, weight: Tensor, moments: tuple[Tensor, Tensor, float] | None,
    running: tuple[Tensor, Tensor, Tensor], eps: float, momentum: float, num_heads: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply the keys so that the coefficients are normed.

    Args:
        x: (N, S, C) keys, contiguous.
        weight: (num_heads,), as what follows but for the last: what the norm multiplies by.
        moments: mean and squared deviations of the batch's coefficients, in float32, and how many there are. Without
            them the running statistics are used, and left as they are.
        running: mean, variance, and number of batches.

    Returns:
        (N, S, C) in ``x``'s dtype, and 1 / deviation of the batch for each head.
    """
    rows, blocks = _blocks(x, num_heads)
    mean, squares, members = (weight, weight, 1.0) if moments is None else moments
    output, inverse = torch.empty_like(x), torch.empty((num_heads,), dtype=torch.float32, device=x.device)
    launch(
        normalise_kernel, (ceil_div(rows, blocks[0]), num_heads),
        (x, output, weight, mean, squares, *running, inverse), (rows, float(members), eps, momentum),
        num_heads, x.shape[-1] // num_heads, *blocks, moments is not None,
    )  # fmt: skip
    return output, inverse


def normalise_backward(
    x: Tensor, d_y: Tensor, weight: Tensor, inverse: Tensor, members: float, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x``, the squared deviations and the weight."""
    rows, blocks = _blocks(x, num_heads)
    programs = ceil_div(rows, blocks[0])
    d_x = torch.empty_like(x)
    parts = torch.empty((programs, num_heads), dtype=torch.float32, device=x.device)
    launch(
        normalise_backward_kernel, (programs, num_heads),
        (x, d_y, weight, inverse, d_x, parts), (rows,), num_heads, x.shape[-1] // num_heads, *blocks,
    )  # fmt: skip
    return d_x, *finish_normalise_backward(parts, weight, inverse, members)


def finish_normalise_backward(parts: Tensor, weight: Tensor, inverse: Tensor, members: float) -> tuple[Tensor, Tensor]:
    """Gradients of the squared deviations and the weight from (programs, num_heads) parts of the scale's gradient."""
    programs, num_heads = parts.shape
    d_squares, d_weight = torch.empty_like(inverse), torch.empty_like(weight)
    launch(
        finish_normalise_backward_kernel, (num_heads,),
        (parts, weight, inverse, d_squares, d_weight), (programs, float(members)), num_heads, 1024,
    )  # fmt: skip
    return d_squares, d_weight


def _blocks(x: Tensor, num_heads: int) -> tuple[int, tuple[int, int]]:
    """Rows of ``x``, and how many of them and of a head's channels a program takes at a time."""
    channels = x.shape[-1]
    wide = min(_WIDEST, power_of_two(channels // num_heads))
    return x.numel() // channels, (_TILE // wide, wide)
