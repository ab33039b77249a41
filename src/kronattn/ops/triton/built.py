"""Coefficients that were built: their statistics, the softmax, and its gradient with that of the statistics.

A matrix has one row for each query: what sets its n keys apart, what they share, zeros, and perhaps scores of classes
that were multiplied out along with them (see :mod:`kronattn.ops.built`). Programs walk down ranges of rows. What has to
be known of all rows, each program notes of its own; whoever needs it adds the parts up, in a fixed order, every time:
they are few, and a kernel that did so once would take longer to launch.

The weights that come out have a one after the softmax of the n keys: values are differences from their mean, then the
mean, so that a product with them adds the mean back. What is still to the right are zeros.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kronattn.ops.gpu import aligned
from kronattn.ops.triton.blocks import LOG2E
from kronattn.ops.triton.launch import empty, launch, recorded
from kronattn.ops.triton.rules import built_plan, class_block

__all__ = ["weights_backward", "weights_forward"]


@triton.jit
def row_offsets(b_r, columns_over):
    """Where rows start, (rows, 1). All have their columns in eights, and the compiler then loads as many at once."""
    return b_r.to(tl.int64)[:, None] * (columns_over * 8)


@triton.jit
def load_block(x, b_r, b_j, last, limit_over, columns_over):
    """Rows b_r before ``last`` and columns b_j before ``limit_over`` eights in float32, zeros elsewhere.

    A limit in between would have the columns loaded one by one: callers mask what they do not want.
    """
    b_mask = (b_r < last)[:, None] & (b_j < limit_over * 8)[None, :]
    return tl.load(x + row_offsets(b_r, columns_over) + b_j[None, :], mask=b_mask, other=0.0).to(tl.float32)


@triton.jit
def store_block(x, b_x, b_r, b_j, last, limit_over, columns_over):
    b_mask = (b_r < last)[:, None] & (b_j < limit_over * 8)[None, :]
    tl.store(x + row_offsets(b_r, columns_over) + b_j[None, :], b_x.to(x.dtype.element_ty), mask=b_mask)


@triton.jit
def statistics_kernel(
    matrix, parts, rows, count, room_over, columns_over, per_program, BM: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """Parts (4, programs): squares of what sets keys apart; and of what they share the first, how far the mean is from
    it, and squared deviations.

    Sums of the latter are of differences from the program's first row, so that a large mean takes nothing away.
    """
    first = tl.program_id(0) * per_program
    last = tl.minimum(first + per_program, rows)
    b_j = tl.arange(0, BS)
    start = tl.load(matrix + first.to(tl.int64) * (columns_over * 8) + count).to(tl.float32)
    b_apart = tl.zeros([BM], tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_squares = tl.zeros([BM], tl.float32)
    for r in tl.range(first, last, BM):
        b_r = r + tl.arange(0, BM)
        b_e = load_block(matrix, b_r, b_j, last, room_over, columns_over)
        b_shared = tl.sum(tl.where((b_j == count)[None, :], b_e, 0.0), axis=1)
        b_e = tl.where((b_j < count)[None, :], b_e, 0.0)
        b_apart += tl.sum(b_e * b_e, axis=1)
        b_shared = tl.where(b_r < last, b_shared - start, 0.0)
        b_sum += b_shared
        b_squares += b_shared * b_shared
    members = (last - first).to(tl.float32)
    total = tl.sum(b_sum, axis=0)
    p_part = parts + tl.program_id(0)
    tl.store(p_part, tl.sum(b_apart, axis=0))
    tl.store(p_part + tl.num_programs(0), start)
    tl.store(p_part + 2 * tl.num_programs(0), total / members)
    tl.store(p_part + 3 * tl.num_programs(0), tl.sum(b_squares, axis=0) - total * total / members)


@triton.jit
def merged(parts, programs, rows, count, per_program, BP: tl.constexpr):
    """Mean and squared deviations of all coefficients."""
    b_p = tl.arange(0, BP)
    b_in = b_p < programs
    b_members = tl.minimum(rows - b_p * per_program, per_program).to(tl.float32)
    b_apart = tl.load(parts + b_p, mask=b_in, other=0.0)
    start = tl.load(parts + programs)
    b_off = tl.load(parts + programs + b_p, mask=b_in, other=0.0) - start
    b_off += tl.load(parts + 2 * programs + b_p, mask=b_in, other=0.0)
    b_squares = tl.load(parts + 3 * programs + b_p, mask=b_in, other=0.0)
    off = tl.sum(tl.where(b_in, b_members * b_off, 0.0), axis=0) / rows
    b_squares += tl.where(b_in, b_members * (b_off - off) * (b_off - off), 0.0)
    # What sets keys apart adds up to zero at each query, so the squares of the two parts are all there is.
    return start + off, tl.sum(b_apart, axis=0) + count * tl.sum(b_squares, axis=0)


@triton.jit
def follow(running, current, momentum):
    """Move a running statistic towards this batch's."""
    old = tl.load(running).to(tl.float32)
    tl.store(running, (old + momentum * (current - old)).to(running.dtype.element_ty))


@triton.jit
def weights_kernel(
    matrix,
    parts,
    gain,
    running_mean,
    running_var,
    batches,
    bias,
    norm,
    weights,
    scores,
    rows,
    count,
    room_over,
    columns_over,
    classes,
    classes_over,
    programs,
    per_program,
    members,
    momentum,
    eps,
    BM: tl.constexpr,
    BS: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    OF_BATCH: tl.constexpr,
    SCORES: tl.constexpr,
    BIAS: tl.constexpr,
):
    """``norm`` is (3,): the scale, 1 / deviation, the mean. ``scores`` are the classes' columns plus their bias."""
    scale = 1.0
    if NORM:
        if OF_BATCH:
            mean, squares = merged(parts, programs, rows, count, per_program, BP)
            variance = squares / members
        else:
            mean = tl.load(running_mean).to(tl.float32)
            variance = tl.load(running_var).to(tl.float32)
        root = tl.rsqrt(variance + eps)
        scale = tl.load(gain).to(tl.float32) * root
        if tl.program_id(0) == 0:
            tl.store(norm, scale)
            tl.store(norm + 1, root)
            tl.store(norm + 2, mean)
            if OF_BATCH:
                follow(running_mean, mean, momentum)
                follow(running_var, squares / (members - 1), momentum)
                tl.store(batches, tl.load(batches) + 1)
    first = tl.program_id(0) * per_program
    last = tl.minimum(first + per_program, rows)
    b_j = tl.arange(0, BS)
    for r in tl.range(first, last, BM):
        b_r = r + tl.arange(0, BM)
        b_e = load_block(matrix, b_r, b_j, last, room_over, columns_over) * (scale * LOG2E)
        b_e = tl.where((b_j < count)[None, :], b_e, float("-inf"))
        b_e = tl.exp2(b_e - tl.max(b_e, axis=1)[:, None])
        b_e = b_e / tl.sum(b_e, axis=1)[:, None]
        b_e = tl.where((b_j == count)[None, :], 1.0, b_e)
        store_block(weights, b_e, b_r, b_j, last, room_over, room_over)
        if SCORES:
            for k in range(0, classes_over * 8, BK):
                b_k = k + tl.arange(0, BK)
                b_s = load_block(matrix + room_over * 8, b_r, b_k, last, classes_over, columns_over)
                b_s = tl.where((b_k < classes)[None, :], b_s, 0.0)
                if BIAS:
                    b_s += tl.load(bias + b_k, mask=b_k < classes, other=0.0).to(tl.float32)[None, :]
                store_block(scores, b_s, b_r, b_k, last, classes_over, classes_over)


@triton.jit
def logits_gradient(weights, d_weights, b_r, b_j, last, count, room_over):
    """What the softmax's input receives: (rows, keys), zero past the keys."""
    b_keys = (b_j < count)[None, :]
    b_w = tl.where(b_keys, load_block(weights, b_r, b_j, last, room_over, room_over), 0.0)
    b_dw = tl.where(b_keys, load_block(d_weights, b_r, b_j, last, room_over, room_over), 0.0)
    return b_w * (b_dw - tl.sum(b_w * b_dw, axis=1)[:, None])


@triton.jit
def scale_gradient_kernel(
    matrix, weights, d_weights, parts, rows, count, room_over, columns_over, per_program,
    BM: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Parts (programs,) of what the scale of all coefficients receives."""
    first = tl.program_id(0) * per_program
    last = tl.minimum(first + per_program, rows)
    b_j = tl.arange(0, BS)
    b_sum = tl.zeros([BM], tl.float32)
    for r in tl.range(first, last, BM):
        b_r = r + tl.arange(0, BM)
        b_d = logits_gradient(weights, d_weights, b_r, b_j, last, count, room_over)
        b_e = load_block(matrix, b_r, b_j, last, room_over, columns_over)
        b_sum += tl.sum(b_d * tl.where((b_j < count)[None, :], b_e, 0.0), axis=1)
    tl.store(parts + tl.program_id(0), tl.sum(b_sum, axis=0))


@triton.jit
def matrix_gradient_kernel(
    matrix,
    weights,
    d_weights,
    d_scores,
    parts,
    norm,
    d_matrix,
    d_gain,
    rows,
    count,
    room_over,
    columns_over,
    classes_over,
    programs,
    per_program,
    members,
    BM: tl.constexpr,
    BS: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    OF_BATCH: tl.constexpr,
    SCORES: tl.constexpr,
):
    """All columns of ``d_matrix``: the keys' own, the shared one, zeros, and the classes' as they are."""
    scale = 1.0
    mean = 0.0
    pull = 0.0
    if NORM:
        scale = tl.load(norm)
        root = tl.load(norm + 1)
        b_p = tl.arange(0, BP)
        d_scale = tl.sum(tl.load(parts + b_p, mask=b_p < programs, other=0.0), axis=0)
        if tl.program_id(0) == 0:
            tl.store(d_gain, (d_scale * root).to(d_gain.dtype.element_ty))
        if OF_BATCH:
            mean = tl.load(norm + 2)
            # The scale is gain · (sum of squares / members + ε)^-½, and each coefficient's square is in that sum.
            pull = -d_scale * scale * root * root / members
    first = tl.program_id(0) * per_program
    last = tl.minimum(first + per_program, rows)
    b_j = tl.arange(0, BS)
    for r in tl.range(first, last, BM):
        b_r = r + tl.arange(0, BM)
        b_d = logits_gradient(weights, d_weights, b_r, b_j, last, count, room_over) * scale
        if OF_BATCH:
            b_e = load_block(matrix, b_r, b_j, last, room_over, columns_over)
            b_d += tl.where((b_j == count)[None, :], (b_e - mean) * (pull * count), b_e * pull)
        store_block(d_matrix, b_d, b_r, b_j, last, room_over, columns_over)
        if SCORES:
            for k in range(0, classes_over * 8, BK):
                b_k = k + tl.arange(0, BK)
                b_s = load_block(d_scores, b_r, b_k, last, classes_over, classes_over)
                store_block(d_matrix + room_over * 8, b_s, b_r, b_k, last, classes_over, columns_over)


@recorded
def weights_forward(
    matrix: Tensor,
    count: int,
    gain: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    momentum: float,
    eps: float,
    of_the_batch: bool,
    bias: Tensor | None,
    classes: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Softmax of ``count`` coefficients, normed where there is a gain, with a one and zeros to the right of them.

    The running statistics follow the batch's where those are used, as by a batch norm in training.

    Args:
        matrix: (N, m, aligned(count + 1) + aligned(classes)).
        gain, running_mean, running_var: (1,) each.
        bias: (classes,).

    Returns:
        weights: (N, m, aligned(count + 1)) in matrix's dtype.
        norm: (3,) in float32: what coefficients were multiplied by, that over the gain, and their mean.
        scores: (N, m, aligned(classes)), the classes' columns plus the bias.
    """
    batch, queries, columns = matrix.shape
    rows, room, device = batch * queries, aligned(count + 1), matrix.device
    bias = None if bias is None else bias.contiguous()
    plan = built_plan(rows, room)
    weights = empty((batch, queries, room), matrix.dtype, device)
    norm = None if gain is None else empty((3,), torch.float32, device)
    scores = empty((batch, queries, aligned(classes)), matrix.dtype, device) if classes else None
    parts = matrix
    if of_the_batch:
        parts = empty((4, plan.programs), torch.float32, device)
        launch(
            statistics_kernel,
            (plan.programs,),
            matrix, parts, rows, count, room // 8, columns // 8, plan.per_program, plan.block_rows, plan.block_keys,
            num_warps=plan.warps,
        )  # fmt: skip
    launch(
        weights_kernel,
        (plan.programs,),
        matrix,
        parts,
        # What there is not is not read.
        *(matrix if x is None else x for x in (gain, running_mean, running_var, batches, bias, norm)),
        weights,
        matrix if scores is None else scores,
        rows,
        count,
        room // 8,
        columns // 8,
        classes,
        aligned(classes) // 8,
        plan.programs,
        plan.per_program,
        float(rows * count),
        momentum,
        eps,
        plan.block_rows,
        plan.block_keys,
        plan.block_parts,
        class_block(classes),
        gain is not None,
        of_the_batch,
        classes > 0,
        bias is not None,
        num_warps=plan.warps,
    )
    return weights, norm, scores


@recorded
def weights_backward(
    matrix: Tensor,
    weights: Tensor,
    d_weights: Tensor,
    d_scores: Tensor | None,
    norm: Tensor | None,
    gain: Tensor | None,
    count: int,
    of_the_batch: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the matrix and of the gain, from those of what :func:`weights_forward` gave."""
    batch, queries, columns = matrix.shape
    rows, room, device = batch * queries, weights.shape[2], matrix.device
    classes = columns - room
    plan = built_plan(rows, room)
    d_matrix = empty(matrix.shape, matrix.dtype, device)
    d_gain, parts = None, matrix
    if gain is not None:
        d_gain = empty((1,), gain.dtype, device)
        parts = empty((plan.programs,), torch.float32, device)
        launch(
            scale_gradient_kernel,
            (plan.programs,),
            matrix, weights, d_weights, parts, rows, count, room // 8, columns // 8, plan.per_program,
            plan.block_rows, plan.block_keys,
            num_warps=plan.warps,
        )  # fmt: skip
    launch(
        matrix_gradient_kernel,
        (plan.programs,),
        matrix,
        weights,
        d_weights,
        matrix if d_scores is None else d_scores,
        parts,
        matrix if norm is None else norm,
        d_matrix,
        matrix if d_gain is None else d_gain,
        rows,
        count,
        room // 8,
        columns // 8,
        classes // 8,
        plan.programs,
        plan.per_program,
        float(rows * count),
        plan.block_rows,
        plan.block_keys,
        plan.block_parts,
        class_block(classes),
        gain is not None,
        of_the_batch,
        d_scores is not None,
        num_warps=plan.warps,
    )
    return d_matrix, d_gain
