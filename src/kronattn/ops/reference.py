"""The paper's equations, written literally: the oracle that every other backend is tested against.

Nothing here is fast and nothing is clever. The coefficient matrix is built, the averages are taken one axis at
a time, and half-precision input is computed in float32. Tensors are (N, C, *grid) for any number of axes.

Equation numbers are those of *Kronecker Attention Networks* (KDD 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
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


def coefficients(query: Tensor, key: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Softmax(s·KᵀQ) over the keys, one column a query: (N, d, m) and (N, d, n) give (N, n, m)."""
    # As rows: along memory PyTorch adds up in pieces, across it term by term, and rounds as often.
    return torch.softmax(scale * (query.transpose(1, 2) @ key), dim=2).transpose(1, 2)


def attention(query: Tensor, key: Tensor, value: Tensor, *, num_heads: int = 1, scale: float | Tensor = 1.0) -> Tensor:
    """Eq. 1, O = V·Softmax(KᵀQ), head by head, on the flattened grids: the result is (N, p, *query's grid)."""
    dtype, grid = query.dtype, query.shape[2:]
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    query, key, value = query.flatten(2), key.flatten(2), value.flatten(2)
    scales = torch.as_tensor(scale, dtype=query.dtype, device=query.device).expand(num_heads)
    heads = [
        v @ coefficients(q, k, s)
        for q, k, v, s in zip(
            query.chunk(num_heads, 1), key.chunk(num_heads, 1), value.chunk(num_heads, 1), scales, strict=True
        )
    ]
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
) -> Tensor:
    """KAO_KV: attn(X, C, C). KAO_QKV: attn(C, C, C), and the outer sum of what comes out.

    Each axis's part of that sum carries the mean of the whole. With ``mean="once"``, y = Σ (tₐ - (1 - 1/d)·mean(tₐ))
    over the d axes: what Theorem 1 asks for.
    """
    dtype, grid = query.dtype, query.shape[2:]
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    key, value = axis_averages(key), axis_averages(value)
    if mode == "kv":
        return attention(query, key, value, num_heads=num_heads, scale=scale).to(dtype)
    tokens = attention(axis_averages(query), key, value, num_heads=num_heads, scale=scale)
    if mean == "once":
        parts = tokens.split(list(reversed(grid)), dim=-1)
        excess = 1 - 1 / len(grid)
        tokens = torch.cat([part - excess * part.mean(dim=-1, keepdim=True) for part in parts], dim=-1)
    return outer_sum(tokens, grid).to(dtype)
