"""Batch statistics of KAO_KV's coefficients E = KᵀQ in training, without E ever being written down.

A program adds up E - e and (E - e)² over a range of queries and a block of keys, where e is what E is for the sample's
mean key and mean query: the mean of its coefficients, so that nothing cancels. In passing it notes Σⱼ (Eᵢⱼ - e)·qⱼ for
every key i, which the keys' gradient needs. Parts are added in a fixed order. The backward is one pass over the
queries, which adds to a gradient that they have received already.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.blocks import TRITON_DTYPES, grid_offsets, load_tokens, matmul, token_offsets
from kronattn.ops.triton.layout import alignment, empty_like_grid, flat, flat_strides
from kronattn.ops.triton.tuning import AttendBlocks, attend_backward_blocks, dot_precision

__all__ = ["moments_backward", "moments_forward"]


@triton.jit
def moments_kernel(
    query,
    keys,
    centres,
    parts,
    pulls,
    q_n,
    q_c,
    q_p,
    positions,
    key_count,
    splits,
    per_split,
    H: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    WITH_PULLS: tl.constexpr,
    Q_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    DT: tl.constexpr,
):
    """``parts`` is (splits, N, H, key blocks, 2): Σ (E - e), Σ (E - e)²; ``pulls`` is (splits, N, S, C)."""
    split = tl.program_id(0) % splits
    nh = tl.program_id(0) // splits
    n = (nh // H).to(tl.int64)
    head = nh % H
    batch = (tl.num_programs(0) // splits // H).to(tl.int64)
    first = split * per_split
    last = tl.minimum(first + per_split, positions)
    b_d = tl.arange(0, BD)
    b_s = tl.program_id(1) * BS + tl.arange(0, BS)
    query += n * q_n * ALIGN + (head * D if Q_LAST else head * D * q_c * ALIGN)
    b_k = load_tokens(keys + n * key_count * (H * D) + head * D, b_s, b_d, key_count, H * D, D, DT)
    centre = tl.load(centres + nh)

    b_sum = tl.zeros([BM], tl.float32)
    b_squares = tl.zeros([BM], tl.float32)
    b_pull = tl.zeros([BS, BD], tl.float32)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_inside = (b_m < last)[:, None]
        p_q = query + grid_offsets(b_m, b_d, q_p, q_c, Q_LAST, ALIGN)
        b_q = tl.load(p_q, mask=b_inside & (b_d < D)[None, :], other=0.0).to(DT)
        b_e = matmul(b_q, tl.trans(b_k), PRECISION) - centre
        b_e = tl.where(b_inside & (b_s < key_count)[None, :], b_e, 0.0)
        b_sum += tl.sum(b_e, axis=1)
        b_squares += tl.sum(b_e * b_e, axis=1)
        if WITH_PULLS:
            b_pull += matmul(tl.trans(b_e.to(DT)), b_q, PRECISION)
    part = split * batch + n
    p_part = parts + ((part * H + head) * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(p_part, tl.sum(b_sum, axis=0))
    tl.store(p_part + 1, tl.sum(b_squares, axis=0))
    if WITH_PULLS:
        p_pull = pulls + part * key_count * (H * D) + head * D + token_offsets(b_s, b_d, H * D)
        tl.store(p_pull, b_pull, mask=(b_s < key_count)[:, None] & (b_d < D)[None, :])


@triton.jit
def moments_backward_kernel(
    query,
    keys,
    slope,
    offset,
    d_query,
    output,
    q_n,
    q_c,
    q_p,
    dq_n,
    dq_c,
    dq_p,
    o_n,
    o_c,
    o_p,
    positions,
    key_count,
    splits,
    per_split,
    H: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    Q_LAST: tl.constexpr,
    DQ_LAST: tl.constexpr,
    O_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    DT: tl.constexpr,
):
    """output = d_query + (slope·E + offset)·K: E's gradient is linear in E."""
    nh = tl.program_id(0) // splits
    n = (nh // H).to(tl.int64)
    head = nh % H
    first = (tl.program_id(0) % splits) * per_split
    last = tl.minimum(first + per_split, positions)
    b_d = tl.arange(0, BD)
    b_s = tl.arange(0, BS)
    query += n * q_n * ALIGN + (head * D if Q_LAST else head * D * q_c * ALIGN)
    d_query += n * dq_n * ALIGN + (head * D if DQ_LAST else head * D * dq_c * ALIGN)
    output += n * o_n * ALIGN + (head * D if O_LAST else head * D * o_c * ALIGN)
    keys += n * key_count * (H * D) + head * D
    rise = tl.load(slope + head)
    base = tl.load(offset + head)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_mask = (b_m < last)[:, None] & (b_d < D)[None, :]
        b_q = tl.load(query + grid_offsets(b_m, b_d, q_p, q_c, Q_LAST, ALIGN), mask=b_mask, other=0.0).to(DT)
        p_dq = d_query + grid_offsets(b_m, b_d, dq_p, dq_c, DQ_LAST, ALIGN)
        b_dq = tl.load(p_dq, mask=b_mask, other=0.0).to(tl.float32)
        for block in range(0, key_count, BS):
            b_k = load_tokens(keys, block + b_s, b_d, key_count, H * D, D, DT)
            b_de = matmul(b_q, tl.trans(b_k), PRECISION) * rise + base
            # Keys past the last are zero, so it does not matter what they would have received.
            b_dq += matmul(b_de.to(DT), b_k, PRECISION)
        p_output = output + grid_offsets(b_m, b_d, o_p, o_c, O_LAST, ALIGN)
        tl.store(p_output, b_dq.to(output.dtype.element_ty), mask=b_mask)


def moments_forward(
    query: Tensor,
    keys: Tensor,
    centres: Tensor,
    num_heads: int,
    with_pulls: bool,
    *,
    blocks: AttendBlocks | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums over the coefficients E = KᵀQ of each sample and head.

    Args:
        query: (N, C, *grid).
        keys: (N, S, C), contiguous.
        centres: (N, num_heads), the mean coefficient of each or a number next to it: e.
        with_pulls: note what the keys' gradient needs.

    Returns:
        Σ (E - e) and Σ (E - e)², (N, num_heads, 2); Σⱼ (Eᵢⱼ - e)·qⱼ, (N, S, C), or nothing. All in float32.
    """
    query, strides = flat(query)
    batch, key_count, channels = keys.shape
    head = channels // num_heads
    positions = query.numel() // (batch * channels)
    blocks = blocks or attend_backward_blocks(batch * num_heads, head, head, positions, key_count, query.element_size())
    align = alignment(strides)
    key_blocks = triton.cdiv(key_count, blocks.keys)
    parts = torch.empty((blocks.splits, batch, num_heads, key_blocks, 2), dtype=torch.float32, device=query.device)
    pulls = torch.empty(
        (blocks.splits, *keys.shape) if with_pulls else (1, 0), dtype=torch.float32, device=query.device
    )
    moments_kernel[(batch * num_heads * blocks.splits, key_blocks)](
        query, keys, centres, parts, pulls, *strides.over(align),
        positions, key_count, blocks.splits, blocks.per_split,
        num_heads, head, blocks.positions, blocks.keys, blocks.channels, with_pulls,
        strides.channels_last, align, dot_precision(query.dtype), TRITON_DTYPES[query.dtype],
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return parts.sum(dim=(0, 3)), pulls[0] if blocks.splits == 1 else pulls.sum(dim=0)


def moments_backward(
    query: Tensor,
    keys: Tensor,
    slope: Tensor,
    offset: Tensor,
    d_query: Tensor,
    num_heads: int,
    *,
    blocks: AttendBlocks | None = None,
) -> Tensor:
    """d_query plus (slope·E + offset)·K for every position: like query.

    Args:
        slope, offset: (num_heads,) in float32.
        d_query: (N, C, *grid), what the queries have received already.
    """
    query, q_strides = flat(query)
    d_query, dq_strides = flat(d_query)
    batch, key_count, channels = keys.shape
    head = channels // num_heads
    positions = query.numel() // (batch * channels)
    output = empty_like_grid(query, channels, q_strides.channels_last)
    o_strides = flat_strides(output)
    assert o_strides is not None
    align = alignment(q_strides, dq_strides, o_strides)
    blocks = blocks or attend_backward_blocks(batch * num_heads, head, head, positions, key_count, query.element_size())
    moments_backward_kernel[(batch * num_heads * blocks.splits,)](
        query, keys, slope, offset, d_query, output,
        *q_strides.over(align), *dq_strides.over(align), *o_strides.over(align),
        positions, key_count, blocks.splits, blocks.per_split,
        num_heads, head, blocks.positions, blocks.keys, blocks.channels,
        q_strides.channels_last, dq_strides.channels_last, o_strides.channels_last,
        align, dot_precision(query.dtype), TRITON_DTYPES[query.dtype],
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return output
