"""Batch statistics of the coefficient matrix E = KᵀQ, from keys and queries alone: E is never built.

With q = q̄ + q' and k = k̄ + k' (a mean and what is left of it, over the positions of one sample), the four parts
of k·q are orthogonal when summed over positions, so the sum of squared deviations within a sample is

    Σᵢⱼ (kᵢ·qⱼ - k̄·q̄)² = n·k̄ᵀGk̄ + m·q̄ᵀFq̄ + <F, G>,   G = Σⱼ q'ⱼq'ⱼᵀ,  F = Σᵢ k'ᵢk'ᵢᵀ

with d×d matrices F and G. Every term is a sum of squares, so nothing cancels, whatever the means are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Moments", "coefficient_moments"]


class Moments(NamedTuple):
    """How many coefficients a channel has, their mean, and the sum of their squared deviations from it."""

    members: int
    mean: Tensor
    squares: Tensor


def coefficient_moments(query: Tensor, key: Tensor, *, per_key: bool = False) -> Moments:
    """Mean and squared deviations of KᵀQ over the batch, for each head or for each key of each head.

    Args:
        query: (N, H, d, m) queries as columns.
        key: (N, H, d, n) keys as columns.
        per_key: one channel for each key, over samples and queries; else one for each head.

    Returns:
        Moments whose tensors are (H,), or (H, n) with ``per_key``, in float32 at least.

    Example:
        >>> q, k = torch.randn(4, 1, 8, 50), torch.randn(4, 1, 8, 15)
        >>> built = k.transpose(-2, -1) @ q
        >>> members, mean, squares = coefficient_moments(q, k)
        >>> torch.allclose(squares / members, built.var(dim=(0, 2, 3), correction=0), rtol=1e-4)
        True
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    samples, _, _, queries = query.shape
    keys = key.shape[-1]
    query_mean = query.mean(dim=-1, keepdim=True, dtype=wide)
    # Subtracting a float32 mean widens half precision in the same pass.
    spread = query - query_mean
    gram = spread @ spread.transpose(-2, -1)
    key = key.to(wide)

    if per_key:
        means = (key.transpose(-2, -1) @ query_mean).squeeze(-1)  # (N, H, n), each key's mean over its queries
        within = (key * (gram @ key)).sum(dim=-2)
        in_sample = queries
    else:
        key_mean = key.mean(dim=-1, keepdim=True)
        key_spread = key - key_mean
        key_gram = key_spread @ key_spread.transpose(-2, -1)
        means = (key_mean * query_mean).sum(dim=(-2, -1))  # (N, H)
        within = (
            keys * _quadratic(gram, key_mean)
            + queries * _quadratic(key_gram, query_mean)
            + (gram * key_gram).sum(dim=(-2, -1))
        )
        in_sample = queries * keys
    mean = means.mean(dim=0)
    squares = (within + in_sample * (means - mean).square()).sum(dim=0)
    return Moments(samples * in_sample, mean, squares)


def _quadratic(matrix: Tensor, vector: Tensor) -> Tensor:
    return (vector * (matrix @ vector)).sum(dim=(-2, -1))
