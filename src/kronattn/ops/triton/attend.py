"""The last stage of KAO_KV: attention of every position of a grid to a list of keys, forward and backward.

The keys are few: up to a block of them stay on the chip while positions stream past, so the grid is read once and
written once. Longer lists are walked through with an online softmax.

The backward computes the coefficients anew. Gradients of keys and values are summed over positions in registers, each
program's part is written down, and the parts are added in a fixed order: the same bits every time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
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
    parts_like,
    place_of_program,
    sum_parts,
    token_offsets,
)  # fmt: skip
from kronattn.ops.triton.layout import dense_strides, empty_like_grid, flat, kernel_strides
from kronattn.ops.triton.tuning import AttendBlocks, attend_blocks, ceil_div, dot_precision

__all__ = ["attend_arguments", "attend_backward", "attend_forward"]


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
def attend_forward_kernel(
    query, keys, values, bias, residual, y, q_n, q_c, q_p, residual_n, residual_c, residual_p, y_n, y_c, y_p,
    positions, key_count, splits, per_split,
    H: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr,
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
                b_k = load_tokens(keys, block + b_s, b_d, key_count, H * D, D, DT, EVEN)
                b_v = load_tokens(values, block + b_s, b_e, key_count, H * DV, DV, DT, EVEN)
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


@triton.jit
def store_query_gradient(
    d_query, d_y, b_dq, b_m, last, b_d, dq_p, dq_c, dy_p, dy_c,
    D: tl.constexpr, ADD_DY: tl.constexpr, DQ_LAST: tl.constexpr, DY_LAST: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write the gradient of some queries; with ADD_DY they were their own residual, so that d_y is added."""
    b_mask = (b_m < last)[:, None] & (b_d < D)[None, :]
    if ADD_DY:
        p_dy = d_y + grid_offsets(b_m, b_d, dy_p, dy_c, DY_LAST, ALIGN)
        b_dq += tl.load(p_dy, mask=b_mask, other=0.0).to(tl.float32)
    p_dq = d_query + grid_offsets(b_m, b_d, dq_p, dq_c, DQ_LAST, ALIGN)
    tl.store(p_dq, b_dq.to(d_query.dtype.element_ty), mask=b_mask)


@triton.jit
def attend_backward_query_kernel(
    query, keys, values, bias, d_y, d_query, statistics, q_n, q_c, q_p, dy_n, dy_c, dy_p, dq_n, dq_c, dq_p,
    positions, key_count, tiles,
    H: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr,
    BDV: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, ADD_DY: tl.constexpr, Q_LAST: tl.constexpr,
    DY_LAST: tl.constexpr, DQ_LAST: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The queries' gradient for a long list of keys, and what the keys' gradient needs to know of each query.

    ``statistics`` is (2, N, H, positions): log2 of each softmax's denominator, and the mean of its coefficients'
    gradients.
    """
    n, head, first, _ = place_of_program(tiles, BM, positions, H)
    b_m = first + tl.arange(0, BM)
    b_d = tl.arange(0, BD)
    b_e = tl.arange(0, BDV)
    b_s = tl.arange(0, BS)
    query = head_of_grid(query, n, head, q_n, q_c, D, Q_LAST, ALIGN)
    d_query = head_of_grid(d_query, n, head, dq_n, dq_c, D, DQ_LAST, ALIGN)
    d_y = head_of_grid(d_y, n, head, dy_n, dy_c, DV, DY_LAST, ALIGN)
    keys = head_of_tokens(keys, n, head, key_count, H, D)
    values = head_of_tokens(values, n, head, key_count, H, DV)
    bias += head * key_count
    b_q = load_positions(query, b_m, positions, b_d, q_p, q_c, D, Q_LAST, ALIGN, DT)
    b_dy = load_positions(d_y, b_m, positions, b_e, dy_p, dy_c, DV, DY_LAST, ALIGN, DT)

    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_delta = tl.zeros([BM], tl.float32)
    for start in range(0, key_count, BS):
        b_k = load_tokens(keys, start + b_s, b_d, key_count, H * D, D, DT, EVEN)
        b_v = load_tokens(values, start + b_s, b_e, key_count, H * DV, DV, DT, EVEN)
        b_logits = logits(b_q, b_k, load_bias(bias, start + b_s, key_count, HAS_BIAS), PRECISION)
        b_new = tl.maximum(b_max, tl.max(b_logits, axis=1))
        b_a = tl.exp2(b_logits - b_new[:, None])
        b_shrink = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_shrink + tl.sum(b_a, axis=1)
        b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
        b_delta = b_delta * b_shrink + tl.sum(b_a * b_da, axis=1)
        b_max = b_new
    b_norm = b_max + tl.log2(b_sum)
    b_delta = b_delta / b_sum
    p_norm = statistics + (n * H + head) * positions + b_m
    tl.store(p_norm, b_norm, mask=b_m < positions)
    tl.store(p_norm + (tl.num_programs(0) // tiles).to(tl.int64) * positions, b_delta, mask=b_m < positions)

    b_dq = tl.zeros([BM, BD], tl.float32)
    for start in range(0, key_count, BS):
        b_k = load_tokens(keys, start + b_s, b_d, key_count, H * D, D, DT, EVEN)
        b_v = load_tokens(values, start + b_s, b_e, key_count, H * DV, DV, DT, EVEN)
        b_logits = logits(b_q, b_k, load_bias(bias, start + b_s, key_count, HAS_BIAS), PRECISION)
        b_a = tl.exp2(b_logits - b_norm[:, None])
        b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
        b_ds = b_a * (b_da - b_delta[:, None])
        b_dq += matmul(b_ds.to(DT), b_k, PRECISION)
    store_query_gradient(
        d_query, d_y, b_dq, b_m, positions, b_d, dq_p, dq_c, dy_p, dy_c, D, ADD_DY, DQ_LAST, DY_LAST, ALIGN
    )


@triton.jit
def attend_backward_kernel(
    query, keys, values, bias, d_y, d_query, statistics, d_tokens, d_bias, q_n, q_c, q_p, dy_n, dy_c, dy_p,
    dq_n, dq_c, dq_p, positions, key_count, splits, per_split,
    H: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr,
    BDV: tl.constexpr, ONE_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, ADD_DY: tl.constexpr, Q_LAST: tl.constexpr,
    DY_LAST: tl.constexpr, DQ_LAST: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One program's part of the gradients of a block of keys, their values and biases, over a range of queries.

    Where all keys are in one block, the queries' gradient too; else ``statistics`` are what
    :func:`attend_backward_query_kernel` found. A split's part of ``d_tokens`` is (N, S, keys' channels), then
    (N, S, values' channels).
    """
    n, head, first, last = place_of_program(splits, per_split, positions, H)
    b_d = tl.arange(0, BD)
    b_e = tl.arange(0, BDV)
    b_s = tl.arange(0, BS)
    if not ONE_BLOCK:
        b_s += tl.program_id(1) * BS
    query = head_of_grid(query, n, head, q_n, q_c, D, Q_LAST, ALIGN)
    d_query = head_of_grid(d_query, n, head, dq_n, dq_c, D, DQ_LAST, ALIGN)
    d_y = head_of_grid(d_y, n, head, dy_n, dy_c, DV, DY_LAST, ALIGN)
    b_k = load_tokens(head_of_tokens(keys, n, head, key_count, H, D), b_s, b_d, key_count, H * D, D, DT)
    b_v = load_tokens(head_of_tokens(values, n, head, key_count, H, DV), b_s, b_e, key_count, H * DV, DV, DT)
    b_bias = load_bias(bias + head * key_count, b_s, key_count, HAS_BIAS)
    samples = (tl.num_programs(0) // splits // H).to(tl.int64)

    b_dk = tl.zeros([BS, BD], tl.float32)
    b_dv = tl.zeros([BS, BDV], tl.float32)
    b_db = tl.zeros([BS], tl.float32)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_q = load_positions(query, b_m, last, b_d, q_p, q_c, D, Q_LAST, ALIGN, DT)
        b_dy = load_positions(d_y, b_m, last, b_e, dy_p, dy_c, DV, DY_LAST, ALIGN, DT)
        if ONE_BLOCK:
            b_a, b_factor = coefficients(b_q, b_k, b_bias, PRECISION)
            b_a *= b_factor[:, None]
            b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
            b_delta = tl.sum(b_a * b_da, axis=1)
        else:
            p_norm = statistics + (n * H + head) * positions + b_m
            b_norm = tl.load(p_norm, mask=b_m < last, other=0.0)
            b_delta = tl.load(p_norm + samples * H * positions, mask=b_m < last, other=0.0)
            b_logits = logits(b_q, b_k, b_bias, PRECISION)
            b_a = tl.where((b_m < last)[:, None], tl.exp2(b_logits - b_norm[:, None]), 0.0)
            b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
        b_ds = b_a * (b_da - b_delta[:, None])
        if HAS_BIAS:
            b_db += tl.sum(b_ds, axis=0)
        b_ds = b_ds.to(DT)
        if ONE_BLOCK:
            b_dq = matmul(b_ds, b_k, PRECISION)
            store_query_gradient(
                d_query, d_y, b_dq, b_m, last, b_d, dq_p, dq_c, dy_p, dy_c, D, ADD_DY, DQ_LAST, DY_LAST, ALIGN
            )
        b_dk += matmul(tl.trans(b_ds), b_q, PRECISION)
        b_dv += matmul(tl.trans(b_a.to(DT)), b_dy, PRECISION)

    part = tl.program_id(0) % splits * samples
    b_exists = (b_s < key_count)[:, None]
    d_keys = d_tokens + part * key_count * (H * (D + DV))
    d_values = d_keys + samples * key_count * (H * D)
    p_dk = head_of_tokens(d_keys, n, head, key_count, H, D) + token_offsets(b_s, b_d, H * D)
    tl.store(p_dk, b_dk.to(d_tokens.dtype.element_ty), mask=b_exists & (b_d < D)[None, :])
    p_dv = head_of_tokens(d_values, n, head, key_count, H, DV) + token_offsets(b_s, b_e, H * DV)
    tl.store(p_dv, b_dv.to(d_tokens.dtype.element_ty), mask=b_exists & (b_e < DV)[None, :])
    if HAS_BIAS:
        tl.store(d_bias + ((part + n) * H + head) * key_count + b_s, b_db, mask=b_s < key_count)


@lru_cache(maxsize=1024)
def attend_arguments(
    query: Sequence[int], keys: Sequence[int], values: Sequence[int], num_heads: int, dtype: torch.dtype,
    blocks: AttendBlocks | None, backward: bool,
) -> tuple[AttendBlocks, int, tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:  # fmt: skip
    """What kernels of attention and of its moments take for tensors of these shapes, found out once.

    Returns:
        Blocks, chosen by the sizes unless they are given; how many heads all samples have; positions, keys and ranges
        of positions; sizes of heads and blocks; how numbers are multiplied.
    """
    batch, key_count, channels = keys
    head, value_head, positions = channels // num_heads, values[2] // num_heads, math.prod(query[2:])
    heads = batch * num_heads
    blocks = blocks or attend_blocks(heads, head, value_head, positions, key_count, dtype.itemsize, backward)
    ranges = positions, key_count, blocks.splits, blocks.per_split
    sizes = num_heads, blocks.positions, blocks.keys, head, blocks.channels, value_head, blocks.value_channels
    return blocks, heads, ranges, sizes, (dot_precision(dtype), TRITON_DTYPES[dtype])


def attend_forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bias: Tensor | None,
    residual: Tensor | None,
    num_heads: int,
) -> Tensor:
    """Softmax(QKᵀ + bias)·V for every position, plus ``residual``: as :func:`kronattn.ops.torch_backend.spread`, of
    contiguous keys and values in any floating dtype and a contiguous (num_heads, S) bias."""
    query, q_strides = flat(query)
    y = empty_like_grid(query, values.shape[2], q_strides.channels_last)
    y_strides = dense_strides(y, q_strides.channels_last)
    has_residual = residual is not None
    residual, residual_strides = (y, y_strides) if residual is None else flat(residual)
    strides, layout = kernel_strides(q_strides, residual_strides, y_strides)
    blocks, heads, ranges, sizes, numbers = attend_arguments(
        query.shape, keys.shape, values.shape, num_heads, query.dtype, None, False
    )
    key_count = ranges[1]
    launch(
        attend_forward_kernel, (heads * blocks.splits,),
        (query, keys, values, keys if key_bias is None else key_bias, residual, y),
        (*strides, *ranges), *sizes,
        key_count <= blocks.keys, key_count % blocks.keys == 0, key_bias is not None, has_residual, *layout, *numbers,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return y


def attend_backward(
    query: Tensor,
    d_y: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bias: Tensor | None,
    num_heads: int,
    dtype: torch.dtype,
    add_d_y: bool,
    *,
    blocks: AttendBlocks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`attend_forward`.

    ``add_d_y``: the query was its own residual, so that its gradient is also d_y.

    Returns:
        d_query like query; d_keys (N, S, C) and then d_values (N, S, P) in one row of ``dtype``, added up in float32;
        d_bias (num_heads, S) in float32, or nothing.
    """
    query, q_strides = flat(query)
    d_y, dy_strides = flat(d_y)
    d_query = empty_like_grid(query, query.shape[1], q_strides.channels_last)
    dq_strides = dense_strides(d_query, q_strides.channels_last)
    strides, layout = kernel_strides(q_strides, dy_strides, dq_strides)
    blocks, heads, ranges, sizes, numbers = attend_arguments(
        query.shape, keys.shape, values.shape, num_heads, query.dtype, blocks, True
    )
    positions, key_count = ranges[:2]
    d_tokens = parts_like(blocks.splits, keys.numel() + values.numel(), dtype, query.device)
    bias = d_bias = keys
    if key_bias is not None:
        bias, d_bias = key_bias, keys.new_empty((blocks.splits, heads, key_count), dtype=torch.float32)
    flags = key_bias is not None, add_d_y, *layout
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    one_block, statistics = key_count <= blocks.keys, d_tokens
    if not one_block:
        statistics = keys.new_empty((2, heads, positions), dtype=torch.float32)
        tiles = ceil_div(positions, blocks.positions)
        launch(
            attend_backward_query_kernel, (heads * tiles,),
            (query, keys, values, bias, d_y, d_query, statistics), (*strides, positions, key_count, tiles),
            *sizes, key_count % blocks.keys == 0, *flags, *numbers, **options,
        )  # fmt: skip
    launch(
        attend_backward_kernel, (heads * blocks.splits, ceil_div(key_count, blocks.keys)),
        (query, keys, values, bias, d_y, d_query, statistics, d_tokens, d_bias), (*strides, *ranges),
        *sizes, one_block, *flags, *numbers, **options,
    )  # fmt: skip
    if key_bias is None:
        return d_query, sum_parts(d_tokens, dtype), d_tokens.new_empty(0, dtype=torch.float32)
    return d_query, sum_parts(d_tokens, dtype), d_bias.view(-1, *key_bias.shape).sum(dim=0)
