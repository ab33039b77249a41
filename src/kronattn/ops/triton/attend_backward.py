"""Gradients of :mod:`.attend`, the coefficients computed anew.

Gradients of keys and values are summed over positions in registers, each program's part is written down, and the parts
are added in a fixed order: the same bits every time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.attend import coefficients, load_bias, load_block, logits
from kronattn.ops.triton.blocks import (
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
from kronattn.ops.triton.layout import alignment, empty_like_grid, flat
from kronattn.ops.triton.tuning import AttendBlocks, attend_backward_blocks, ceil_div, dot_precision

__all__ = ["attend_backward"]


@triton.jit
def store_parts(
    d_tokens, d_bias, b_dk, b_dv, b_db, splits, n, head, key_count, b_s, b_d, b_e,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write one program's part of the keys', values' and biases' gradients.

    A split's part of ``d_tokens`` is (N, S, keys' channels), then (N, S, values' channels).
    """
    split = tl.program_id(0) % splits
    batch = (tl.num_programs(0) // splits // H).to(tl.int64)
    b_exists = (b_s < key_count)[:, None]
    d_keys = d_tokens + split * batch * key_count * (H * (D + DV))
    d_values = d_keys + batch * key_count * (H * D)
    p_dk = head_of_tokens(d_keys, n, head, key_count, H, D) + token_offsets(b_s, b_d, H * D)
    tl.store(p_dk, b_dk.to(d_tokens.dtype.element_ty), mask=b_exists & (b_d < D)[None, :])
    p_dv = head_of_tokens(d_values, n, head, key_count, H, DV) + token_offsets(b_s, b_e, H * DV)
    tl.store(p_dv, b_dv.to(d_tokens.dtype.element_ty), mask=b_exists & (b_e < DV)[None, :])
    if HAS_BIAS:
        tl.store(d_bias + ((split * batch + n) * H + head) * key_count + b_s, b_db, mask=b_s < key_count)


@triton.jit
def attend_backward_kernel(
    query, keys, values, bias, d_y, d_query, d_tokens, d_bias, q_n, q_c, q_p, dy_n, dy_c, dy_p, dq_n, dq_c, dq_p,
    positions, key_count, splits, per_split,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, HAS_BIAS: tl.constexpr, ADD_DY: tl.constexpr, Q_LAST: tl.constexpr, DY_LAST: tl.constexpr,
    DQ_LAST: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """All gradients at once, for keys that fit in one block."""
    n, head, first, last = place_of_program(splits, per_split, positions, H)
    b_d = tl.arange(0, BD)
    b_e = tl.arange(0, BDV)
    b_s = tl.arange(0, BS)
    query = head_of_grid(query, n, head, q_n, q_c, D, Q_LAST, ALIGN)
    d_query = head_of_grid(d_query, n, head, dq_n, dq_c, D, DQ_LAST, ALIGN)
    d_y = head_of_grid(d_y, n, head, dy_n, dy_c, DV, DY_LAST, ALIGN)
    b_k = load_tokens(head_of_tokens(keys, n, head, key_count, H, D), b_s, b_d, key_count, H * D, D, DT)
    b_v = load_tokens(head_of_tokens(values, n, head, key_count, H, DV), b_s, b_e, key_count, H * DV, DV, DT)
    b_bias = load_bias(bias + head * key_count, b_s, key_count, HAS_BIAS)

    b_dk = tl.zeros([BS, BD], tl.float32)
    b_dv = tl.zeros([BS, BDV], tl.float32)
    b_db = tl.zeros([BS], tl.float32)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_q = load_positions(query, b_m, last, b_d, q_p, q_c, D, Q_LAST, ALIGN, DT)
        b_dy = load_positions(d_y, b_m, last, b_e, dy_p, dy_c, DV, DY_LAST, ALIGN, DT)
        b_a, b_factor = coefficients(b_q, b_k, b_bias, PRECISION)
        b_a *= b_factor[:, None]
        b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
        b_ds = b_a * (b_da - tl.sum(b_a * b_da, axis=1)[:, None])
        if HAS_BIAS:
            b_db += tl.sum(b_ds, axis=0)
        b_ds = b_ds.to(DT)
        b_dq = matmul(b_ds, b_k, PRECISION)
        b_mask = (b_m < last)[:, None] & (b_d < D)[None, :]
        if ADD_DY:
            p_dy = d_y + grid_offsets(b_m, b_d, dy_p, dy_c, DY_LAST, ALIGN)
            b_dq += tl.load(p_dy, mask=b_mask, other=0.0).to(tl.float32)
        p_dq = d_query + grid_offsets(b_m, b_d, dq_p, dq_c, DQ_LAST, ALIGN)
        tl.store(p_dq, b_dq.to(d_query.dtype.element_ty), mask=b_mask)
        b_dk += matmul(tl.trans(b_ds), b_q, PRECISION)
        b_dv += matmul(tl.trans(b_a.to(DT)), b_dy, PRECISION)
    store_parts(d_tokens, d_bias, b_dk, b_dv, b_db, splits, n, head, key_count, b_s, b_d, b_e, H, D, DV, HAS_BIAS)


@triton.jit
def attend_backward_query_kernel(
    query, keys, values, bias, d_y, d_query, norms, deltas, q_n, q_c, q_p, dy_n, dy_c, dy_p, dq_n, dq_c, dq_p,
    positions, key_count, tiles,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, ADD_DY: tl.constexpr, Q_LAST: tl.constexpr,
    DY_LAST: tl.constexpr, DQ_LAST: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The queries' gradient for a long list of keys, and what the keys' gradient needs to know of each query.

    ``norms`` receives log2 of each softmax's denominator, ``deltas`` the mean of its coefficients' gradients.
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
        b_k = load_block(keys, start, b_s, b_d, key_count, H * D, D, BD, EVEN, DT)
        b_v = load_block(values, start, b_s, b_e, key_count, H * DV, DV, BDV, EVEN, DT)
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
    b_rows = (n * H + head) * positions + b_m
    tl.store(norms + b_rows, b_norm, mask=b_m < positions)
    tl.store(deltas + b_rows, b_delta, mask=b_m < positions)

    b_dq = tl.zeros([BM, BD], tl.float32)
    for start in range(0, key_count, BS):
        b_k = load_block(keys, start, b_s, b_d, key_count, H * D, D, BD, EVEN, DT)
        b_v = load_block(values, start, b_s, b_e, key_count, H * DV, DV, BDV, EVEN, DT)
        b_logits = logits(b_q, b_k, load_bias(bias, start + b_s, key_count, HAS_BIAS), PRECISION)
        b_a = tl.exp2(b_logits - b_norm[:, None])
        b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
        b_ds = b_a * (b_da - b_delta[:, None])
        b_dq += matmul(b_ds.to(DT), b_k, PRECISION)
    b_mask = (b_m < positions)[:, None] & (b_d < D)[None, :]
    if ADD_DY:
        p_dy = d_y + grid_offsets(b_m, b_d, dy_p, dy_c, DY_LAST, ALIGN)
        b_dq += tl.load(p_dy, mask=b_mask, other=0.0).to(tl.float32)
    p_dq = d_query + grid_offsets(b_m, b_d, dq_p, dq_c, DQ_LAST, ALIGN)
    tl.store(p_dq, b_dq.to(d_query.dtype.element_ty), mask=b_mask)


@triton.jit
def attend_backward_keys_kernel(
    query, keys, values, bias, d_y, norms, deltas, d_tokens, d_bias, q_n, q_c, q_p, dy_n, dy_c, dy_p, positions,
    key_count, splits, per_split,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, HAS_BIAS: tl.constexpr, Q_LAST: tl.constexpr, DY_LAST: tl.constexpr, ALIGN: tl.constexpr,
    PRECISION: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of a long list of keys, over a range of queries."""
    n, head, first, last = place_of_program(splits, per_split, positions, H)
    b_s = tl.program_id(1) * BS + tl.arange(0, BS)
    b_d = tl.arange(0, BD)
    b_e = tl.arange(0, BDV)
    query = head_of_grid(query, n, head, q_n, q_c, D, Q_LAST, ALIGN)
    d_y = head_of_grid(d_y, n, head, dy_n, dy_c, DV, DY_LAST, ALIGN)
    b_k = load_tokens(head_of_tokens(keys, n, head, key_count, H, D), b_s, b_d, key_count, H * D, D, DT)
    b_v = load_tokens(head_of_tokens(values, n, head, key_count, H, DV), b_s, b_e, key_count, H * DV, DV, DT)
    b_bias = load_bias(bias + head * key_count, b_s, key_count, HAS_BIAS)

    b_dk = tl.zeros([BS, BD], tl.float32)
    b_dv = tl.zeros([BS, BDV], tl.float32)
    b_db = tl.zeros([BS], tl.float32)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_q = load_positions(query, b_m, last, b_d, q_p, q_c, D, Q_LAST, ALIGN, DT)
        b_dy = load_positions(d_y, b_m, last, b_e, dy_p, dy_c, DV, DY_LAST, ALIGN, DT)
        b_rows = (n * H + head) * positions + b_m
        b_norm = tl.load(norms + b_rows, mask=b_m < last, other=0.0)
        b_delta = tl.load(deltas + b_rows, mask=b_m < last, other=0.0)
        b_logits = logits(b_q, b_k, b_bias, PRECISION)
        b_a = tl.where((b_m < last)[:, None], tl.exp2(b_logits - b_norm[:, None]), 0.0)
        b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
        b_ds = b_a * (b_da - b_delta[:, None])
        if HAS_BIAS:
            b_db += tl.sum(b_ds, axis=0)
        b_dk += matmul(tl.trans(b_ds.to(DT)), b_q, PRECISION)
        b_dv += matmul(tl.trans(b_a.to(DT)), b_dy, PRECISION)
    store_parts(d_tokens, d_bias, b_dk, b_dv, b_db, splits, n, head, key_count, b_s, b_d, b_e, H, D, DV, HAS_BIAS)


def attend_backward(
    d_y: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_bias: Tensor | None,
    num_heads: int,
    dtype: torch.dtype = torch.float32,
    *,
    add_d_y: bool = False,
    blocks: AttendBlocks | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of :func:`~kronattn.ops.triton.attend.attend_forward`.

    ``add_d_y``: the query was its own residual, so that its gradient is also d_y.

    Returns:
        d_query like query; d_keys (N, S, C) and then d_values (N, S, P) in one row of ``dtype``, added up in float32;
        d_bias (num_heads, S) in float32.
    """
    query, q_strides = flat(query)
    d_y, dy_strides = flat(d_y)
    batch, key_count, channels = keys.shape
    value_channels = values.shape[2]
    head, value_head = channels // num_heads, value_channels // num_heads
    positions = query.numel() // (batch * channels)
    d_query = empty_like_grid(query, channels, q_strides.channels_last)
    _, dq_strides = flat(d_query)
    align = alignment(q_strides, dy_strides, dq_strides)
    blocks = blocks or attend_backward_blocks(
        batch * num_heads, head, value_head, positions, key_count, query.element_size()
    )
    d_tokens = parts_like(blocks.splits, batch * key_count * (channels + value_channels), dtype, query.device)
    bias = d_bias = keys
    if key_bias is not None:
        bias, d_bias = key_bias, keys.new_empty((blocks.splits, batch, num_heads, key_count), dtype=torch.float32)
    sizes = num_heads, head, value_head, blocks.positions, blocks.keys, blocks.channels, blocks.value_channels
    last = q_strides.channels_last, dy_strides.channels_last, dq_strides.channels_last
    numbers = align, dot_precision(query.dtype), TRITON_DTYPES[query.dtype]
    q, dy, dq = q_strides.over(align), dy_strides.over(align), dq_strides.over(align)
    ranges = positions, key_count, blocks.splits, blocks.per_split
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    has_bias = key_bias is not None
    if key_count <= blocks.keys:
        launch(
            attend_backward_kernel, (batch * num_heads * blocks.splits,),
            (query, keys, values, bias, d_y, d_query, d_tokens, d_bias), (*q, *dy, *dq, *ranges),
            *sizes, has_bias, add_d_y, *last, *numbers, **options,
        )  # fmt: skip
    else:
        norms, deltas = (keys.new_empty((batch * num_heads, positions), dtype=torch.float32) for _ in range(2))
        tiles = ceil_div(positions, blocks.positions)
        even = key_count % blocks.keys == 0
        launch(
            attend_backward_query_kernel, (batch * num_heads * tiles,),
            (query, keys, values, bias, d_y, d_query, norms, deltas), (*q, *dy, *dq, positions, key_count, tiles),
            *sizes, even, has_bias, add_d_y, *last, *numbers, **options,
        )  # fmt: skip
        launch(
            attend_backward_keys_kernel, (batch * num_heads * blocks.splits, ceil_div(key_count, blocks.keys)),
            (query, keys, values, bias, d_y, norms, deltas, d_tokens, d_bias), (*q, *dy, *ranges),
            *sizes, has_bias, *last[:2], *numbers, **options,
        )  # fmt: skip
    return d_query, sum_parts(d_tokens, dtype), None if key_bias is None else d_bias.sum(dim=(0, 1))
