"""The paper's equations, written literally: the oracle that every other backend is tested against.

Nothing here is fast and nothing is clever. The coefficient matrix is materialised, the averages are taken one
axis at a time, and half-precision input is computed in float32. Tensors are (N, C, *grid) for any number of axes.

Equation numbers are those of *Kronecker Attention Networks* (KDD 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attention", "axis_averages", "coefficients", "kronecker_attention", "outer_sum"]


def axis_averages(x: Tensor) -> Tensor:
    """C = [Hᵀ, Lᵀ]: for each axis, last axis first, the average over all the other axes.

    ``x`` is (N, C, *grid); the result is (N, C, sum(grid)). On a height × width grid, H averages the rows (one
    vector for each of the w columns) and L averages the columns (one for each of the h rows).
    """
    axes = range(2, x.dim())
    averages = []
    for kept in reversed(axes):
        others = [axis for axis in axes if axis != kept]
        averages.append(x.mean(dim=others) if others else x)
    return torch.cat(averages, dim=-1)


def outer_sum(tokens: Tensor, grid: Sequence[int]) -> Tensor:
    """Y = H̃ ⊕ L̃ (outer sum): each position gets the sum of its axes' vectors.

    ``tokens`` is (N, C, sum(grid)), last axis first; the result is (N, C, *grid).
    """
    batch, channels, _ = tokens.shape
    total = tokens.new_zeros((batch, channels, *grid))
    start = 0
    for axis in reversed(range(len(grid))):
        vector = tokens[..., start : start + grid[axis]]
        shape = [batch, channels] + [1] * len(grid)
        shape[2 + axis] = grid[axis]
        total = total + vector.reshape(shape)
        start += grid[axis]
    return total


def coefficients(
    query: Tensor,
    key: Tensor,
    scale: float | Tensor = 1.0,
    *,
    axes: Sequence[int] | None = None,
    there: tuple[Tensor | None, Tensor | None] = (None, None),
    norm: Tensor | None = None,
    sample_norm: Tensor | None = None,
) -> Tensor:
    """Softmax(s·KᵀQ) over the keys, one column a query: (N, d, m) and (N, d, n) give (N, n, m).

    With ``axes``, how many keys each axis has, a softmax for each, with equal parts of the weight. ``there`` says which
    of the (N, m) queries and (N, n) keys are: from others no query gets anything. ``norm`` is the weight of a batch
    norm of all coefficients that are there, ``sample_norm`` that of a norm of each sample by what its keys, minus their
    mean, have with each other.
    """
    # As rows: along memory PyTorch adds up in pieces, across it term by term, and rounds as often.
    logits = scale * (query.transpose(1, 2) @ key)
    queries, keys = (mask if mask is None else mask.unsqueeze(dim) for mask, dim in zip(there, (2, 1), strict=True))
    if norm is not None:
        counts = torch.ones_like(logits, dtype=torch.bool)
        for mask in (queries, keys):
            counts = counts if mask is None else counts & mask
        variance = logits[counts].var(correction=0) if counts.any() else logits.new_zeros(())
        logits = logits * (norm * torch.rsqrt(variance + 1e-5))
    if sample_norm is not None:
        masks = [None] * len(key) if there[1] is None else there[1]
        kept = [k if mask is None or not mask.any() else k[:, mask] for k, mask in zip(key, masks, strict=True)]
        among = [(k - k.mean(dim=1, keepdim=True)).t() @ k for k in kept]
        factors = [sample_norm * torch.rsqrt(matrix.square().mean() + 1e-5) for matrix in among]
        logits = logits * torch.stack(factors).view(-1, 1, 1)
    if keys is not None:
        logits = logits.masked_fill(~(keys | ~keys.any(dim=2, keepdim=True)), -torch.inf)
    parts = [part.softmax(dim=2) for part in logits.split(list(axes or [logits.shape[2]]), dim=2)]
    return (torch.cat(parts, dim=2) / len(parts)).transpose(1, 2)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_heads: int = 1,
    scale: float | Tensor = 1.0,
    norm: Tensor | None = None,
    sample_norm: Tensor | None = None,
    kept: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Eq. 1, O = V·Softmax(KᵀQ), head by head, on the flattened grids: the result is (N, p, *query's grid).

    ``norm`` and ``sample_norm`` are (num_heads,), ``kept`` (N, num_heads, n) what dropout multiplies each key's
    coefficients by; for other options see :func:`coefficients`.
    """
    dtype, grid = query.dtype, query.shape[2:]
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    query, key, value = query.flatten(2), key.flatten(2), value.flatten(2)
    scales = torch.as_tensor(scale, dtype=query.dtype, device=query.device).expand(num_heads)
    heads = []
    for head, (q, k, v) in enumerate(zip(*(x.chunk(num_heads, 1) for x in (query, key, value)), strict=True)):
        own, sample = (None if each is None else each[head] for each in (norm, sample_norm))
        matrix = coefficients(q, k, scales[head], norm=own, sample_norm=sample, **options)
        heads.append(v @ (matrix if kept is None else matrix * kept[:, head].unsqueeze(2)))
    output = torch.cat(heads, dim=1)
    return output.reshape(*output.shape[:2], *grid).to(dtype)


def kronecker_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mode: str = "kv",
    num_heads: int = 1,
    scale: float | Tensor = 1.0,
    mean: str = "each",
    softmax: str = "joint",
    combine: str = "sum",
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    positions: Sequence[Tensor] | None = None,
    cosine: bool = False,
    **options: Any,
) -> Tensor:
    """KAO_KV: attn(X, C, C). KAO_QKV: attn(C, C, C), and the outer sum of what comes out.

    Each axis's part of that sum carries the mean of the whole. With ``mean="once"``, y = Σ (tₐ - (1 - 1/d)·mean(tₐ))
    over the d axes: what Theorem 1 asks for. With ``combine="product"``, y = Π tₐ · (m / r²)ᵈ⁻¹, where m is the mean
    of the tokens and r² the mean of their squares. All means are over positions that are there.

    ``positions`` are (L, C) tables of vectors, one for each axis, first axis first, added to queries and keys; a
    position's is the sum of its axes'. With ``cosine``, queries and keys then get the length one. Options are those of
    :func:`attention`.
    """
    dtype, grid, key_grid = query.dtype, query.shape[2:], key.shape[2:]
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    counts, key_counts = _counts(mask), _counts(key_mask)
    key, value = _averages(key, key_mask), _averages(value, key_mask)
    query = _averages(query, mask) if mode == "qkv" else query
    if positions is not None:
        key = key + _places(positions, key_grid, key_counts, len(key))
        places = _places(positions, grid, counts, len(key))
        query = query + (places if mode == "qkv" else outer_sum(places, grid))
    if cosine:
        query, key = (_unit(x.unflatten(1, (num_heads, -1))).flatten(1, 2) for x in (query, key))
    asking = (counts if mode == "qkv" else mask.flatten(1)) if mask is not None else None
    there = tuple(x if x is None else x > 0 for x in (asking, key_counts))
    axes = list(reversed(key_grid)) if softmax == "per_axis" else None
    y = attention(query, key, value, num_heads=num_heads, scale=scale, axes=axes, there=there, **options)
    if mode == "qkv":
        y = _combined(y, grid, counts, mean, combine)
    return (y if mask is None else y * mask.unsqueeze(1)).to(dtype)


def _counts(mask: Tensor | None) -> Tensor | None:
    """(N, sum(grid)): how many positions each token is the average of."""
    if mask is None:
        return None
    axes = range(1, mask.dim())
    return torch.cat([mask.movedim(axis, 1).flatten(2).sum(2) if len(axes) > 1 else mask for axis in reversed(axes)], 1)


def _averages(x: Tensor, mask: Tensor | None) -> Tensor:
    """Averages of what is there; zero where nothing is."""
    if mask is None:
        return axis_averages(x)
    there = mask.unsqueeze(1).to(x.dtype)
    shares = axis_averages(there)
    return axis_averages(x * there) / shares.where(shares > 0, 1)


def _places(tables: Sequence[Tensor], grid: Sequence[int], counts: Tensor | None, batch: int) -> Tensor:
    """(N, C, sum(grid)): each axis's (L, C) table, resized as an image is to the number of places that are there."""
    counts = torch.ones(batch, sum(grid), device=tables[0].device) if counts is None else counts
    samples = []
    for each in counts:
        vectors = []
        for table, count in zip(reversed(tables), each.split(list(reversed(grid))), strict=True):
            vector, there = table.new_zeros(table.shape[1], len(count)), count.nonzero().flatten()
            if len(there):
                resized = F.interpolate(table.t()[None], size=len(there), mode="linear", align_corners=False)[0]
                vector = vector.index_copy(1, there, resized)
            vectors.append(vector)
        samples.append(torch.cat(vectors, dim=1))
    return torch.stack(samples)


def _unit(heads: Tensor) -> Tensor:
    """(N, H, d, ...) of length one along d; nothing stays nothing."""
    return heads / (heads.square().sum(dim=2, keepdim=True) + 1e-12).sqrt()


def _combined(tokens: Tensor, grid: Sequence[int], counts: Tensor | None, mean: str, combine: str) -> Tensor:
    """(N, P, sum(grid)) tokens to (N, P, *grid), where each is the average of so many positions."""
    sizes, axes = list(reversed(grid)), len(grid)
    weights = tokens.new_ones(len(tokens), 1, sum(grid)) if counts is None else counts.unsqueeze(1).to(tokens.dtype)
    weights = torch.cat([w / w.sum(dim=2, keepdim=True).clamp_min(1) for w in weights.split(sizes, dim=2)], dim=2)
    parts, weighted = tokens.split(sizes, dim=2), (tokens * weights).split(sizes, dim=2)
    if combine == "sum":
        excess = 1 - 1 / axes if mean == "once" else 0
        once = [part - excess * w.sum(dim=2, keepdim=True) for part, w in zip(parts, weighted, strict=True)]
        return outer_sum(torch.cat(once, dim=2), grid)
    ratio = (tokens * weights).sum(dim=2) / axes / ((tokens.square() * weights).sum(dim=2) / axes + 1e-12)
    product = (ratio ** (axes - 1)).reshape(*tokens.shape[:2], *[1] * axes)
    for axis, part in zip(reversed(range(axes)), parts, strict=True):
        product = product * part.reshape([*tokens.shape[:2]] + [grid[axis] if a == axis else 1 for a in range(axes)])
    return product
