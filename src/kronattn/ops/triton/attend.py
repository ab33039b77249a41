"""The last stage of KAO_KV: attention of every position of a grid to a list of keys.

The keys are few: up to a block of them stay on the chip while positions stream past, so the grid is read once and
written once. Longer lists are walked through with an online softmax.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: RET505 (a kernel's compile-time branches must both be branches)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.blocks import (
    LOG2E,
    TRITON_DTYPES,
    grid_offsets,
    head_of_grid,
    head_of_tokens,
    launch,
    load_positions,
    load_tokens,
    matmul,
    place_of_program,
    token_offsets,
)  # fmt: skip
from kronattn.ops.triton.layout import alignment, empty_like_grid, flat
from kronattn.ops.triton.tuning import AttendBlocks, attend_blocks, dot_precision

__all__ = ["attend_forward", "coefficients", "load_bias", "load_block", "logits"]


@triton.jit
def load_bias(bias, b_s, count, HAS_BIAS: tl.constexpr):
    """What is added to each key's logits, times log2(e): its bias, or -inf past the last key."""
    if HAS_BIAS:
        b_bias = tl.load(bias + b_s, mask=b_s < count, other=0.0).to(tl.float32) * LOG2E
    else:
        b_bias = tl.zeros_like(b_s).to(tl.float32)
    return tl.where(b_s < count, b_bias, float("-inf"))


@triton.jit
def logits(b_q, b_k, b_bias, PRECISION: tl.constexpr):
    """log2(e) · (QKᵀ + bias) in float32: (queries, keys)."""
    return matmul(b_q, tl.trans(b_k), PRECISION) * LOG2E + b_bias[None, :]


@triton.jit
def coefficients(b_q, b_k, b_bias, PRECISION: tl.constexpr):
    """Softmax(QKᵀ + bias) over all keys at once, in float32: (queries, keys), times each query's factor.

    The factor is returned beside it: multiplied into the product with the values, it costs less.
    """
    b_logits = logits(b_q, b_k, b_bias, PRECISION)
    b_e = tl.exp2(b_logits - tl.max(b_logits, axis=1)[:, None])
    return b_e, 1.0 / tl.sum(b_e, axis=1)


@triton.jit
def load_block(
    tokens, start, b_s, b_d, count, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """One block of a long list of tokens; without a mask where blocks and channels come out even."""
    if EVEN and D == BD:
        return tl.load(tokens + token_offsets(start + b_s, b_d, C)).to(DT)
    else:
        return load_tokens(tokens, start + b_s, b_d, count, C, D, DT)


@triton.jit
def attend_forward_kernel(
    query, keys, values, bias, residual, y, q_n, q_c, q_p, residual_n, residual_c, residual_p, y_n, y_c, y_p,
    positions, key_count, splits, per_split,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, ONE_BLOCK: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, Q_LAST: tl.constexpr, RESIDUAL_LAST: tl.constexpr, Y_LAST: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    n, head, first, last = place_of_program(splits, per_split, positions, H)
    b_d = tl.arange(0, BD)
    b_e = tl.arange(0, BDV)
    b_s = tl.arange(0, BS)
    query = head_of_grid(query, n, head, q_n, q_c, D, Q_LAST, ALIGN)
    residual = head_of_grid(residual, n, head, residual_n, residual_c, DV, RESIDUAL_LAST, ALIGN)
    y = head_of_grid(y, n, head, y_n, y_c, DV, Y_LAST, ALIGN)
    keys = head_of_tokens(keys, n, head, key_count, H, D)
    values = head_of_tokens(values, n, head, key_count, H, DV)
    bias += head * key_count
    if ONE_BLOCK:
        b_k = load_tokens(keys, b_s, b_d, key_count, H * D, D, DT)
        b_v = load_tokens(values, b_s, b_e, key_count, H * DV, DV, DT)
        b_bias = load_bias(bias, b_s, key_count, HAS_BIAS)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_q = load_positions(query, b_m, last, b_d, q_p, q_c, D, Q_LAST, ALIGN, DT)
        if ONE_BLOCK:
            b_a, b_factor = coefficients(b_q, b_k, b_bias, PRECISION)
            b_y = matmul(b_a.to(DT), b_v, PRECISION) * b_factor[:, None]
        else:
            b_max = tl.full([BM], float("-inf"), tl.float32)
            b_sum = tl.zeros([BM], tl.float32)
            b_y = tl.zeros([BM, BDV], tl.float32)
            for block in range(0, key_count, BS):
                b_k = load_block(keys, block, b_s, b_d, key_count, H * D, D, BD, EVEN, DT)
                b_v = load_block(values, block, b_s, b_e, key_count, H * DV, DV, BDV, EVEN, DT)
                b_logits = matmul(b_q, tl.trans(b_k), PRECISION) * LOG2E
                if HAS_BIAS or not EVEN:
                    b_logits += load_bias(bias, block + b_s, key_count, HAS_BIAS)[None, :]
                b_new = tl.maximum(b_max, tl.max(b_logits, axis=1))
                b_a = tl.exp2(b_logits - b_new[:, None])
                b_shrink = tl.exp2(b_max - b_new)
                b_sum = b_sum * b_shrink + tl.sum(b_a, axis=1)
                b_y = b_y * b_shrink[:, None] + matmul(b_a.to(DT), b_v, PRECISION)
                b_max = b_new
            b_y *= (1.0 / b_sum)[:, None]
        b_mask = (b_m < last)[:, None] & (b_e < DV)[None, :]
        if HAS_RESIDUAL:
            p_residual = residual + grid_offsets(b_m, b_e, residual_p, residual_c, RESIDUAL_LAST, ALIGN)
            b_y += tl.load(p_residual, mask=b_mask, other=0.0).to(tl.float32)
        tl.store(y + grid_offsets(b_m, b_e, y_p, y_c, Y_LAST, ALIGN), b_y.to(y.dtype.element_ty), mask=b_mask)


def attend_forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bias: Tensor | None,
    residual: Tensor | None,
    num_heads: int,
    *,
    blocks: AttendBlocks | None = None,
) -> Tensor:
    """Softmax(QKᵀ + bias)·V for every position, plus ``residual``.

    Args:
        query: (N, C, *grid).
        keys: (N, S, C), contiguous, in any floating dtype.
        values: (N, S, P), likewise.
        key_bias: (num_heads, S), contiguous.
        residual: (N, P, *grid).
        blocks: chosen by the sizes unless they are given.

    Returns:
        (N, P, *grid) in query's dtype and memory format.
    """
    query, q_strides = flat(query)
    batch, key_count, channels = keys.shape
    value_channels = values.shape[2]
    head, value_head = channels // num_heads, value_channels // num_heads
    positions = query.numel() // (batch * channels)
    y = empty_like_grid(query, value_channels, q_strides.channels_last)
    _, y_strides = flat(y)
    has_residual = residual is not None
    residual, residual_strides = (y, y_strides) if residual is None else flat(residual)
    align = alignment(q_strides, residual_strides, y_strides)
    blocks = blocks or attend_blocks(batch * num_heads, head, value_head, positions, key_count, query.element_size())
    launch(
        attend_forward_kernel, (batch * num_heads * blocks.splits,),
        (query, keys, values, keys if key_bias is None else key_bias, residual, y),
        (*q_strides.over(align), *residual_strides.over(align), *y_strides.over(align),
         positions, key_count, blocks.splits, blocks.per_split),
        num_heads, head, value_head, blocks.positions, blocks.keys, blocks.channels, blocks.value_channels,
        key_count <= blocks.keys, key_count % blocks.keys == 0, key_bias is not None, has_residual,
        q_strides.channels_last, residual_strides.channels_last, y_strides.channels_last, align,
        dot_precision(query.dtype), TRITON_DTYPES[query.dtype],
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return y
