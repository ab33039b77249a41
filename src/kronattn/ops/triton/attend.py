"""Attention of every position of a grid to a list of keys, forward and backward.

The keys are few: up to a block of them stay on the chip while positions stream past, so the grid is read once and
written once. Longer lists are walked through with a running softmax. The backward recomputes the coefficients;
gradients of keys and values are summed over positions in registers, each program's part is written down, and the
parts are added in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: RET505 (a kernel's compile-time branches must both be branches)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.blocks import LOG2E, grid_offsets, matmul, token_offsets
from kronattn.ops.triton.launch import empty, launch, recorded
from kronattn.ops.triton.layout import alignment, empty_like_grid, flat, flat_strides
from kronattn.ops.triton.rules import attend_backward_plan, attend_plan, dot_precision, itself_plan

__all__ = [
    "attend_backward",
    "attend_forward",
    "attend_itself_backward",
    "attend_tile",
    "coefficients",
    "load_bias",
    "load_tokens",
    "normed_scale",
    "token_gradient",
    "total",
]

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def load_tokens(tokens, b_s, b_d, count, C: tl.constexpr, D: tl.constexpr, DT: tl.constexpr):
    """A (tokens, channels) tile of one head in dtype DT; zero past the end."""
    b_mask = (b_s < count)[:, None] & (b_d < D)[None, :]
    return tl.load(tokens + token_offsets(b_s, b_d, C), mask=b_mask, other=0.0).to(DT)


@triton.jit
def normed_scale(scale, variance, gain, eps, head, HAS_NORM: tl.constexpr):
    """The scale of a head's logits with its batch norm multiplied in, where it has one."""
    if HAS_NORM:
        return scale * tl.load(gain + head).to(tl.float32) * tl.rsqrt(tl.load(variance + head).to(tl.float32) + eps)
    else:
        return scale


@triton.jit
def load_bias(bias, b_s, count, HAS_BIAS: tl.constexpr):
    """What is added to each key's logits, times log2(e): its bias, or -inf past the last key."""
    if HAS_BIAS:
        b_bias = tl.load(bias + b_s, mask=b_s < count, other=0.0).to(tl.float32) * LOG2E
    else:
        b_bias = tl.zeros_like(b_s).to(tl.float32)
    return tl.where(b_s < count, b_bias, float("-inf"))


@triton.jit
def coefficients(b_q, b_k, b_bias, scale, PRECISION: tl.constexpr):
    """Softmax(scale·QKᵀ + bias) over all keys at once, in float32: (queries, keys), times each query's factor.

    The factor is returned beside it: multiplied into the product with the values, it costs less.
    """
    b_logits = matmul(b_q, tl.trans(b_k), PRECISION) * (scale * LOG2E) + b_bias[None, :]
    b_e = tl.exp2(b_logits - tl.max(b_logits, axis=1)[:, None])
    return b_e, 1.0 / tl.sum(b_e, axis=1)


@triton.jit
def token_gradient(b_k, b_dt, b_bias, scale, PRECISION: tl.constexpr):
    """The gradient of tokens that are queries, keys and values at once, from that of what they receive."""
    DT: tl.constexpr = b_k.dtype
    b_a, b_factor = coefficients(b_k, b_k, b_bias, scale, PRECISION)
    b_a *= b_factor[:, None]
    b_da = matmul(b_dt, tl.trans(b_k), PRECISION)
    b_ds = (b_a * (b_da - tl.sum(b_a * b_da, axis=1)[:, None]) * scale).to(DT)
    b_dk = matmul(b_ds, b_k, PRECISION)
    b_dk += matmul(tl.trans(b_ds), b_k, PRECISION)
    b_dk += matmul(tl.trans(b_a.to(DT)), b_dt, PRECISION)
    return b_dk


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
def block_logits(
    b_q, b_k, bias, b_s, count, scale, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """log2(e) · (scale·QKᵀ + bias) for one block of keys."""
    b_logits = matmul(b_q, tl.trans(b_k), PRECISION) * (scale * LOG2E)
    if HAS_BIAS or not EVEN:
        b_logits += load_bias(bias, b_s, count, HAS_BIAS)[None, :]
    return b_logits


@triton.jit
def attend_tile(
    b_q,
    keys,
    values,
    bias,
    key_count,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a (BM, BD) tile of queries receives from all keys: (BM, BDV) in float32."""
    DT: tl.constexpr = b_q.dtype
    b_d = tl.arange(0, BD)
    b_e = tl.arange(0, BDV)
    b_s = tl.arange(0, BS)
    if ONE_BLOCK:
        b_k = load_tokens(keys, b_s, b_d, key_count, H * D, D, DT)
        b_v = b_k if SHARED else load_tokens(values, b_s, b_e, key_count, H * DV, DV, DT)
        b_a, b_factor = coefficients(b_q, b_k, load_bias(bias, b_s, key_count, HAS_BIAS), scale, PRECISION)
        return matmul(b_a.to(DT), b_v, PRECISION) * b_factor[:, None]
    else:
        b_max = tl.full([BM], float("-inf"), tl.float32)
        b_sum = tl.zeros([BM], tl.float32)
        b_y = tl.zeros([BM, BDV], tl.float32)
        for start in range(0, key_count, BS):
            b_k = load_block(keys, start, b_s, b_d, key_count, H * D, D, BD, EVEN, DT)
            b_v = b_k if SHARED else load_block(values, start, b_s, b_e, key_count, H * DV, DV, BDV, EVEN, DT)
            b_logits = block_logits(b_q, b_k, bias, start + b_s, key_count, scale, HAS_BIAS, EVEN, PRECISION)
            b_new = tl.maximum(b_max, tl.max(b_logits, axis=1))
            b_a = tl.exp2(b_logits - b_new[:, None])
            b_shrink = tl.exp2(b_max - b_new)
            b_sum = b_sum * b_shrink + tl.sum(b_a, axis=1)
            b_y = b_y * b_shrink[:, None] + matmul(b_a.to(DT), b_v, PRECISION)
            b_max = b_new
        return b_y * (1.0 / b_sum)[:, None]


@triton.jit
def attend_forward_kernel(
    query,
    keys,
    values,
    bias,
    variance,
    gain,
    added,
    y,
    q_n,
    q_c,
    q_p,
    added_n,
    added_c,
    added_p,
    y_n,
    y_c,
    y_p,
    positions,
    key_count,
    splits,
    per_split,
    scale,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    Q_LAST: tl.constexpr,
    ADDED_LAST: tl.constexpr,
    Y_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    DT: tl.constexpr,
):
    nh = tl.program_id(0) // splits
    n = (nh // H).to(tl.int64)
    head = nh % H
    first = (tl.program_id(0) % splits) * per_split
    last = tl.minimum(first + per_split, positions)

    b_d = tl.arange(0, BD)
    b_e = tl.arange(0, BDV)
    b_s = tl.arange(0, BS)
    query += n * q_n * ALIGN + (head * D if Q_LAST else head * D * q_c * ALIGN)
    added += n * added_n * ALIGN + (head * DV if ADDED_LAST else head * DV * added_c * ALIGN)
    y += n * y_n * ALIGN + (head * DV if Y_LAST else head * DV * y_c * ALIGN)
    keys += n * key_count * (H * D) + head * D
    values += n * key_count * (H * DV) + head * DV
    bias += head * key_count
    scale = normed_scale(scale, variance, gain, eps, head, HAS_NORM)
    if ONE_BLOCK:
        b_k = load_tokens(keys, b_s, b_d, key_count, H * D, D, DT)
        b_v = b_k if SHARED else load_tokens(values, b_s, b_e, key_count, H * DV, DV, DT)
        b_bias = load_bias(bias, b_s, key_count, HAS_BIAS)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_inside = (b_m < last)[:, None]
        p_q = query + grid_offsets(b_m, b_d, q_p, q_c, Q_LAST, ALIGN)
        b_q = tl.load(p_q, mask=b_inside & (b_d < D)[None, :], other=0.0).to(DT)
        if ONE_BLOCK:
            b_a, b_factor = coefficients(b_q, b_k, b_bias, scale, PRECISION)
            b_y = matmul(b_a.to(DT), b_v, PRECISION) * b_factor[:, None]
        else:
            b_y = attend_tile(
                b_q, keys, values, bias, key_count, scale,
                H, D, DV, BM, BS, BD, BDV, False, EVEN, SHARED, HAS_BIAS, PRECISION,
            )  # fmt: skip
        b_mask = b_inside & (b_e < DV)[None, :]
        if HAS_ADDED:
            p_added = added + grid_offsets(b_m, b_e, added_p, added_c, ADDED_LAST, ALIGN)
            b_y += tl.load(p_added, mask=b_mask, other=0.0).to(tl.float32)
        tl.store(y + grid_offsets(b_m, b_e, y_p, y_c, Y_LAST, ALIGN), b_y.to(y.dtype.element_ty), mask=b_mask)


@triton.jit
def attend_backward_kernel(
    query,
    keys,
    values,
    bias,
    d_y,
    d_query,
    d_keys,
    d_values,
    d_bias,
    q_n,
    q_c,
    q_p,
    dy_n,
    dy_c,
    dy_p,
    dq_n,
    dq_c,
    dq_p,
    positions,
    key_count,
    splits,
    per_split,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    Q_LAST: tl.constexpr,
    DY_LAST: tl.constexpr,
    DQ_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    DT: tl.constexpr,
):
    """All gradients at once, for keys that fit in one block; parts of the keys' gradients are (splits, N, S, C)."""
    split = tl.program_id(0) % splits
    nh = tl.program_id(0) // splits
    n = (nh // H).to(tl.int64)
    head = nh % H
    batch = (tl.num_programs(0) // splits // H).to(tl.int64)
    first = split * per_split
    last = tl.minimum(first + per_split, positions)

    b_d = tl.arange(0, BD)
    b_e = tl.arange(0, BDV)
    b_s = tl.arange(0, BS)
    query += n * q_n * ALIGN + (head * D if Q_LAST else head * D * q_c * ALIGN)
    d_query += n * dq_n * ALIGN + (head * D if DQ_LAST else head * D * dq_c * ALIGN)
    d_y += n * dy_n * ALIGN + (head * DV if DY_LAST else head * DV * dy_c * ALIGN)
    b_k = load_tokens(keys + n * key_count * (H * D) + head * D, b_s, b_d, key_count, H * D, D, DT)
    if SHARED:
        b_v = b_k
    else:
        b_v = load_tokens(values + n * key_count * (H * DV) + head * DV, b_s, b_e, key_count, H * DV, DV, DT)
    b_bias = load_bias(bias + head * key_count, b_s, key_count, HAS_BIAS)

    b_dk = tl.zeros([BS, BD], tl.float32)
    if not SHARED:
        b_dv = tl.zeros([BS, BDV], tl.float32)
    b_db = tl.zeros([BS], tl.float32)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_inside = (b_m < last)[:, None]
        p_q = query + grid_offsets(b_m, b_d, q_p, q_c, Q_LAST, ALIGN)
        b_q = tl.load(p_q, mask=b_inside & (b_d < D)[None, :], other=0.0).to(DT)
        p_dy = d_y + grid_offsets(b_m, b_e, dy_p, dy_c, DY_LAST, ALIGN)
        b_dy = tl.load(p_dy, mask=b_inside & (b_e < DV)[None, :], other=0.0).to(DT)
        b_a, b_factor = coefficients(b_q, b_k, b_bias, scale, PRECISION)
        b_a *= b_factor[:, None]
        b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
        b_ds = b_a * (b_da - tl.sum(b_a * b_da, axis=1)[:, None])
        if HAS_BIAS:
            b_db += tl.sum(b_ds, axis=0)
        b_ds = (b_ds * scale).to(DT)
        b_dq = matmul(b_ds, b_k, PRECISION)
        p_dq = d_query + grid_offsets(b_m, b_d, dq_p, dq_c, DQ_LAST, ALIGN)
        tl.store(p_dq, b_dq.to(d_query.dtype.element_ty), mask=b_inside & (b_d < D)[None, :])
        b_dk += matmul(tl.trans(b_ds), b_q, PRECISION)
        if SHARED:
            b_dk += matmul(tl.trans(b_a.to(DT)), b_dy, PRECISION)
        else:
            b_dv += matmul(tl.trans(b_a.to(DT)), b_dy, PRECISION)

    part = split * batch + n
    p_dk = d_keys + part * key_count * (H * D) + head * D + token_offsets(b_s, b_d, H * D)
    b_mask = (b_s < key_count)[:, None] & (b_d < D)[None, :]
    tl.store(p_dk, b_dk, mask=b_mask)
    if not SHARED:
        p_dv = d_values + part * key_count * (H * DV) + head * DV + token_offsets(b_s, b_e, H * DV)
        tl.store(p_dv, b_dv, mask=(b_s < key_count)[:, None] & (b_e < DV)[None, :])
    if HAS_BIAS:
        tl.store(d_bias + (part * H + head) * key_count + b_s, b_db, mask=b_s < key_count)


@triton.jit
def attend_backward_query_kernel(
    query,
    keys,
    values,
    bias,
    d_y,
    d_query,
    norms,
    deltas,
    q_n,
    q_c,
    q_p,
    dy_n,
    dy_c,
    dy_p,
    dq_n,
    dq_c,
    dq_p,
    positions,
    key_count,
    tiles,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    EVEN: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    Q_LAST: tl.constexpr,
    DY_LAST: tl.constexpr,
    DQ_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    DT: tl.constexpr,
):
    """The queries' gradient for a long list of keys, and what the keys' gradient needs to know of each query.

    ``norms`` receives log2 of each softmax's denominator, ``deltas`` the mean of its coefficients' gradients.
    """
    nh = tl.program_id(0) // tiles
    n = (nh // H).to(tl.int64)
    head = nh % H
    b_m = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    b_d = tl.arange(0, BD)
    b_e = tl.arange(0, BDV)
    b_s = tl.arange(0, BS)
    b_inside = (b_m < positions)[:, None]
    query += n * q_n * ALIGN + (head * D if Q_LAST else head * D * q_c * ALIGN)
    d_query += n * dq_n * ALIGN + (head * D if DQ_LAST else head * D * dq_c * ALIGN)
    d_y += n * dy_n * ALIGN + (head * DV if DY_LAST else head * DV * dy_c * ALIGN)
    keys += n * key_count * (H * D) + head * D
    values += n * key_count * (H * DV) + head * DV
    bias += head * key_count
    p_q = query + grid_offsets(b_m, b_d, q_p, q_c, Q_LAST, ALIGN)
    b_q = tl.load(p_q, mask=b_inside & (b_d < D)[None, :], other=0.0).to(DT)
    p_dy = d_y + grid_offsets(b_m, b_e, dy_p, dy_c, DY_LAST, ALIGN)
    b_dy = tl.load(p_dy, mask=b_inside & (b_e < DV)[None, :], other=0.0).to(DT)

    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_delta = tl.zeros([BM], tl.float32)
    for start in range(0, key_count, BS):
        b_k = load_block(keys, start, b_s, b_d, key_count, H * D, D, BD, EVEN, DT)
        b_v = b_k if SHARED else load_block(values, start, b_s, b_e, key_count, H * DV, DV, BDV, EVEN, DT)
        b_logits = block_logits(b_q, b_k, bias, start + b_s, key_count, scale, HAS_BIAS, EVEN, PRECISION)
        b_new = tl.maximum(b_max, tl.max(b_logits, axis=1))
        b_a = tl.exp2(b_logits - b_new[:, None])
        b_shrink = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_shrink + tl.sum(b_a, axis=1)
        b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
        b_delta = b_delta * b_shrink + tl.sum(b_a * b_da, axis=1)
        b_max = b_new
    b_norm = b_max + tl.log2(b_sum)
    b_delta = b_delta / b_sum
    b_rows = nh.to(tl.int64) * positions + b_m
    tl.store(norms + b_rows, b_norm, mask=b_m < positions)
    tl.store(deltas + b_rows, b_delta, mask=b_m < positions)

    b_dq = tl.zeros([BM, BD], tl.float32)
    for start in range(0, key_count, BS):
        b_k = load_block(keys, start, b_s, b_d, key_count, H * D, D, BD, EVEN, DT)
        b_v = b_k if SHARED else load_block(values, start, b_s, b_e, key_count, H * DV, DV, BDV, EVEN, DT)
        b_logits = block_logits(b_q, b_k, bias, start + b_s, key_count, scale, HAS_BIAS, EVEN, PRECISION)
        b_a = tl.exp2(b_logits - b_norm[:, None])
        b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
        b_ds = b_a * (b_da - b_delta[:, None])
        b_dq += matmul(b_ds.to(DT), b_k, PRECISION)
    p_dq = d_query + grid_offsets(b_m, b_d, dq_p, dq_c, DQ_LAST, ALIGN)
    tl.store(p_dq, (b_dq * scale).to(d_query.dtype.element_ty), mask=b_inside & (b_d < D)[None, :])


@triton.jit
def attend_backward_keys_kernel(
    query,
    keys,
    values,
    bias,
    d_y,
    norms,
    deltas,
    d_keys,
    d_values,
    d_bias,
    q_n,
    q_c,
    q_p,
    dy_n,
    dy_c,
    dy_p,
    positions,
    key_count,
    splits,
    per_split,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    Q_LAST: tl.constexpr,
    DY_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    DT: tl.constexpr,
):
    """The gradient of one block of a long list of keys, over a range of queries; parts are (splits, N, S, C)."""
    split = tl.program_id(0) % splits
    nh = tl.program_id(0) // splits
    n = (nh // H).to(tl.int64)
    head = nh % H
    batch = (tl.num_programs(0) // splits // H).to(tl.int64)
    first = split * per_split
    last = tl.minimum(first + per_split, positions)
    b_s = tl.program_id(1) * BS + tl.arange(0, BS)
    b_d = tl.arange(0, BD)
    b_e = tl.arange(0, BDV)
    query += n * q_n * ALIGN + (head * D if Q_LAST else head * D * q_c * ALIGN)
    d_y += n * dy_n * ALIGN + (head * DV if DY_LAST else head * DV * dy_c * ALIGN)
    b_k = load_tokens(keys + n * key_count * (H * D) + head * D, b_s, b_d, key_count, H * D, D, DT)
    if SHARED:
        b_v = b_k
    else:
        b_v = load_tokens(values + n * key_count * (H * DV) + head * DV, b_s, b_e, key_count, H * DV, DV, DT)
    b_bias = load_bias(bias + head * key_count, b_s, key_count, HAS_BIAS)

    b_dk = tl.zeros([BS, BD], tl.float32)
    if not SHARED:
        b_dv = tl.zeros([BS, BDV], tl.float32)
    b_db = tl.zeros([BS], tl.float32)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_inside = (b_m < last)[:, None]
        p_q = query + grid_offsets(b_m, b_d, q_p, q_c, Q_LAST, ALIGN)
        b_q = tl.load(p_q, mask=b_inside & (b_d < D)[None, :], other=0.0).to(DT)
        p_dy = d_y + grid_offsets(b_m, b_e, dy_p, dy_c, DY_LAST, ALIGN)
        b_dy = tl.load(p_dy, mask=b_inside & (b_e < DV)[None, :], other=0.0).to(DT)
        b_rows = nh.to(tl.int64) * positions + b_m
        b_norm = tl.load(norms + b_rows, mask=b_m < last, other=0.0)
        b_delta = tl.load(deltas + b_rows, mask=b_m < last, other=0.0)
        b_logits = matmul(b_q, tl.trans(b_k), PRECISION) * (scale * LOG2E) + b_bias[None, :]
        b_a = tl.where(b_inside, tl.exp2(b_logits - b_norm[:, None]), 0.0)
        b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
        b_ds = b_a * (b_da - b_delta[:, None])
        if HAS_BIAS:
            b_db += tl.sum(b_ds, axis=0)
        b_dk += matmul(tl.trans((b_ds * scale).to(DT)), b_q, PRECISION)
        if SHARED:
            b_dk += matmul(tl.trans(b_a.to(DT)), b_dy, PRECISION)
        else:
            b_dv += matmul(tl.trans(b_a.to(DT)), b_dy, PRECISION)

    part = split * batch + n
    p_dk = d_keys + part * key_count * (H * D) + head * D + token_offsets(b_s, b_d, H * D)
    b_mask = (b_s < key_count)[:, None] & (b_d < D)[None, :]
    tl.store(p_dk, b_dk, mask=b_mask)
    if not SHARED:
        p_dv = d_values + part * key_count * (H * DV) + head * DV + token_offsets(b_s, b_e, H * DV)
        tl.store(p_dv, b_dv, mask=(b_s < key_count)[:, None] & (b_e < DV)[None, :])
    if HAS_BIAS:
        tl.store(d_bias + (part * H + head) * key_count + b_s, b_db, mask=b_s < key_count)


@triton.jit
def total_kernel(parts, added, output, count, size, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr):
    b_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    if HAS_ADDED:
        b_sum += tl.load(added + b_i, mask=b_i < size, other=0.0)
    for part in range(count):
        b_sum += tl.load(parts + part * size.to(tl.int64) + b_i, mask=b_i < size, other=0.0)
    tl.store(output + b_i, b_sum, mask=b_i < size)


@triton.jit
def attend_itself_backward_kernel(
    tokens,
    d_received,
    d_tokens,
    count,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of tokens that are queries, keys and values at once, in one program for each sample and head."""
    n = (tl.program_id(0) // H).to(tl.int64)
    start = n * count * (H * D) + (tl.program_id(0) % H) * D
    DT: tl.constexpr = tokens.dtype.element_ty
    b_s = tl.arange(0, BS)
    b_d = tl.arange(0, BD)
    b_k = load_tokens(tokens + start, b_s, b_d, count, H * D, D, DT)
    b_dt = load_tokens(d_received + start, b_s, b_d, count, H * D, D, DT)
    b_dk = token_gradient(b_k, b_dt, load_bias(tokens, b_s, count, False), scale, PRECISION)
    b_mask = (b_s < count)[:, None] & (b_d < D)[None, :]
    tl.store(d_tokens + start + token_offsets(b_s, b_d, H * D), b_dk, mask=b_mask)


@recorded
def attend_forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    scale: float,
    key_bias: Tensor | None = None,
    added: Tensor | None = None,
    compute: torch.dtype | None = None,
    variance: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Softmax(scale·QKᵀ + bias)·V for every position, plus ``added``.

    Args:
        query: (N, C, *grid).
        keys: (N, S, C), contiguous, in any floating dtype.
        values: (N, S, P), likewise; may be ``keys`` itself.
        key_bias: (num_heads, S) in float32.
        added: (N, P, *grid).
        compute: the dtype that products are taken in; query's by default.
        variance, gain, eps: with two (num_heads,) tensors, logits are multiplied by gain / √(variance + eps) too.

    Returns:
        (N, P, *grid) in query's dtype and memory format.
    """
    query, q_strides = flat(query)
    compute = compute or query.dtype
    batch, key_count, channels = keys.shape
    value_channels = values.shape[2]
    head, value_head = channels // num_heads, value_channels // num_heads
    positions = query.numel() // (batch * channels)
    y = empty_like_grid(query, value_channels, q_strides.channels_last)
    y_strides = flat_strides(y)
    assert y_strides is not None
    has_added = added is not None
    added, added_strides = (y, y_strides) if added is None else flat(added)
    align = alignment(q_strides, added_strides, y_strides)
    plan = attend_plan(batch * num_heads, head, value_head, positions, key_count, compute.itemsize)
    launch(
        attend_forward_kernel,
        (batch * num_heads * plan.splits,),
        query,
        keys,
        values,
        keys if key_bias is None else key_bias,
        keys if variance is None else variance,
        keys if gain is None else gain,
        added,
        y,
        *q_strides.over(align),
        *added_strides.over(align),
        *y_strides.over(align),
        positions,
        key_count,
        plan.splits,
        plan.per_split,
        scale,
        eps,
        num_heads,
        head,
        value_head,
        plan.block_positions,
        plan.block_keys,
        plan.block_channels,
        plan.block_value_channels,
        key_count <= plan.block_keys,
        key_count % plan.block_keys == 0,
        values is keys,
        key_bias is not None,
        variance is not None,
        has_added,
        q_strides.channels_last,
        added_strides.channels_last,
        y_strides.channels_last,
        align,
        dot_precision(compute),
        TRITON_DTYPES[compute],
        num_warps=plan.warps,
        num_stages=plan.stages,
        maxnreg=plan.registers,
    )
    return y


@recorded
def attend_backward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    d_y: Tensor,
    *,
    num_heads: int,
    scale: float,
    key_bias: Tensor | None = None,
    compute: torch.dtype | None = None,
    shared: bool | None = None,
    itself: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of :func:`attend_forward`, the coefficients computed anew.

    Args:
        shared: ``values`` are ``keys``; by default, if they are the same object.
        itself: ``query`` is ``keys`` too, as (N, C, S).

    Returns:
        d_query like query; d_keys (N, S, C) and d_values (N, S, P) in float32; d_bias (num_heads, S) in float32.
        With ``shared``, d_keys is the sum of both and d_values is None; with ``itself``, d_query is added to it too.
    """
    query, q_strides = flat(query)
    d_y, dy_strides = flat(d_y)
    compute = compute or query.dtype
    batch, key_count, channels = keys.shape
    value_channels = values.shape[2]
    head, value_head = channels // num_heads, value_channels // num_heads
    positions = query.numel() // (batch * channels)
    shared = values is keys if shared is None else shared
    d_query = empty_like_grid(query, channels, q_strides.channels_last, torch.float32 if itself else query.dtype)
    dq_strides = flat_strides(d_query)
    assert dq_strides is not None
    align = alignment(q_strides, dy_strides, dq_strides)
    plan = attend_backward_plan(batch * num_heads, head, value_head, positions, key_count, compute.itemsize)

    def wide(*shape: int) -> Tensor:
        return empty(shape, torch.float32, query.device)

    parts = (plan.splits, batch, key_count) if plan.splits > 1 else (batch, key_count)
    d_keys = wide(*parts, channels)
    d_values = d_keys if shared else wide(*parts, value_channels)
    bias = d_bias = keys
    if key_bias is not None:
        bias, d_bias = key_bias, wide(plan.splits, batch, num_heads, key_count)
    sizes = (
        num_heads,
        head,
        value_head,
        plan.block_positions,
        plan.block_keys,
        plan.block_channels,
        plan.block_value_channels,
    )
    flags = (shared, key_bias is not None)
    precision, dot_type = dot_precision(compute), TRITON_DTYPES[compute]
    q, dy, dq = q_strides.over(align), dy_strides.over(align), dq_strides.over(align)
    if key_count <= plan.block_keys:
        launch(
        attend_backward_kernel,
        (batch * num_heads * plan.splits,),
            query, keys, values, bias, d_y, d_query, d_keys, d_values, d_bias,
            *q, *dy, *dq, positions, key_count, plan.splits, plan.per_split, scale, *sizes, *flags,
            q_strides.channels_last, dy_strides.channels_last, dq_strides.channels_last, align, precision, dot_type,
            num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
        )  # fmt: skip
    else:
        norms, deltas = (wide(batch * num_heads, positions) for _ in range(2))
        tiles = triton.cdiv(positions, plan.block_positions)
        launch(
        attend_backward_query_kernel,
        (batch * num_heads * tiles,),
            query, keys, values, bias, d_y, d_query, norms, deltas,
            *q, *dy, *dq, positions, key_count, tiles, scale, *sizes, key_count % plan.block_keys == 0, *flags,
            q_strides.channels_last, dy_strides.channels_last, dq_strides.channels_last, align, precision, dot_type,
            num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
        )  # fmt: skip
        launch(
        attend_backward_keys_kernel,
        (batch * num_heads * plan.splits, triton.cdiv(key_count, plan.block_keys)),
            query, keys, values, bias, d_y, norms, deltas, d_keys, d_values, d_bias,
            *q, *dy, positions, key_count, plan.splits, plan.per_split, scale, *sizes, *flags,
            q_strides.channels_last, dy_strides.channels_last, align, precision, dot_type,
            num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
        )  # fmt: skip
    return (
        d_query,
        total(d_keys, plan.splits, d_query if itself else None),
        None if shared else total(d_values, plan.splits),
        None if key_bias is None else d_bias.sum(dim=(0, 1)),
    )


def total(parts: Tensor, count: int, added: Tensor | None = None) -> Tensor:
    """The sum of ``count`` parts, (count, N, S, C) or a lone (N, S, C), plus ``added``, in float32."""
    if count == 1 and added is None:
        return parts
    output = empty(parts.shape[-3:], torch.float32, parts.device)
    size = output.numel()
    launch(
        total_kernel,
        (triton.cdiv(size, 1024),),
        parts,
        parts if added is None else added,
        output,
        count,
        size,
        added is not None,
        1024,
    )
    return output


@recorded
def attend_itself_backward(tokens: Tensor, d_received: Tensor, *, num_heads: int, scale: float) -> Tensor:
    """The gradient of (N, S, C) tokens that attended to each other, from that of what they received: in float32."""
    batch, count, channels = tokens.shape
    d_tokens = empty(tokens.shape, torch.float32, tokens.device)
    plan = itself_plan(channels // num_heads, count)
    launch(
        attend_itself_backward_kernel,
        (batch * num_heads,),
        tokens,
        d_received,
        d_tokens,
        count,
        scale,
        num_heads,
        channels // num_heads,
        plan.block_keys,
        plan.block_channels,
        dot_precision(tokens.dtype),
        num_warps=plan.warps,
    )
    return d_tokens
