"""The norm of the coefficients from their moments, multiplied into the keys, in one launch where PyTorch takes ten; or
into materialised coefficients, whose softmax is taken too.

Batch statistics, running statistics and the scale are a few numbers a head: in eager code launching their arithmetic,
operator by operator, took half of a layer's time in training (NVIDIA H200, torch 2.11). Here every
program works the scale out for itself and multiplies its rows by it; the first one moves the running statistics on.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops import matrix_products, torch_backend
from kronattn.ops.coefficients import Moments
from kronattn.ops.triton.blocks import launch
from kronattn.ops.triton.layout import on_device
from kronattn.ops.triton.operators import differentiable
from kronattn.ops.triton.tuning import ceil_div, power_of_two

__all__ = ["normalise"]

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
    rows, count, members, eps, momentum,
    H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BATCH: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """output = x · scale for BR rows of one head; with SOFTMAX, the softmax of a row's first ``count``, then zeros."""
    head = tl.program_id(1)
    scale = coefficient_scale(
        weight, mean, squares, running_mean, running_var, batches, inverse, head, members, eps, momentum, BATCH
    )  # fmt: skip
    b_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    for start in tl.static_range(0, D, BD):
        b_d = start + tl.arange(0, BD)
        b_mask = (b_r < rows)[:, None] & (b_d < D)[None, :]
        b_at = b_r[:, None] * (H * D) + head * D + b_d[None, :]
        b_y = tl.load(x + b_at, mask=b_mask, other=0.0).to(tl.float32) * scale
        if SOFTMAX:
            b_y = tl.where((b_d < count)[None, :], b_y, float("-inf"))
            b_y = tl.exp(b_y - tl.max(b_y, axis=1)[:, None])
            b_y = b_y / tl.sum(b_y, axis=1)[:, None]
        tl.store(output + b_at, b_y.to(output.dtype.element_ty), mask=b_mask)


@triton.jit
def normalise_backward_kernel(
    x, softmax, d_y, weight, inverse, d_x, parts, rows, count,
    H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """d_x = d_y · scale, and each program's part (programs, H) of the scale's gradient; d_y is that of the softmax's
    input, or with SOFTMAX of its ``count`` outputs."""
    head = tl.program_id(1)
    scale = tl.load(inverse + head) * tl.load(weight + head).to(tl.float32)
    b_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    b_sum = tl.zeros([BR], tl.float32)
    for start in tl.static_range(0, D, BD):
        b_d = start + tl.arange(0, BD)
        b_mask = (b_r < rows)[:, None] & (b_d < D)[None, :]
        b_at = b_r[:, None] * (H * D) + head * D + b_d[None, :]
        if SOFTMAX:
            b_given = b_mask & (b_d < count)[None, :]
            b_dy = tl.load(d_y + b_r[:, None] * count + b_d[None, :], mask=b_given, other=0.0).to(tl.float32)
            b_a = tl.load(softmax + b_at, mask=b_mask, other=0.0).to(tl.float32)
            b_dy = b_a * (b_dy - tl.sum(b_a * b_dy, axis=1)[:, None])
        else:
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
    running: tuple[Tensor, Tensor, Tensor], eps: float, momentum: float, num_heads: int, softmax_of: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply the keys so that the coefficients are normed.

    Args:
        x: (N, S, C) keys, contiguous; or (N, m, M) materialised coefficients of one head.
        weight: (num_heads,), as what follows but for the last: what the norm multiplies by.
        moments: mean and squared deviations of the batch's coefficients, in float32, and how many there are. Without
            them the running statistics are used, and left as they are.
        running: mean, variance, and number of batches.
        softmax_of: how many keys materialised coefficients are of.

    Returns:
        Like ``x``, and 1 / deviation of the batch for each head.
    """
    rows, *blocks = _blocks(x, num_heads, softmax_of)
    mean, squares, members = (weight, weight, 1.0) if moments is None else moments
    output, inverse = torch.empty_like(x), torch.empty((num_heads,), dtype=torch.float32, device=x.device)
    launch(
        normalise_kernel, (ceil_div(rows, blocks[1]), num_heads),
        (x, output, weight, mean, squares, *running, inverse),
        (rows, softmax_of or 0, float(members), eps, momentum),
        num_heads, *blocks, moments is not None, softmax_of is not None,
    )  # fmt: skip
    return output, inverse


def normalise_backward(
    x: Tensor, y: Tensor, d_y: Tensor, weight: Tensor, inverse: Tensor, members: float, num_heads: int,
    softmax_of: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``x``, the squared deviations and the weight; ``y`` is the forward's output."""
    rows, *blocks = _blocks(x, num_heads, softmax_of)
    programs = ceil_div(rows, blocks[1])
    d_x, d_squares, d_weight = torch.empty_like(x), torch.empty_like(inverse), torch.empty_like(weight)
    parts = torch.empty((programs, num_heads), dtype=torch.float32, device=x.device)
    launch(
        normalise_backward_kernel, (programs, num_heads),
        (x, y, d_y, weight, inverse, d_x, parts), (rows, softmax_of or 0),
        num_heads, *blocks, softmax_of is not None,
    )  # fmt: skip
    launch(
        finish_normalise_backward_kernel, (num_heads,),
        (parts, weight, inverse, d_squares, d_weight), (programs, float(members)), num_heads, 1024,
    )  # fmt: skip
    return d_x, d_squares, d_weight


def _blocks(x: Tensor, num_heads: int, softmax_of: int | None) -> tuple[int, int, int, int]:
    """Rows of ``x`` and channels of a head, and how many of both a program takes at a time; a softmax needs all."""
    head = x.shape[-1] // num_heads
    wide = power_of_two(head) if softmax_of else min(_WIDEST, power_of_two(head))
    return x.numel() // x.shape[-1], head, max(1, _TILE // wide), wide


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, squares: Tensor, weight: Tensor, mean: Tensor, members: int,
        running: tuple[Tensor, Tensor, Tensor], eps: float, momentum: float, *kind: Any,
    ) -> Tensor:  # fmt: skip
        read, softmax_of = x.contiguous(), kind[1]
        with on_device(x):
            y, inverse = normalise_forward(read, weight, (mean, squares, members), running, eps, momentum, *kind)
        ctx.save_for_backward(x, squares, weight, inverse, read, read if softmax_of is None else y)
        ctx.members, ctx.eps, ctx.kind = members, eps, kind
        return y if softmax_of is None else y[..., :softmax_of]

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        x, squares, weight, inverse, read, y = ctx.saved_tensors
        if torch.is_grad_enabled():
            num_heads, softmax_of = ctx.kind

            def call(x: Tensor, squares: Tensor, weight: Tensor) -> Tensor:
                scale = torch.rsqrt(squares / ctx.members + ctx.eps) * weight
                y = torch_backend.scaled(x, scale, num_heads).to(x.dtype)
                return y if softmax_of is None else matrix_products.softmax(y, softmax_of)

            gradients: Any = differentiable(call, (x, squares, weight), d_y)
        else:
            with on_device(x):
                gradients = normalise_backward(read, y, d_y.contiguous(), weight, inverse, ctx.members, *ctx.kind)
        return *gradients, *(None,) * 7


def normalise(
    x: Tensor, weight: Tensor, moments: Moments | None, running: tuple[Tensor, Tensor, Tensor], *,
    eps: float, momentum: float, num_heads: int = 1, softmax_of: int | None = None,
) -> Tensor:  # fmt: skip
    """(N, S, C) keys with the norm of the coefficients multiplied in; or (N, m, softmax_of), the softmax of normed
    materialised coefficients.

    No operator of PyTorch's, because it changes the ``running`` mean, variance and number of batches: for eager code
    alone. The compiler makes one kernel of the norm's arithmetic by itself.
    """
    settings = running, eps, momentum, num_heads, softmax_of
    if moments is not None:
        return _Normalise.apply(x, moments.squares, weight, moments.mean, moments.members, *settings)
    with on_device(x):
        y, _ = normalise_forward(x.contiguous(), weight, None, *settings)
    return y if softmax_of is None else y[..., :softmax_of]
