"""Softmax attention between two sets of vectors, at the best plain PyTorch can do: the torch backend's engine.

Vectors are columns, as in the paper: (N, H, d, m) queries, (N, H, d, n) keys and (N, H, p, n) values give
(N, H, p, m), with any strides. Three ways to the same result, one for each place it is needed in:

- on the CPU, blocks of queries whose coefficients fit in the cache, in float32 at least;
- elsewhere, and wherever a graph is captured (torch.compile, torch.export, tracing), PyTorch's fused attention;
- its gradient, recomputed from the inputs. Coefficients are never kept between forward and backward, and the
  gradient is itself differentiable, which PyTorch's fused attention is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend"]

# Coefficients in one block. A megabyte of float32 stays in a core's cache beside the softmax of it; measured
# on 8×56²×8, larger blocks are no faster, and blocks under half of this spend their time in calls.
_BLOCK = 2**18


def attend(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None = None) -> Tensor:
    """V·Softmax(KᵀQ + bias) for each head, over columns.

    Args:
        query: (N, H, d, m).
        key: (N, H, d, n), any scale already multiplied in.
        value: (N, H, p, n).
        key_bias: (H, n), added to every coefficient of a key before the softmax.

    Returns:
        (N, H, p, m) in query's dtype.
    """
    with _without_autocast(query):
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return _fused(query, key, value, key_bias).transpose(-2, -1)
        inputs = (query, key, value, key_bias)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
            output = _Attend.apply(*inputs)
        else:
            output = _forward(*inputs)
    # Views are taken here: one made inside an autograd function could not be modified in place by the caller.
    if _runs_in_blocks(query):
        output = output.unflatten(0, query.shape[:2])
    return output.transpose(-2, -1) if _gives_rows(query) else output


def _runs_in_blocks(query: Tensor) -> bool:
    return query.device.type == "cpu"


def _gives_rows(query: Tensor) -> bool:
    """Whether outputs are made as rows: where a query's channels lie side by side, the output's do too."""
    return not _runs_in_blocks(query) or query.stride(-2) == 1


def _forward(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> Tensor:
    """(N·H, p, m) or (N·H, m, p) from blocks, (N, H, m, p) from the fused kernels."""
    if _runs_in_blocks(query):
        return _in_blocks(query, key, value, key_bias)
    return _fused(query, key, value, key_bias)


def _fused(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> Tensor:
    mask = None if key_bias is None else key_bias[None, :, None, :].to(query.dtype)
    return F.scaled_dot_product_attention(
        _rows(query), _rows(key.to(query.dtype)), _rows(value.to(query.dtype)), attn_mask=mask, scale=1.0
    )


def _rows(columns: Tensor) -> Tensor:
    """Columns as rows, in the only layout that the fused kernels take: each vector in one piece."""
    rows = columns.transpose(-2, -1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> Tensor:
    by_rows = _gives_rows(query)
    query, key, value, bias = _merged(query, key, value, key_bias)
    output = []
    for samples, positions in _blocks(query, key):
        row = []
        for part in positions:
            bias_part = bias if key_bias is None else bias[samples]
            weights = _coefficients(query[samples, :, part], key[samples], bias_part)
            if by_rows:
                block = torch.bmm(weights, value[samples].transpose(1, 2))
            else:
                block = torch.bmm(value[samples], weights.transpose(1, 2))
            row.append(block.to(query.dtype))
        output.append(_concatenate(row, 1 if by_rows else 2))
    return _concatenate(output, 0)


def _merged(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> tuple[Tensor, ...]:
    """Samples and heads as one batch, keys and values in float32 at least, and what to add to the coefficients."""
    key, value = _at_least_float32(key.flatten(0, 1)), _at_least_float32(value.flatten(0, 1))
    bias = key.new_zeros(()) if key_bias is None else key_bias.repeat(query.shape[0], 1).unsqueeze(1)
    return query.flatten(0, 1), key, value, bias


def _coefficients(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
    """(B, m, n): one row a query, so that the softmax runs along memory."""
    queries = _at_least_float32(query).transpose(1, 2)
    logits = torch.bmm(queries, key) if bias.dim() == 0 else torch.baddbmm(bias, queries, key)
    return logits.softmax(dim=-1)


def _blocks(query: Tensor, key: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Samples and, where a single one is too much, positions, for about ``_BLOCK`` coefficients at a time."""
    batch, _, queries = query.shape
    keys = key.shape[-1]
    samples = max(1, _BLOCK // (queries * keys))
    positions = queries if samples > 1 else max(1, min(queries, _BLOCK // keys))
    parts = [slice(start, start + positions) for start in range(0, queries, positions)]
    # An empty batch still makes one (empty) block, which gives the output its shape.
    for start in range(0, max(batch, 1), samples):
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
        if _runs_in_blocks(query):
            gradient = gradient.unflatten(0, query.shape[:2])
        if _gives_rows(query):
            gradient = gradient.transpose(-2, -1)
        with _without_autocast(gradient):
            if gradient.device.type == "cpu" or torch.is_grad_enabled():
                return _gradients(query, key, value, key_bias, gradient)
            return _fused_gradients((query, key, value, key_bias), gradient, ctx.needs_input_grad)


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None, gradient: Tensor
) -> tuple[Tensor | None, ...]:
    heads = query.shape[:2]
    q_all, k_all, v_all, bias = _merged(query, key, value, key_bias)
    dy_all = gradient.flatten(0, 1)
    d_query, d_key, d_value, d_bias = [], [], [], []
    for samples, positions in _blocks(q_all, k_all):
        k, v, b = k_all[samples], v_all[samples], bias if key_bias is None else bias[samples]
        row, dk, dv, db = [], torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(k[:, 0])
        for part in positions:
            q = _at_least_float32(q_all[samples, :, part])
            dy = _at_least_float32(dy_all[samples, :, part])
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
        return _concatenate(parts, 0).unflatten(0, heads).to(like.dtype)

    d_key_bias = None if key_bias is None else whole(d_bias, key_bias).sum(dim=0)
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


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off: it would round the coefficients to half precision in the middle of the computation."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
