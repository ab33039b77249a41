"""Softmax attention between two sets of vectors, the best plain PyTorch can do: the torch backend's engine.

Vectors are columns, as in the paper: (..., d, m) queries, (..., d, n) keys and (..., p, n) values give (..., p, m),
with any strides, where ... is a batch, or a batch and its heads. Three ways to the same result:

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


def attend(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None = None, *, num_heads: int = 1) -> Tensor:
    """V·Softmax(KᵀQ + bias) for each sample and head, over columns.

    Args:
        query: (N, C, m).
        key: (N, C, n), any scale already multiplied in.
        value: (N, P, n).
        key_bias: (num_heads, n) or, for each sample, (N, num_heads, n), added to every coefficient of a key before the
            softmax.
        num_heads: divides C and P.

    Returns:
        (N, P, m) in query's dtype, with channels side by side where the query's are.
    """
    captured = is_captured()
    in_blocks = not captured and _runs_in_blocks(query)
    inputs: Any = query, key, value, key_bias
    # The fused kernels want heads, also where there is one.
    if num_heads > 1 or not in_blocks:
        inputs = *(x.unflatten(1, (num_heads, -1)) for x in inputs[:3]), key_bias
    with without_autocast(query):
        if captured:
            output = _fused(*inputs)
        else:
            records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
            # Blocks are differentiable by themselves, also forward; the fused attention is not twice.
            output = (_Attend.apply if records and not (in_blocks and under_transform()) else _forward)(*inputs)
    # Views are taken here: one made inside an autograd function could not be modified in place by the caller.
    if num_heads > 1 and in_blocks:
        output = output.unflatten(0, (query.shape[0], num_heads))
    if captured or _gives_rows(inputs[0]):
        output = output.transpose(-2, -1)
    if num_heads == 1:
        return output if in_blocks else output.squeeze(1)
    # Head after head, and channels side by side where the query's are.
    by_rows = query.stride(1) == 1
    return output.permute(0, 3, 1, 2).flatten(2).transpose(1, 2) if by_rows else output.flatten(1, 2)


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
    samples, positions = _block_shape(query, key)
    # One buffer for all blocks: memory that is new to the process costs more than the arithmetic on it. A transform
    # such as vmap cannot write into anything.
    transformed = under_transform()
    if samples >= query.shape[0] and positions == query.shape[2]:
        return _block(query, key, value, bias, by_rows, in_place=not transformed)
    buffer = None if transformed else key.new_empty(samples, positions, key.shape[2])

    def block(at: slice, part: slice) -> Tensor:
        bias_part = None if bias is None else bias[at]
        return _block(query[at, :, part], key[at], value[at], bias_part, by_rows, buffer, in_place=not transformed)

    if transformed:
        along = 1 if by_rows else 2
        return torch.cat([torch.cat([block(at, x) for x in parts], dim=along) for at, parts in _blocks(query, key)])
    shape = (query.shape[2], value.shape[1]) if by_rows else (value.shape[1], query.shape[2])
    output = query.new_empty(query.shape[0], *shape)
    for at, parts in _blocks(query, key):
        for part in parts:
            output[(at, part) if by_rows else (at, slice(None), part)] = block(at, part)
    return output


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    by_rows: bool,
    buffer: Tensor | None = None,
    *,
    in_place: bool,
) -> Tensor:
    """(B, p, m), or (B, m, p) by rows, for one block; in a buffer of at least (B, m, n) if there is one."""
    if buffer is not None and buffer.shape[:2] != (query.shape[0], query.shape[2]):
        buffer = buffer[: query.shape[0], : query.shape[2]]
    weights = _coefficients(query, key, bias, buffer, in_place=in_place)
    output = torch.bmm(weights, value.transpose(1, 2)) if by_rows else torch.bmm(value, weights.transpose(1, 2))
    return output if output.dtype == query.dtype else output.to(query.dtype)


def _merged(
    query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Samples and heads as one batch, keys and values in float32 at least, and each sample's bias, (B, 1, n)."""
    bias = key_bias
    if bias is not None:
        bias = (bias.repeat(query.shape[0], 1) if bias.dim() == 2 else bias.flatten(0, 1)).unsqueeze(1)
        bias = at_least_float32(bias)
    if query.dim() == 4:
        query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    return query, at_least_float32(key), at_least_float32(value), bias


def _coefficients(
    query: Tensor, key: Tensor, bias: Tensor | None, room: Tensor | None = None, *, in_place: bool = False
) -> Tensor:
    """(B, m, n): one row a query, so that the softmax runs along memory; in ``room``, if there is any."""
    queries = at_least_float32(query).transpose(1, 2)
    if room is None:
        logits = torch.bmm(queries, key) if bias is None else torch.baddbmm(bias, queries, key)
    else:
        logits = torch.bmm(queries, key, out=room)
        logits = logits if bias is None else logits.add_(bias)
    return torch.softmax(logits, dim=-1, out=logits) if in_place else logits.softmax(dim=-1)


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
    rows = []
    for samples, positions in _blocks(q_all, k_all):
        k, v, b = k_all[samples], v_all[samples], None if bias is None else bias[samples]
        d_queries, dk, dv, db = [], torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(k[:, 0])
        for part in positions:
            q = at_least_float32(q_all[samples, :, part])
            dy = at_least_float32(dy_all[samples, :, part])
            weights = _coefficients(q, k, b)
            d_weights = torch.bmm(dy.transpose(1, 2), v)
            d_logits = weights * (d_weights - (weights * d_weights).sum(dim=-1, keepdim=True))
            d_queries.append(torch.bmm(k, d_logits.transpose(1, 2)).to(query.dtype))
            dk = dk + torch.bmm(q, d_logits)
            dv = dv + torch.bmm(dy, weights)
            if key_bias is not None:
                db = db + d_logits.sum(dim=1)
        rows.append((_concatenate(d_queries, -1), dk, dv, db))
    *whole, d_bias = (_concatenate(list(parts), 0) for parts in zip(*rows, strict=True))
    d_key_bias = None
    if key_bias is not None:
        d_bias = d_bias.unflatten(0, (-1, key_bias.shape[-2]))
        d_key_bias = (d_bias.sum(dim=0) if key_bias.dim() == 2 else d_bias).to(key_bias.dtype)
    return *(d.view_as(x).to(x.dtype) for d, x in zip(whole, (query, key, value), strict=True)), d_key_bias


def _fused_gradients(inputs: Sequence[Any], gradient: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The fused kernels' own backward, on a forward run again for it."""
    with torch.enable_grad():
        leaves: Any = [x if x is None else x.detach().requires_grad_(w) for x, w in zip(inputs, needed, strict=True)]
        output = _fused(*leaves)
    wanted = [x for x, wants in zip(leaves, needed, strict=True) if wants]
    gradients = iter(torch.autograd.grad(output, wanted, gradient.transpose(-2, -1)))
    return tuple(next(gradients) if wants else None for wants in needed)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision in float32, anything wider as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
