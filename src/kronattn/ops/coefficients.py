"""Batch statistics of the coefficient matrix E = KᵀQ, from keys and queries alone: E is never materialised.

With q = q̄ + q' and k = k̄ + k' (a mean and what is left of it, over the positions of one sample), the four parts
of k·q are uncorrelated over positions, so the variance within a sample is

    mean over i, j of (kᵢ·qⱼ - k̄·q̄)² = k̄ᵀGk̄ + q̄ᵀFq̄ + <F, G>

with the d×d covariances G of the queries and F of the keys. Every term is a mean of squares, so nothing cancels,
whatever the means are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Moments", "coefficient_moments", "masked_moments", "token_moments"]


class Moments(NamedTuple):
    """How many coefficients a channel has, their mean, and the sum of their squared deviations from it.

    The number is a tensor where a mask says which coefficients count.
    """

    members: int | Tensor
    mean: Tensor
    squares: Tensor


def coefficient_moments(
    query: Tensor, key: Tensor, *, per_key: bool = False, query_mean: Tensor | None = None
) -> Moments:
    """Mean and squared deviations of KᵀQ over the batch, for each head or for each key of each head.

    Args:
        query: (N, H, d, m) queries as columns.
        key: (N, H, d, n) keys as columns.
        per_key: one channel for each key, over samples and queries; else one for each head.
        query_mean: (N, H, d, 1), the mean query of each sample where it is known already.

    Returns:
        Moments whose tensors are (H,), or (H, n) with ``per_key``, in float32 at least.

    Example:
        >>> q, k = torch.randn(4, 1, 8, 50), torch.randn(4, 1, 8, 15)
        >>> matrix = k.transpose(-2, -1) @ q
        >>> members, mean, squares = coefficient_moments(q, k)
        >>> torch.allclose(squares / members, matrix.var(dim=(0, 2, 3), correction=0), rtol=1e-4)
        True
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    if query_mean is None:
        query_mean = query.mean(dim=-1, keepdim=True, dtype=wide)
    query_mean, key = query_mean.to(wide), key.to(wide)
    query_covariance = _covariance(query, query_mean)
    if per_key:
        in_sample = query.shape[-1]
        means = (key.transpose(-2, -1) @ query_mean).squeeze(-1)  # (N, H, n), each key's mean over its queries
        within = (key * (query_covariance @ key)).sum(dim=-2)
    else:
        in_sample = query.shape[-1] * key.shape[-1]
        key_mean = key.mean(dim=-1, keepdim=True)
        means, within = _of_samples(query_mean, query_covariance, key_mean, _covariance(key, key_mean))
    mean = means.mean(dim=0)
    squares = in_sample * (within + (means - mean).square()).sum(dim=0)
    return Moments(query.shape[0] * in_sample, mean, squares)


def token_moments(queries: Tensor, keys: Tensor, *, num_heads: int = 1) -> Moments:
    """The same for (N, M, C) queries and (N, S, C) keys that are both few: E is small, and materialised.

    Example:
        >>> q, k = torch.randn(4, 9, 8), torch.randn(4, 7, 8)
        >>> whole = coefficient_moments(q.transpose(1, 2).unsqueeze(1), k.transpose(1, 2).unsqueeze(1))
        >>> torch.allclose(token_moments(q, k).squares, whole.squares, rtol=1e-4)
        True
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    rows = [x.to(wide).unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (queries, keys)]
    matrix = rows[0] @ rows[1].transpose(-2, -1)
    variance, mean = torch.var_mean(matrix, dim=(0, 2, 3), correction=0)
    members = matrix.shape[0] * matrix.shape[2] * matrix.shape[3]
    return Moments(members, mean, variance * members)


def masked_moments(query: Tensor, key: Tensor, query_mask: Tensor, key_mask: Tensor) -> Moments:
    """:func:`coefficient_moments` for each head of the (N, m) queries and (N, n) keys that are there.

    Example:
        >>> q, k = torch.randn(4, 1, 8, 50), torch.randn(4, 1, 8, 15)
        >>> whole, all_there = coefficient_moments(q, k), [torch.ones(4, n, dtype=torch.bool) for n in (50, 15)]
        >>> torch.allclose(masked_moments(q, k, *all_there).squares, whole.squares, rtol=1e-4)
        True
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    (count, q, g), (key_count, k, f) = (_masked(x.to(wide), m) for x, m in ((query, query_mask), (key, key_mask)))
    in_sample = (count * key_count).flatten(1)  # (N, 1)
    members = in_sample.sum()
    means, within = _of_samples(q, g, k, f)
    mean = (in_sample * means).sum(dim=0) / members.clamp_min(1)
    return Moments(members, mean, (in_sample * (within + (means - mean).square())).sum(dim=0))


def _masked(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many of (N, H, d, m) are there, (N, 1, 1, 1), their mean and their covariance; of nothing, zero."""
    there = mask[:, None, None].to(x.dtype)
    count = there.sum(dim=-1, keepdim=True)
    mean = (x * there).sum(dim=-1, keepdim=True) / count.clamp_min(1)
    deviations = (x - mean) * there
    return count, mean, deviations @ deviations.transpose(-2, -1) / count.clamp_min(1)


def _covariance(x: Tensor, mean: Tensor) -> Tensor:
    """(N, H, d, m) and their means (N, H, d, 1) to (N, H, d, d), in the dtype of the means.

    Half precision stays half on its way through the tensor cores, which add up in float32: what the mean loses by
    rounding is of second order, and the quotient keeps the sums within float16's range.
    """
    spread = (x - mean.to(x.dtype)).flatten(0, 1)
    product = torch.baddbmm(spread.new_zeros(()), spread, spread.transpose(1, 2), beta=0, alpha=1.0 / x.shape[-1])
    return product.unflatten(0, x.shape[:2]).to(mean.dtype)


def _of_samples(q: Tensor, g: Tensor, k: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each sample's coefficients, (N, H), by the formula above; q and k are the means."""
    parts = k * (g @ k), q * (f @ q), f * g
    within = parts[0].sum(dim=(-2, -1)) + parts[1].sum(dim=(-2, -1)) + parts[2].sum(dim=(-2, -1))
    return (k * q).sum(dim=(-2, -1)), within
