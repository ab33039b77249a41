"""The backward of a whole attention layer: attention, batch norm of its coefficients, averages, skip connection.

With E = scale·KᵀQ, logits L = f·E where f = gain/√(variance + eps), the gradient of E is f·dL + c·(E - mean): through
the softmax, and through the variance. The number c is known only once every sample has been seen, so there are two
passes. The first gives the gradients of keys and values and each program's share of Σ dL·E. The second writes the
input's gradient, all of it, while x and dy are read once more.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.triton.attend import TRITON_DTYPES, load_bias, load_tokens, normed_scale
from kronattn.ops.triton.averages import averages_forward
from kronattn.ops.triton.blocks import LOG2E, grid_offsets, matmul, token_offsets
from kronattn.ops.triton.launch import empty, launch, recorded
from kronattn.ops.triton.layout import alignment, empty_like_grid, flat, flat_strides
from kronattn.ops.triton.moments import mean_token
from kronattn.ops.triton.outer import outer_sum_forward
from kronattn.ops.triton.rules import dot_precision, layer_plan, multiplies_tokens_exactly

__all__ = ["input_gradient", "token_gradients"]


@triton.jit
def logit_gradient(b_q, b_k, b_v, b_dy, b_bias, scale, normed, PRECISION: tl.constexpr):
    """E, the softmax's coefficients, and the gradient of its logits: (queries, keys), in float32."""
    b_e = matmul(b_q, tl.trans(b_k), PRECISION)
    b_a = b_e * (normed * LOG2E) + b_bias[None, :]
    b_a = tl.exp2(b_a - tl.max(b_a, axis=1)[:, None])
    b_a *= (1.0 / tl.sum(b_a, axis=1))[:, None]
    b_da = matmul(b_dy, tl.trans(b_v), PRECISION)
    return b_e * scale, b_a, b_a * (b_da - tl.sum(b_a * b_da, axis=1)[:, None])


@triton.jit
def token_gradients_kernel(
    query,
    keys,
    values,
    d_y,
    variance,
    gain,
    d_keys,
    d_values,
    shares,
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
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ITSELF: tl.constexpr,
    Q_LAST: tl.constexpr,
    DY_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    DT: tl.constexpr,
):
    """The first pass. ``d_keys`` and ``d_values`` are (splits, N, S, channels): dL·Q, and the values' gradient.

    ITSELF: the queries are the keys, all in one tile, and what they receive as queries is added.
    """
    split = tl.program_id(0) % splits
    nh = tl.program_id(0) // splits
    n = (nh // H).to(tl.int64)
    head = nh % H
    batch = (tl.num_programs(0) // splits // H).to(tl.int64)
    first = split * per_split
    last = tl.minimum(first + per_split, positions)
    b_d = tl.arange(0, BD)
    b_c = tl.arange(0, BDV)
    b_s = tl.arange(0, BS)
    query += n * q_n * ALIGN + (head * D if Q_LAST else head * D * q_c * ALIGN)
    d_y += n * dy_n * ALIGN + (head * DV if DY_LAST else head * DV * dy_c * ALIGN)
    b_k = load_tokens(keys + n * key_count * (H * D) + head * D, b_s, b_d, key_count, H * D, D, DT)
    b_v = load_tokens(values + n * key_count * (H * DV) + head * DV, b_s, b_c, key_count, H * DV, DV, DT)
    b_bias = load_bias(keys, b_s, key_count, False)
    normed = normed_scale(scale, variance, gain, eps, head, HAS_NORM)

    b_dk = tl.zeros([BS, BD], tl.float32)
    b_dv = tl.zeros([BS, BDV], tl.float32)
    b_share = tl.zeros([BM], tl.float32)
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_inside = (b_m < last)[:, None]
        p_q = query + grid_offsets(b_m, b_d, q_p, q_c, Q_LAST, ALIGN)
        b_q = tl.load(p_q, mask=b_inside & (b_d < D)[None, :], other=0.0).to(DT)
        p_dy = d_y + grid_offsets(b_m, b_c, dy_p, dy_c, DY_LAST, ALIGN)
        b_dy = tl.load(p_dy, mask=b_inside & (b_c < DV)[None, :], other=0.0).to(DT)
        b_e, b_a, b_ds = logit_gradient(b_q, b_k, b_v, b_dy, b_bias, scale, normed, PRECISION)
        b_dv += matmul(tl.trans(b_a.to(DT)), b_dy, PRECISION)
        if HAS_NORM:
            b_share += tl.sum(b_ds * b_e, axis=1)
        b_dk += matmul(tl.trans(b_ds.to(DT)), b_q, PRECISION)
        if ITSELF:
            b_dk += matmul(b_ds.to(DT), b_k, PRECISION)

    part = split * batch + n
    b_exists = (b_s < key_count)[:, None]
    p_dk = d_keys + part * key_count * (H * D) + head * D + token_offsets(b_s, b_d, H * D)
    tl.store(p_dk, b_dk, mask=b_exists & (b_d < D)[None, :])
    p_dv = d_values + part * key_count * (H * DV) + head * DV + token_offsets(b_s, b_c, H * DV)
    tl.store(p_dv, b_dv.to(d_values.dtype.element_ty), mask=b_exists & (b_c < DV)[None, :])
    if HAS_NORM:
        tl.store(shares + tl.program_id(0), tl.sum(b_share, axis=0))


@triton.jit
def finish_shares_kernel(
    shares, variance, gain, d_gain, pull, count, splits, eps, over, H: tl.constexpr, BLOCK: tl.constexpr
):
    """Each head's gain gradient, and c: Σ dL·E is what the factor f receives; ``over`` is 2 / members, or 0."""
    head = tl.program_id(0)
    b_i = tl.arange(0, BLOCK)
    b_total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        b_part = start + b_i
        b_total += tl.load(
            shares + (b_part // splits * H + head) * splits + b_part % splits, mask=b_part < count, other=0.0
        )
    received = tl.sum(b_total, axis=0)
    inverse = tl.rsqrt(tl.load(variance + head).to(tl.float32) + eps)
    tl.store(d_gain + head, received * inverse)
    d_variance = -0.5 * received * tl.load(gain + head).to(tl.float32) * inverse * inverse * inverse
    tl.store(pull + head, d_variance * over)


@triton.jit
def add_values_kernel(parts, output, count, size, BLOCK: tl.constexpr):
    b_i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for part in range(count):
        b_sum += tl.load(parts + part * size.to(tl.int64) + b_i, mask=b_i < size, other=0.0)
    tl.store(output + b_i, b_sum.to(output.dtype.element_ty), mask=b_i < size)


@triton.jit
def finish_tokens_kernel(
    tokens,
    d_keys,
    pulled,
    mapped,
    mean,
    variance,
    gain,
    pull,
    d_tokens,
    key_count,
    width,
    key_parts,
    pulled_parts,
    query_count,
    column_scale,
    row_scale,
    scale,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OF_BATCH: tl.constexpr,
    ITSELF: tl.constexpr,
):
    """What a sample's averages receive in all, times column_scale or row_scale: scale·(f·dL + c·(E - mean))·Q, and
    the part that came through the values, ``mapped``."""
    n = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    batch = (tl.num_programs(0) // H).to(tl.int64)
    b_s = tl.arange(0, BS)
    b_d = tl.arange(0, BD)
    b_mask = (b_s < key_count)[:, None] & (b_d < D)[None, :]
    b_at = head * D + token_offsets(b_s, b_d, H * D)
    size = key_count * (H * D)
    b_total = tl.zeros([BS, BD], tl.float32)
    for part in range(key_parts):
        b_total += tl.load(d_keys + (part * batch + n) * size + b_at, mask=b_mask, other=0.0)
    b_total *= normed_scale(scale, variance, gain, eps, head, HAS_NORM)
    if OF_BATCH:
        b_k = tl.load(tokens + n * size + b_at, mask=b_mask, other=0.0)
        b_mean = mean_token(b_k, key_count)
        typical = tl.sum(b_mean * b_mean, axis=0) * scale
        b_pulled = tl.zeros([BS, BD], tl.float32)
        for part in range(pulled_parts):
            b_pulled += tl.load(pulled + (part * batch + n) * size + b_at, mask=b_mask, other=0.0)
        b_pulled += ((typical - tl.load(mean + head)) * query_count * b_mean)[None, :]
        b_total += b_pulled * (tl.load(pull + head) * scale * (2.0 if ITSELF else 1.0))
    b_total += tl.load(mapped + n * size + b_at, mask=b_mask, other=0.0).to(tl.float32)
    b_total *= tl.where(b_s < width, column_scale, row_scale)[:, None]
    tl.store(d_tokens + n * size + b_at, b_total, mask=b_mask)


@triton.jit
def input_gradient_kernel(
    query,
    keys,
    values,
    d_y,
    mean,
    variance,
    gain,
    pull,
    d_tokens,
    d_x,
    q_n,
    q_c,
    q_p,
    dy_n,
    dy_c,
    dy_p,
    dx_n,
    dx_c,
    dx_p,
    positions,
    key_count,
    width,
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
    HAS_NORM: tl.constexpr,
    OF_BATCH: tl.constexpr,
    SKIP: tl.constexpr,
    Q_LAST: tl.constexpr,
    DY_LAST: tl.constexpr,
    DX_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    DT: tl.constexpr,
):
    """The second pass: what a position receives as a query, as a part of its column's and its row's averages
    (``d_tokens``), and with SKIP by the skip connection."""
    nh = tl.program_id(0) // splits
    n = (nh // H).to(tl.int64)
    head = nh % H
    first = (tl.program_id(0) % splits) * per_split
    last = tl.minimum(first + per_split, positions)
    b_d = tl.arange(0, BD)
    b_c = tl.arange(0, BDV)
    b_s = tl.arange(0, BS)
    query += n * q_n * ALIGN + (head * D if Q_LAST else head * D * q_c * ALIGN)
    d_y += n * dy_n * ALIGN + (head * DV if DY_LAST else head * DV * dy_c * ALIGN)
    d_x += n * dx_n * ALIGN + (head * D if DX_LAST else head * D * dx_c * ALIGN)
    d_tokens += n * key_count * (H * D) + head * D
    b_k = load_tokens(keys + n * key_count * (H * D) + head * D, b_s, b_d, key_count, H * D, D, DT)
    b_v = load_tokens(values + n * key_count * (H * DV) + head * DV, b_s, b_c, key_count, H * DV, DV, DT)
    b_bias = load_bias(keys, b_s, key_count, False)
    normed = normed_scale(scale, variance, gain, eps, head, HAS_NORM)
    if OF_BATCH:
        average = tl.load(mean + head)
        pulls = tl.load(pull + head) * scale
    for start in range(first, last, BM):
        b_m = start + tl.arange(0, BM)
        b_inside = (b_m < last)[:, None]
        b_mask = b_inside & (b_d < D)[None, :]
        p_q = query + grid_offsets(b_m, b_d, q_p, q_c, Q_LAST, ALIGN)
        b_q = tl.load(p_q, mask=b_mask, other=0.0).to(DT)
        p_dy = d_y + grid_offsets(b_m, b_c, dy_p, dy_c, DY_LAST, ALIGN)
        b_dy = tl.load(p_dy, mask=b_inside & (b_c < DV)[None, :], other=0.0).to(DT)
        b_e, _, b_ds = logit_gradient(b_q, b_k, b_v, b_dy, b_bias, scale, normed, PRECISION)
        b_ds *= normed
        if OF_BATCH:
            b_ds += (b_e - average) * pulls
        # Keys past the last are zero, so it does not matter what their logits would have received.
        b_dx = matmul(b_ds.to(DT), b_k, PRECISION)
        b_dx += tl.load(d_tokens + token_offsets(b_m % width, b_d, H * D), mask=b_mask, other=0.0)
        b_dx += tl.load(d_tokens + token_offsets(width + b_m // width, b_d, H * D), mask=b_mask, other=0.0)
        if SKIP:
            p_skip = d_y + grid_offsets(b_m, b_d, dy_p, dy_c, DY_LAST, ALIGN)
            b_dx += tl.load(p_skip, mask=b_mask, other=0.0).to(tl.float32)
        p_dx = d_x + grid_offsets(b_m, b_d, dx_p, dx_c, DX_LAST, ALIGN)
        tl.store(p_dx, b_dx.to(d_x.dtype.element_ty), mask=b_mask)


@recorded
def token_gradients(
    d_y: Tensor,
    x: Tensor,
    tokens: Tensor,
    values: Tensor,
    variance: Tensor | None,
    gain: Tensor | None,
    mode: str,
    num_heads: int,
    scale: float,
    eps: float,
    of_the_batch: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The first pass.

    Returns:
        d_keys (parts, N, S, C) in float32, yet to be multiplied by the scales; d_values (N, S, P) in x's dtype; the
        gain's gradient and what the variance pulls with, (num_heads,) in float32, where there is a norm.
    """
    batch, channels, height, width = x.shape
    key_count, value_channels = height + width, values.shape[2]
    head, value_head = channels // num_heads, value_channels // num_heads
    itself = mode == "qkv"
    if itself:
        positions = key_count
        query = tokens.transpose(1, 2)
        d_received = averages_forward(d_y, height, width, dtype=torch.float32, mean=False).transpose(1, 2)
    else:
        positions, query, d_received = height * width, x, d_y
    query, q_strides = flat(query)
    d_received, dy_strides = flat(d_received)
    align = alignment(q_strides, dy_strides)
    plan = layer_plan(batch * num_heads, head, value_head, positions, key_count, x.element_size(), mode)
    programs = batch * num_heads * plan.splits
    d_keys = empty((plan.splits, *tokens.shape), torch.float32, x.device)
    whole = plan.splits == 1
    d_values = empty(values.shape, x.dtype, x.device)
    value_parts = d_values if whole else empty((plan.splits, *values.shape), torch.float32, x.device)
    exact = itself and multiplies_tokens_exactly(head, value_head, key_count)
    compute = torch.float32 if exact else x.dtype
    has_norm = variance is not None
    shares = empty((programs,), torch.float32, x.device) if has_norm else tokens
    launch(
        token_gradients_kernel,
        (programs,),
        query, tokens, values, d_received,
        tokens if variance is None else variance, tokens if gain is None else gain,
        d_keys, value_parts, shares,
        *q_strides.over(align), *dy_strides.over(align),
        positions, key_count, plan.splits, plan.per_split, scale, eps,
        num_heads, head, value_head,
        plan.block_positions, plan.block_keys, plan.block_channels, plan.block_value_channels,
        has_norm, itself, q_strides.channels_last, dy_strides.channels_last, align,
        dot_precision(compute), TRITON_DTYPES[compute],
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if not whole:
        size = d_values.numel()
        launch(add_values_kernel, (triton.cdiv(size, 1024),), value_parts, d_values, plan.splits, size, 1024)
    if not has_norm:
        return d_keys, d_values, None, None
    d_gain, pull = (empty((num_heads,), torch.float32, x.device) for _ in range(2))
    over = 2.0 / (batch * positions * key_count) if of_the_batch else 0.0
    launch(
        finish_shares_kernel,
        (num_heads,),
        shares, variance, gain, d_gain, pull, batch * plan.splits, plan.splits, eps, over, num_heads, 1024,
    )  # fmt: skip
    return d_keys, d_values, d_gain, pull


@recorded
def input_gradient(
    d_y: Tensor,
    x: Tensor,
    tokens: Tensor,
    values: Tensor,
    d_keys: Tensor,
    mapped: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    gain: Tensor | None,
    pull: Tensor | None,
    pulled: Tensor | None,
    mode: str,
    num_heads: int,
    scale: float,
    eps: float,
    skip: bool,
) -> Tensor:
    """The second pass: the gradient of x, like x.

    Args:
        d_keys, pull: of :func:`token_gradients`.
        mapped: (N, S, C), what the averages receive through the values.
        mean, pulled: of :func:`~kronattn.ops.triton.moments.summarise`; None unless statistics are the batch's.
        skip: x was added to the output.
    """
    batch, channels, height, width = x.shape
    key_count, value_channels = height + width, values.shape[2]
    head, value_head = channels // num_heads, value_channels // num_heads
    itself = mode == "qkv"
    positions = key_count if itself else height * width
    plan = layer_plan(batch * num_heads, head, value_head, positions, key_count, x.element_size(), mode)
    d_tokens = empty(tokens.shape, torch.float32, x.device)
    has_norm, of_batch = variance is not None, pulled is not None
    norm = [tokens if y is None else y for y in (mean, variance, gain, pull)]
    launch(
        finish_tokens_kernel,
        (batch * num_heads,),
        tokens, d_keys, tokens if pulled is None else pulled, mapped, *norm, d_tokens,
        key_count, width, d_keys.shape[0], 0 if pulled is None else pulled.shape[0], float(positions),
        1.0 / height, 1.0 / width, scale, eps,
        num_heads, head, plan.block_keys, plan.block_channels, has_norm, of_batch, itself,
    )  # fmt: skip
    if itself:
        return outer_sum_forward(d_tokens, x, height, width, added=d_y if skip else None)
    x, q_strides = flat(x)
    d_y, dy_strides = flat(d_y)
    d_x = empty_like_grid(x, channels, q_strides.channels_last)
    dx_strides = flat_strides(d_x)
    assert dx_strides is not None
    align = alignment(q_strides, dy_strides, dx_strides)
    launch(
        input_gradient_kernel,
        (batch * num_heads * plan.splits,),
        x, tokens, values, d_y, *norm, d_tokens, d_x,
        *q_strides.over(align), *dy_strides.over(align), *dx_strides.over(align),
        positions, key_count, width, plan.splits, plan.per_split, scale, eps,
        num_heads, head, value_head,
        plan.block_positions, plan.block_keys, plan.block_channels, plan.block_value_channels,
        has_norm, of_batch, skip, q_strides.channels_last, dy_strides.channels_last, dx_strides.channels_last, align,
        dot_precision(x.dtype), TRITON_DTYPES[x.dtype],
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return d_x
