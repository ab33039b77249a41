"""Softmax attention between two sets of vectors, the best plain PyTorch can do: the torch backend's engine.

Vectors are columns, as in the paper: (..., d, m) queries, (..., d, n) keys and (..., p, n) values give (..., p, m),
with any strides, where ... is a batch or a batch and heads. Three ways to the same result:

- on the CPU, blocks of queries whose coefficients fit in the cache, in float32 at least;
- elsewhere, and wherever a graph is captured (torch.compile, torch.export, tracing), PyTorch's fused attention;
- its gradient, recomputed from the inputs. Coefficients are never kept between forward and backward, and the
  gradient is itself differentiable, which PyTorch's fused attention is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kronattn.ops.autocast import without_autocast
from kronattn.ops.compat import under_transform
from kronattn.ops.fx import is_captured

__all__ = ["at_least_float32", "attend"]

# Coefficients in one block: up to four megabytes of float32. Measured at 8×56²×8 on two cores: smaller blocks spend
# more time in calls and leave a core idle, larger ones are no faster.
_BLOCK = 2**20


def attend(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None = None) -> Tensor:
    """V·Softmax(KᵀQ + bias) for each sample (and head), over columns.

    Args:
        query: (N, d, m) or (N, H, d, m).
        key: (N, d, n) or (N, H, d, n), any scale already multiplied in.
        value: (N, p, n) or (N, H, p, n).
        key_bias: (H, n) or, for each sample, (N, H, n), added to every coefficient of a key before the softmax.

    Returns:
        (N, p, m) or (N, H, p, m) in query's dtype.
    """
    captured = is_captured()
    if query.dim() == 3 and (captured or not _runs_in_blocks(query)):
        # The fused kernels want heads.
        return attend(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), key_bias).squeeze(1)
    if captured:
        with without_autocast(query):
            return _fused(query, key, value, key_bias).transpose(-2, -1)
    with without_autocast(query):
        if torch.is_grad_enabled() and _any_requires_grad(query, key, value, key_bias):
            output = _Attend.apply(query, key, value, key_bias)
        else:
            output = _forward(query, key, value, key_bias)
    # Views are taken here: one made inside an autograd function could not be modified in place by the caller.
    if query.dim() == 4 and _runs_in_blocks(query):
        output = output.unflatten(0, query.shape[:2])
    return output.transpose(-2, -1) if _gives_rows(query) else output


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _runs_in_blocks(query: Tensor) -> bool:
    return query.device.type == "cpu"


def _gives_rows(query: Tensor) -> bool:
    """Whether outputs are made as rows: where a query's channels lie side by side, the output's do too."""
    return not _runs_in_blocks(query) or query.stride(-2) == 1


def _forward(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> Tensor:
    """(N·H, p, m) or (N·H, m, p) from blocks; (N, H, m, p) from the fused kernels."""
    if _runs_in_blocks(query):
        return _in_blocks(query, key, value, key_bias)
    return _fused(query, key, value, key_bias)


def _fused(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> Tensor:
    mask = None if key_bias is None else key_bias.unsqueeze(-2).to(query.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(0)
    return F.scaled_dot_product_attention(
        _rows(query), _rows(key.to(query.dtype)), _rows(value.to(query.dtype)), attn_mask=mask, scale=1.0
    )


def _rows(columns: Tensor) -> Tensor:
    """Columns as rows, in the only layout that the fused kernels take: each vector in one piece."""
    rows = columns.transpose(-2, -1)
    if not is_captured() and rows.shape[-2] == 1:
        # Of a single vector any stride to the next would do, but the kernels insist on an aligned one.
        return rows.contiguous().flatten().view(rows.shape)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> Tensor:
    by_rows = _gives_rows(query)
    query, key, value, bias = _merged(query, key, value, key_bias)
    if under_transform():
        return _in_functional_blocks(query, key, value, bias, by_rows)
    samples, positions = _block_shape(query, key)
    # One buffer for all blocks: memory that is new to the process costs more than the arithmetic on it.
    buffer = key.new_empty(samples, positions, key.shape[2])
    if samples >= query.shape[0] and positions == query.shape[2]:
        return _block(query, key, value, bias, by_rows, buffer)
    shape = (query.shape[2], value.shape[1]) if by_rows else (value.shape[1], query.shape[2])
    output = query.new_empty(query.shape[0], *shape)
    for at, parts in _blocks(query, key):
        for part in parts:
            block = _block(query[at, :, part], key[at], value[at], None if bias is None else bias[at], by_rows, buffer)
            output[(at, part) if by_rows else (at, slice(None), part)] = block
    return output


def _in_functional_blocks(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, by_rows: bool) -> Tensor:
    """The same without writing into anything, which a transform such as vmap cannot do."""
    output = [
        _concatenate(
            [
                _block(query[at, :, part], key[at], value[at], None if bias is None else bias[at], by_rows)
                for part in parts
            ],
            1 if by_rows else 2,
        )
        for at, parts in _blocks(query, key)
    ]
    return _concatenate(output, 0)


def _block(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, by_rows: bool, buffer: Tensor | None = None
) -> Tensor:
    """(B, p, m), or (B, m, p) by rows, for one block; in a buffer of at least (B, m, n) if there is one."""
    room = buffer
    if buffer is not None and buffer.shape[:2] != (query.shape[0], query.shape[2]):
        room = buffer[: query.shape[0], : query.shape[2]]
    weights = _coefficients(query, key, bias, room)
    output = torch.bmm(weights, value.transpose(1, 2)) if by_rows else torch.bmm(value, weights.transpose(1, 2))
    return output if output.dtype == query.dtype else output.to(query.dtype)


def _merged(
    query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Samples and heads as one batch, keys and values in float32 at least, and each sample's bias, (B, 1, n)."""
    bias = key_bias
    if bias is not None:
        bias = (bias.repeat(query.shape[0], 1) if bias.dim() == 2 else bias.flatten(0, 1)).unsqueeze(1)
    if query.dim() == 4:
        query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    return query, at_least_float32(key), at_least_float32(value), bias


def _coefficients(query: Tensor, key: Tensor, bias: Tensor | None, room: Tensor | None = None) -> Tensor:
    """(B, m, n): one row a query, so that the softmax runs along memory."""
    queries = at_least_float32(query).transpose(1, 2)
    if room is None:
        logits = torch.bmm(queries, key) if bias is None else torch.baddbmm(bias, queries, key)
        return logits.softmax(dim=-1)
    torch.bmm(queries, key, out=room)
    if bias is not None:
        room += bias
    return torch.softmax(room, dim=-1, out=room)


def _block_shape(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Samples and, where a single one is too much, positions, for about ``_BLOCK`` coefficients at a time."""
    batch, _, queries = query.shape
    keys = key.shape[2]
    samples = min(max(1, _BLOCK // (queries * keys)), max(1, batch))
    if samples > 1:
        return samples, queries
    parts = -(-queries * keys // _BLOCK)
    return 1, -(-queries // parts)


def _blocks(query: Tensor, key: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """The same blocks as slices of samples and of positions; an empty batch still makes one, empty, block."""
    samples, positions = _block_shape(query, key)
    parts = [slice(start, start + positions) for start in range(0, query.shape[2], positions)]
    for start in range(0, max(query.shape[0], 1), samples):
        yield slice(start, start + samples), parts


class _Attend(torch.autograd.Function):
    """The forward above with a gradient that recomputes, block by block, and can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> Tensor:
        return _forward(query, key, value, key_bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_bias = ctx.saved_tensors
        if query.dim() == 4 and _runs_in_blocks(query):
            gradient = gradient.unflatten(0, query.shape[:2])
        if _gives_rows(query):
            gradient = gradient.transpose(-2, -1)
        with without_autocast(gradient):
            if _runs_in_blocks(query) or torch.is_grad_enabled():
                return _gradients(query, key, value, key_bias, gradient)
            return _fused_gradients((query, key, value, key_bias), gradient, ctx.needs_input_grad)


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None, gradient: Tensor
) -> tuple[Tensor | None, ...]:
    q_all, k_all, v_all, bias = _merged(query, key, value, key_bias)
    dy_all = gradient.flatten(0, -3)
    d_query, d_key, d_value, d_bias = [], [], [], []
    for samples, positions in _blocks(q_all, k_all):
        k, v, b = k_all[samples], v_all[samples], None if bias is None else bias[samples]
        row, dk, dv, db = [], torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(k[:, 0])
        for part in positions:
            q = at_least_float32(q_all[samples, :, part])
            dy = at_least_float32(dy_all[samples, :, part])
            weights = _coefficients(q, k, b)
            d_weights = torch.bmm(dy.transpose(1, 2), v)
            d_logits = weights * (d_weights - (weights * d_weights).sum(dim=-1, keepdim=True))
            row.append(torch.bmm(k, d_logits.transpose(1, 2)).to(query.dtype))
            dk = dk + torch.bmm(q, d_logits)
            dv = dv + torch.bmm(dy, weights)
            if key_bias is not None:
                db = db + d_logits.sum(dim=1)
        d_query.append(_concatenate(row, -1))
        d_key.append(dk)
        d_value.append(dv)
        d_bias.append(db)

    def whole(parts: list[Tensor], like: Tensor) -> Tensor:
        return _concatenate(parts, 0).view_as(like).to(like.dtype)

    d_key_bias = None
    if key_bias is not None:
        d_key_bias = _concatenate(d_bias, 0).unflatten(0, (-1, key_bias.shape[-2]))
        d_key_bias = (d_key_bias.sum(dim=0) if key_bias.dim() == 2 else d_key_bias).to(key_bias.dtype)
    return whole(d_query, query), whole(d_key, key), whole(d_value, value), d_key_bias


def _fused_gradients(inputs: Sequence[Any], gradient: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The fused kernels' own backward, on a forward run again for it."""
    with torch.enable_grad():
        leaves: list[Any] = [
            None if x is None else x.detach().requires_grad_(wants) for x, wants in zip(inputs, needed, strict=True)
        ]
        query, key, value, key_bias = leaves
        output = _fused(query, key, value, key_bias)
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    gradients = iter(torch.autograd.grad(output, wanted, gradient.transpose(-2, -1)))
    return tuple(next(gradients) if x is not None and x.requires_grad else None for x in leaves)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision in float32, anything wider as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
