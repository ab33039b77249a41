"""Batch statistics of the coefficients E = scale·KᵀQ, and their running averages, without E ever being written down.

A program adds up E - e and (E - e)² over a range of queries, where e is what E would be for the mean key and the mean
query of the sample: next to the mean of its own coefficients, so that nothing cancels. The parts are added in a fixed
order. In passing each program notes Σⱼ (Eᵢⱼ - e)·qⱼ for every key i: what the variance's gradient needs of the queries.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.coefficients import NormState
from kronattn.ops.triton.attend import TRITON_DTYPES, load_tokens
from kronattn.ops.triton.averages import averages_forward
from kronattn.ops.triton.blocks import grid_offsets, matmul, token_offsets
from kronattn.ops.triton.launch import empty, launch, recorded
from kronattn.ops.triton.layout import alignment, flat
from kronattn.ops.triton.rules import dot_precision, layer_plan

__all__ = ["mean_token", "statistics_of", "summarise"]


@triton.jit
def mean_token(b_k, count):
    """The mean of (tokens, channels), zero past the end: that of the keys, and of the queries just so."""
    return tl.sum(b_k.to(tl.float32), axis=0) / count


@triton.jit
def moments_kernel(
    query,
    keys,
    parts,
    pulled,
    q_n,
    q_c,
    q_p,
    positions,
    key_count,
    splits,
    per_split,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    WITH_PULLED: tl.constexpr,
    Q_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    DT: tl.constexpr,
):
    """A part: how many coefficients, Σ (E - e), Σ (E - e)², e. ``pulled`` is (splits, N, S, C)."""
    split = tl.program_id(0) % splits
    nh = tl.program_id(0) // splits
    n = (nh // H).to(tl.int64)
    head = nh % H
    batch = (tl.num_programs(0) // splits // H).to(tl.int64)
    first = split * per_split
    last = tl.minimum(first + per_split, positions)
    b_d = tl.arange(0, BD)
    b_s = tl.arange(0, BS)
    query += n * q_n * ALIGN + (head * D if Q_LAST else head * D * q_c * ALIGN)
    b_k = load_tokens(keys + n * key_count * (H * D) + head * D, b_s, b_d, key_count, H * D, D, DT)
    b_mean = mean_token(b_k, key_count)
    typical = tl.sum(b_mean * b_mean, axis=0) * scale

    b_sum = tl.zeros([BM], tl.float32)
    b_squares = tl.zeros([BM], tl.float32)
    b_pulled = tl.zeros([BS, BD], tl.float32)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_inside = (b_m < last)[:, None]
        p_q = query + grid_offsets(b_m, b_d, q_p, q_c, Q_LAST, ALIGN)
        b_q = tl.load(p_q, mask=b_inside & (b_d < D)[None, :], other=0.0).to(DT)
        b_e = matmul(b_q, tl.trans(b_k), PRECISION) * scale - typical
        b_e = tl.where(b_inside & (b_s < key_count)[None, :], b_e, 0.0)
        b_sum += tl.sum(b_e, axis=1)
        b_squares += tl.sum(b_e * b_e, axis=1)
        if WITH_PULLED:
            b_pulled += matmul(tl.trans(b_e.to(DT)), b_q, PRECISION)
    part = tl.program_id(0).to(tl.int64) * 4
    tl.store(parts + part, (last - first).to(tl.float32) * key_count)
    tl.store(parts + part + 1, tl.sum(b_sum, axis=0))
    tl.store(parts + part + 2, tl.sum(b_squares, axis=0))
    tl.store(parts + part + 3, typical)
    if WITH_PULLED:
        p_pulled = pulled + (split * batch + n) * key_count * (H * D) + head * D + token_offsets(b_s, b_d, H * D)
        tl.store(p_pulled, b_pulled, mask=(b_s < key_count)[:, None] & (b_d < D)[None, :])


@triton.jit
def finish_moments_kernel(
    parts,
    mean,
    variance,
    running_mean,
    running_var,
    batches,
    count,
    splits,
    momentum,
    members,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean and variance of each head's coefficients from ``count`` parts; the running ones follow them."""
    head = tl.program_id(0)
    b_i = tl.arange(0, BLOCK)
    b_total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        b_part = start + b_i
        p_part = parts + ((b_part // splits * H + head) * splits + b_part % splits) * 4
        b_in = b_part < count
        b_members = tl.load(p_part, mask=b_in, other=0.0)
        b_total += tl.load(p_part + 1, mask=b_in, other=0.0) + b_members * tl.load(p_part + 3, mask=b_in, other=0.0)
    average = tl.sum(b_total, axis=0) / members
    b_total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        b_part = start + b_i
        p_part = parts + ((b_part // splits * H + head) * splits + b_part % splits) * 4
        b_in = b_part < count
        b_members = tl.load(p_part, mask=b_in, other=0.0)
        b_off = tl.load(p_part + 3, mask=b_in, other=0.0) - average
        b_total += tl.load(p_part + 2, mask=b_in, other=0.0)
        b_total += tl.where(b_in, b_off * (2.0 * tl.load(p_part + 1, mask=b_in, other=0.0) + b_members * b_off), 0.0)
    squares = tl.sum(b_total, axis=0)
    tl.store(mean + head, average)
    tl.store(variance + head, squares / members)
    old_mean = tl.load(running_mean + head).to(tl.float32)
    old_var = tl.load(running_var + head).to(tl.float32)
    new_mean = old_mean + momentum * (average - old_mean)
    new_var = old_var + momentum * (squares / (members - 1) - old_var)
    tl.store(running_mean + head, new_mean.to(running_mean.dtype.element_ty))
    tl.store(running_var + head, new_var.to(running_var.dtype.element_ty))
    if head == 0:
        tl.store(batches, tl.load(batches) + 1)


@recorded
def summarise(
    x: Tensor,
    mode: str,
    num_heads: int,
    scale: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    momentum: float,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Averages of (N, C, height, width) and, given running statistics, moments of its coefficients.

    The running statistics are brought up to date, as by a batch norm in training.

    Returns:
        tokens (N, width + height, C) in x's dtype; mean and variance (num_heads,) in float32; what the variance's
        gradient needs of the queries, (parts, N, width + height, C) in float32, if ``with_gradient``.
    """
    batch, channels, height, width = x.shape
    tokens = averages_forward(x, height, width, dtype=x.dtype)
    if running_mean is None:
        return tokens, None, None, None
    head, key_count = channels // num_heads, height + width
    query = x if mode == "kv" else tokens.transpose(1, 2)
    query, strides = flat(query)
    positions = height * width if mode == "kv" else key_count
    plan = layer_plan(batch * num_heads, head, head, positions, key_count, x.element_size(), mode)
    align = alignment(strides)
    programs = batch * num_heads * plan.splits
    parts = empty((programs, 4), torch.float32, x.device)
    pulled = empty((plan.splits, *tokens.shape), torch.float32, x.device) if with_gradient else None
    launch(
        moments_kernel,
        (programs,),
        query,
        tokens,
        parts,
        parts if pulled is None else pulled,
        *strides.over(align),
        positions,
        key_count,
        plan.splits,
        plan.per_split,
        scale,
        num_heads,
        head,
        plan.block_positions,
        plan.block_keys,
        plan.block_channels,
        with_gradient,
        strides.channels_last,
        align,
        dot_precision(x.dtype),
        TRITON_DTYPES[x.dtype],
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    mean, variance = (empty((num_heads,), torch.float32, x.device) for _ in range(2))
    launch(
        finish_moments_kernel,
        (num_heads,),
        parts,
        mean,
        variance,
        running_mean,
        running_var,
        batches,
        batch * plan.splits,
        plan.splits,
        momentum,
        float(batch * positions * key_count),
        num_heads,
        1024,
        num_warps=8,
    )
    return tokens, mean, variance, pulled


def statistics_of(norm: NormState | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, float]:
    """What :func:`summarise` is to bring up to date: nothing where running statistics are only read."""
    if norm is None or not norm.of_the_batch:
        return None, None, None, 0.0
    return norm.running_mean, norm.running_var, norm.batches, norm.momentum
