"""Batch statistics of KAO_KV's coefficients E = KᵀQ in training, without E ever being written down.

A program adds up E - e and (E - e)² over a range of queries and a block of keys, where e is the mean of its first tile:
next to the mean of them all, so that nothing cancels. A second, tiny kernel puts the parts together in a fixed order.
E's gradient is linear in E, so the backward is a pass over the queries for the queries' gradient, which adds to what
they have received already, and one for the keys'.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.attend import attend_arguments
from kronattn.ops.triton.blocks import (
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
from kronattn.ops.triton.layout import alignment, dense_strides, empty_like_grid, flat
from kronattn.ops.triton.tuning import AttendBlocks, ceil_div

__all__ = ["finish_moments", "moments_backward", "moments_forward", "slope_and_level"]


@triton.jit
def moments_kernel(
    query, keys, parts, q_n, q_c, q_p, positions, key_count, splits, per_split,
    H: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    Q_LAST: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """``parts`` is (splits, N, H, key blocks, 4): how many coefficients, Σ (E - e), Σ (E - e)², e."""
    n, head, first, last = place_of_program(splits, per_split, positions, H)
    b_d = tl.arange(0, BD)
    b_s = tl.program_id(1) * BS + tl.arange(0, BS)
    b_exists = (b_s < key_count)[None, :]
    query = head_of_grid(query, n, head, q_n, q_c, D, Q_LAST, ALIGN)
    b_k = load_tokens(head_of_tokens(keys, n, head, key_count, H, D), b_s, b_d, key_count, H * D, D, DT)
    here = tl.minimum(key_count - tl.program_id(1) * BS, BS).to(tl.float32)
    b_q = load_positions(query, first + tl.arange(0, BM), last, b_d, q_p, q_c, D, Q_LAST, ALIGN, DT)
    # Past the end queries and keys are zero, and so is E.
    b_e = matmul(b_q, tl.trans(b_k), PRECISION)
    centre = tl.sum(tl.sum(b_e, axis=1), axis=0) / (here * tl.minimum(last - first, BM).to(tl.float32))

    b_sum = tl.zeros([BM], tl.float32)
    b_squares = tl.zeros([BM], tl.float32)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_q = load_positions(query, b_m, last, b_d, q_p, q_c, D, Q_LAST, ALIGN, DT)
        b_e = matmul(b_q, tl.trans(b_k), PRECISION) - centre
        b_e = tl.where((b_m < last)[:, None] & b_exists, b_e, 0.0)
        b_sum += tl.sum(b_e, axis=1)
        b_squares += tl.sum(b_e * b_e, axis=1)
    batch = (tl.num_programs(0) // splits // H).to(tl.int64)
    p_part = parts + (((tl.program_id(0) % splits * batch + n) * H + head) * tl.num_programs(1) + tl.program_id(1)) * 4
    tl.store(p_part, (last - first).to(tl.float32) * here)
    tl.store(p_part + 1, tl.sum(b_sum, axis=0))
    tl.store(p_part + 2, tl.sum(b_squares, axis=0))
    tl.store(p_part + 3, centre)


@triton.jit
def load_parts(parts, b_part, head, count, key_blocks, H: tl.constexpr):
    """How many coefficients, Σ (E - e), Σ (E - e)² and e of some of a head's ``count`` parts; zero past the end."""
    p_part = parts + ((b_part // key_blocks * H + head) * key_blocks + b_part % key_blocks) * 4
    b_in = b_part < count
    b_members = tl.load(p_part, mask=b_in, other=0.0)
    b_sum = tl.load(p_part + 1, mask=b_in, other=0.0)
    b_squares = tl.load(p_part + 2, mask=b_in, other=0.0)
    return b_members, b_sum, b_squares, tl.load(p_part + 3, mask=b_in, other=0.0)


@triton.jit
def finish_moments_kernel(
    parts, mean, squares, count, key_blocks, members, H: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Mean and squared deviations of one head's coefficients from ``count`` parts."""
    head = tl.program_id(0)
    b_i = tl.arange(0, BLOCK)
    b_total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        b_members, b_sum, _, b_centre = load_parts(parts, start + b_i, head, count, key_blocks, H)
        b_total += b_sum + b_members * b_centre
    average = tl.sum(b_total, axis=0) / members
    b_total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        b_members, b_sum, b_squares, b_centre = load_parts(parts, start + b_i, head, count, key_blocks, H)
        b_off = b_centre - average
        b_total += b_squares
        b_total += b_off * (2.0 * b_sum + b_members * b_off)
    tl.store(mean + head, average)
    tl.store(squares + head, tl.sum(b_total, axis=0))


@triton.jit
def slope_and_level(mean, d_mean, d_squares, head, members, HAS_D_MEAN: tl.constexpr):
    """E's gradient is slope·(E - mean) + level, here as slope·E + the second number."""
    slope = 2.0 * tl.load(d_squares + head)
    level = -slope * tl.load(mean + head)
    if HAS_D_MEAN:
        level += tl.load(d_mean + head) / members
    return slope, level


@triton.jit
def moments_backward_query_kernel(
    query, keys, mean, d_mean, d_squares, d_query, output, q_n, q_c, q_p, dq_n, dq_c, dq_p, o_n, o_c, o_p,
    positions, key_count, splits, per_split, members,
    H: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    HAS_D_MEAN: tl.constexpr, HAS_D_QUERY: tl.constexpr, Q_LAST: tl.constexpr, DQ_LAST: tl.constexpr,
    O_LAST: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """output = d_query + (slope·E + level)·K."""
    n, head, first, last = place_of_program(splits, per_split, positions, H)
    b_d = tl.arange(0, BD)
    b_s = tl.arange(0, BS)
    query = head_of_grid(query, n, head, q_n, q_c, D, Q_LAST, ALIGN)
    d_query = head_of_grid(d_query, n, head, dq_n, dq_c, D, DQ_LAST, ALIGN)
    output = head_of_grid(output, n, head, o_n, o_c, D, O_LAST, ALIGN)
    keys = head_of_tokens(keys, n, head, key_count, H, D)
    slope, level = slope_and_level(mean, d_mean, d_squares, head, members, HAS_D_MEAN)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_mask = (b_m < last)[:, None] & (b_d < D)[None, :]
        b_q = load_positions(query, b_m, last, b_d, q_p, q_c, D, Q_LAST, ALIGN, DT)
        b_dq = tl.zeros([BM, BD], tl.float32)
        if HAS_D_QUERY:
            p_dq = d_query + grid_offsets(b_m, b_d, dq_p, dq_c, DQ_LAST, ALIGN)
            b_dq += tl.load(p_dq, mask=b_mask, other=0.0).to(tl.float32)
        for block in range(0, key_count, BS):
            b_k = load_tokens(keys, block + b_s, b_d, key_count, H * D, D, DT)
            b_de = matmul(b_q, tl.trans(b_k), PRECISION) * slope + level
            # Keys past the last are zero, so it does not matter what they would have received.
            b_dq += matmul(b_de.to(DT), b_k, PRECISION)
        p_output = output + grid_offsets(b_m, b_d, o_p, o_c, O_LAST, ALIGN)
        tl.store(p_output, b_dq.to(output.dtype.element_ty), mask=b_mask)


@triton.jit
def moments_backward_keys_kernel(
    query, keys, mean, d_mean, d_squares, d_keys, q_n, q_c, q_p, positions, key_count, splits, per_split, members,
    H: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    HAS_D_MEAN: tl.constexpr, Q_LAST: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """``d_keys`` is (splits, N, S, C): (slope·E + level)ᵀ·Q over a range of queries."""
    n, head, first, last = place_of_program(splits, per_split, positions, H)
    b_d = tl.arange(0, BD)
    b_s = tl.program_id(1) * BS + tl.arange(0, BS)
    query = head_of_grid(query, n, head, q_n, q_c, D, Q_LAST, ALIGN)
    b_k = load_tokens(head_of_tokens(keys, n, head, key_count, H, D), b_s, b_d, key_count, H * D, D, DT)
    slope, level = slope_and_level(mean, d_mean, d_squares, head, members, HAS_D_MEAN)
    b_dk = tl.zeros([BS, BD], tl.float32)
    for start in range(first, last, BM):
        b_q = load_positions(query, start + tl.arange(0, BM), last, b_d, q_p, q_c, D, Q_LAST, ALIGN, DT)
        b_de = matmul(b_q, tl.trans(b_k), PRECISION) * slope + level
        b_dk += matmul(tl.trans(b_de.to(DT)), b_q, PRECISION)
    batch = (tl.num_programs(0) // splits // H).to(tl.int64)
    d_keys = head_of_tokens(d_keys, tl.program_id(0) % splits * batch + n, head, key_count, H, D)
    p_dk = d_keys + token_offsets(b_s, b_d, H * D)
    tl.store(p_dk, b_dk.to(d_keys.dtype.element_ty), mask=(b_s < key_count)[:, None] & (b_d < D)[None, :])


def moments_forward(
    query: Tensor, keys: Tensor, num_heads: int, *, blocks: AttendBlocks | None = None
) -> tuple[Tensor, Tensor]:
    """Mean, and squared deviations from it, of the coefficients KᵀQ of each head over the batch.

    ``query`` is (N, C, *grid), ``keys`` are (N, S, C), contiguous; both results are (num_heads,) in float32.
    """
    query, strides = flat(query)
    blocks, heads, ranges, sizes, numbers = attend_arguments(
        query.shape, keys.shape, keys.shape, num_heads, query.dtype, blocks, True
    )
    align = alignment(strides)
    positions, key_count = ranges[:2]
    key_blocks = ceil_div(key_count, blocks.keys)
    parts = torch.empty((blocks.splits, heads, key_blocks, 4), dtype=torch.float32, device=query.device)
    launch(
        moments_kernel, (heads * blocks.splits, key_blocks), (query, keys, parts), (*strides.over(align), *ranges),
        *sizes[:5], strides.channels_last, align, *numbers,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return finish_moments(parts, num_heads, key_blocks, float(heads // num_heads * positions * key_count))


def finish_moments(parts: Tensor, num_heads: int, key_blocks: int, members: float) -> tuple[Tensor, Tensor]:
    """Each head's mean and squared deviations of ``members`` coefficients from parts (..., heads, key_blocks, 4)."""
    mean, squares = (torch.empty((num_heads,), dtype=torch.float32, device=parts.device) for _ in range(2))
    launch(
        finish_moments_kernel, (num_heads,), (parts, mean, squares),
        (parts.numel() // (4 * num_heads), key_blocks, members), num_heads, 1024, num_warps=8,
    )  # fmt: skip
    return mean, squares


def moments_backward(
    query: Tensor,
    keys: Tensor,
    mean: Tensor,
    d_mean: Tensor | None,
    d_squares: Tensor,
    d_query: Tensor | None,
    d_keys: Tensor | None,
    num_heads: int,
    *,
    blocks: AttendBlocks | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`moments_forward`.

    Args:
        query, keys: its input.
        mean: its output.
        d_mean, d_squares: what that received, (num_heads,) in float32.
        d_query: (N, C, *grid), what the queries have received already.
        d_keys: (N, S, C), what the keys have, contiguous.

    Returns:
        d_query plus what comes through the moments, like query; d_keys plus that, like keys.
    """
    query, q_strides = flat(query)
    output = empty_like_grid(query, query.shape[1], q_strides.channels_last)
    o_strides = dense_strides(output, q_strides.channels_last)
    has_d_mean, has_d_query = d_mean is not None, d_query is not None
    d_mean = d_squares if d_mean is None else d_mean
    d_query, dq_strides = (output, o_strides) if d_query is None else flat(d_query)
    align = alignment(q_strides, dq_strides, o_strides)
    blocks, heads, ranges, sizes, numbers = attend_arguments(
        query.shape, keys.shape, keys.shape, num_heads, query.dtype, blocks, True
    )
    positions, key_count = ranges[:2]
    members = float(heads // num_heads * positions * key_count)
    parts = parts_like(blocks.splits, keys.numel(), keys.dtype, query.device)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    launch(
        moments_backward_query_kernel, (heads * blocks.splits,),
        (query, keys, mean, d_mean, d_squares, d_query, output),
        (*q_strides.over(align), *dq_strides.over(align), *o_strides.over(align), *ranges, members),
        *sizes[:5], has_d_mean, has_d_query, q_strides.channels_last, dq_strides.channels_last,
        o_strides.channels_last, align, *numbers, **options,
    )  # fmt: skip
    launch(
        moments_backward_keys_kernel, (heads * blocks.splits, ceil_div(key_count, blocks.keys)),
        (query, keys, mean, d_mean, d_squares, parts), (*q_strides.over(align), *ranges, members),
        *sizes[:5], has_d_mean, q_strides.channels_last, align, *numbers, **options,
    )  # fmt: skip
    return output, sum_parts(parts, keys.dtype, d_keys).view(keys.shape)
