"""What the kernels share: how they are launched, where a tile lies in memory, a matrix product that is right
everywhere, and sums of what programs wrote.

A grid tensor (N, C, *grid) is read as (sample, position, channel) with three strides, so that channels-last and
contiguous tensors need no copy. Tokens (the averages, and what they receive) are (N, S, C) with channels side by
side.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: RET505 (a kernel's compile-time branches must both be branches)
from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.tuning import ceil_div

__all__ = [
    "LOG2E",
    "TRITON_DTYPES",
    "grid_offsets",
    "head_of_grid",
    "head_of_tokens",
    "launch",
    "load_positions",
    "load_tokens",
    "matmul",
    "parts_like",
    "place_of_program",
    "probe",
    "sum_parts",
    "token_offsets",
]

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# exp2 is the GPU's own exponential; logits are multiplied by this before it.
LOG2E = tl.constexpr(1.4426950408889634)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


# Sizes that differ from call to call (a detector's images, say) must not fill the memory.
_MOST_KINDS = 8192
_starters: dict[Any, Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor, ...], numbers: tuple[float, ...], *constants: Any,
    **options: Any,
) -> None:  # fmt: skip
    """``kernel[grid](*tensors, *numbers, *constants, **options)``, from the second time on without asking Triton which
    compiled kernel to start.

    ``kernel[grid](...)`` looks at every argument to find the kernel that was compiled for its like. What it gives back
    is that compiled kernel, and ``compiled[grid](...)`` starts it straight away: the way of Triton's own tutorial on
    fused softmax. Sizes repeat from step to step, so the second call is found by its numbers as they are. On an NVIDIA
    H200's host a launch of 24 arguments took 28 µs instead of 36.

    Args:
        kernel: decorated by ``triton.jit``, with its parameters in this order.
        grid: one to three numbers of programs.
        tensors: on the current device.
        numbers: that the kernel takes as they come.
        constants: that it is compiled for.
        options: ``num_warps`` and the like.
    """
    if _INTERPRETED.value:
        kernel[grid](*tensors, *numbers, *constants, **options)
        return
    # Triton compiles anew for other dtypes, and for pointers that are not multiples of 16 bytes.
    kinds = [(x.dtype, x.data_ptr() % 16) for x in tensors]
    key = (id(kernel), tensors[0].get_device(), grid, *kinds, numbers, constants, *options.values())
    start = _starters.get(key)
    if start is not None:
        start(*tensors, *numbers, *constants)
        return
    if len(_starters) >= _MOST_KINDS:
        _starters.clear()
    _starters[key] = kernel[grid](*tensors, *numbers, *constants, **options)[(*grid, 1, 1)[:3]]


@triton.jit
def matmul(a, b, PRECISION: tl.constexpr):
    """a @ b with float32 accumulation."""
    if _INTERPRETED:
        # The interpreter multiplies bfloat16 as if it were integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def grid_offsets(positions, channels, stride_p, stride_c, LAST: tl.constexpr, ALIGN: tl.constexpr):
    """Offsets of a (positions, channels) tile within a sample.

    Strides other than 1 come divided by ALIGN, so that the compiler knows that they are multiples of it and
    loads several elements at once, also where they are not multiples of 16.
    """
    if LAST:
        return positions[:, None] * (stride_p * ALIGN) + channels[None, :]
    return positions[:, None] * stride_p + channels[None, :] * (stride_c * ALIGN)


@triton.jit
def token_offsets(tokens, channels, C: tl.constexpr):
    """Offsets of a (tokens, channels) tile within a sample's tokens."""
    return tokens[:, None] * C + channels[None, :]


@triton.jit
def place_of_program(splits, per_split, positions, H: tl.constexpr):
    """Sample, head, and first and last position of a program's range, where each head's positions are cut in splits."""
    nh = tl.program_id(0) // splits
    first = (tl.program_id(0) % splits) * per_split
    return (nh // H).to(tl.int64), nh % H, first, tl.minimum(first + per_split, positions)


@triton.jit
def head_of_grid(x, n, head, stride_n, stride_c, D: tl.constexpr, LAST: tl.constexpr, ALIGN: tl.constexpr):
    """Where a head's channels of one sample begin; strides as in :func:`grid_offsets`."""
    return x + n * stride_n * ALIGN + (head * D if LAST else head * D * stride_c * ALIGN)


@triton.jit
def head_of_tokens(tokens, n, head, count, H: tl.constexpr, D: tl.constexpr):
    """The same of (N, count, H · D) tokens."""
    return tokens + n * count * (H * D) + head * D


@triton.jit
def load_positions(
    x, b_m, last, b_d, stride_p, stride_c, D: tl.constexpr, LAST: tl.constexpr, ALIGN: tl.constexpr, DT: tl.constexpr
):  # fmt: skip
    """(positions, channels) of one sample and head in dtype DT; zero past the end."""
    p_x = x + grid_offsets(b_m, b_d, stride_p, stride_c, LAST, ALIGN)
    return tl.load(p_x, mask=(b_m < last)[:, None] & (b_d < D)[None, :], other=0.0).to(DT)


@triton.jit
def load_tokens(
    tokens, b_s, b_d, count, C: tl.constexpr, D: tl.constexpr, DT: tl.constexpr, EVEN: tl.constexpr = False
):  # fmt: skip
    """A (tokens, channels) tile of one head in dtype DT; zero past the end. With EVEN there are as many tokens: where
    channels come out even too, nothing is masked."""
    p_tokens = tokens + token_offsets(b_s, b_d, C)
    if EVEN and b_d.shape[0] == D:
        return tl.load(p_tokens).to(DT)
    else:
        return tl.load(p_tokens, mask=(b_s < count)[:, None] & (b_d < D)[None, :], other=0.0).to(DT)


def parts_like(splits: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where programs write their parts of ``count`` sums: (splits, count), in float32 unless there is one part each."""
    return torch.empty((splits, count), dtype=dtype if splits == 1 else torch.float32, device=device)


@triton.jit
def sum_parts_kernel(
    parts, addend, output, splits, count, HAS_ADDEND: tl.constexpr, BP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    b_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_in = b_i < count
    b_parts = tl.zeros([BP, BLOCK], tl.float32)
    for start in range(0, splits, BP):
        b_p = start + tl.arange(0, BP)
        p_part = parts + b_p.to(tl.int64)[:, None] * count + b_i[None, :]
        b_parts += tl.load(p_part, mask=(b_p < splits)[:, None] & b_in[None, :], other=0.0).to(tl.float32)
    b_sum = tl.sum(b_parts, axis=0)
    if HAS_ADDEND:
        b_sum += tl.load(addend + b_i, mask=b_in, other=0.0).to(tl.float32)
    tl.store(output + b_i, b_sum.to(output.dtype.element_ty), mask=b_in)


def sum_parts(parts: Tensor, dtype: torch.dtype, addend: Tensor | None = None, *, at_once: int = 1) -> Tensor:
    """(splits, count) parts added up in a fixed order, plus a contiguous ``addend`` of as many elements.

    A program adds up one part after the other, or where they are many so many ``at_once``, of fewer elements.
    """
    splits, count = parts.shape
    if splits == 1 and addend is None and parts.dtype == dtype:
        return parts[0]
    output = torch.empty((count,), dtype=dtype, device=parts.device)
    tensors = parts, parts if addend is None else addend, output
    block = max(32, 1024 // at_once)
    launch(sum_parts_kernel, (ceil_div(count, block),), tensors, (splits, count), addend is not None, at_once, block)
    return output


@triton.jit
def probe_kernel(x):
    tl.store(x, tl.load(x) + 1)


def probe() -> None:
    """Run the smallest kernel there is: whether Triton works on this machine. Raises whatever goes wrong."""
    x = torch.zeros(1, device="cuda")
    probe_kernel[(1,)](x)
    if x.item() != 1:
        raise RuntimeError("a kernel ran and gave a wrong result")
