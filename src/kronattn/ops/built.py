"""Attention to few, averaged, keys with its coefficient matrix E = KᵀQ built: products, a softmax, a product.

Averages of features that are not negative are much alike: most of each is their common mean. The softmax does not see
what all keys share, so the mean is taken off before anything is rounded to half precision, and kept beside the rest
as one more column: E's batch statistics do see it.

All of this is differentiated by PyTorch itself; :mod:`kronattn.ops.triton.built_layer` is the same on kernels.
:mod:`kronattn.ops.gpu` says where it is worth it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronattn.ops.coefficients import Moments
from kronattn.ops.gpu import aligned

__all__ = ["attend", "built_moments", "coefficients", "deviations", "restored"]


def deviations(averages: Tensor) -> Tensor:
    """(N, C, n) columns as what they differ from their mean by, then the mean, then zeros: (N, C, aligned(n + 1)).

    Example:
        >>> deviations(torch.tensor([[[1.0, 3.0, 5.0]]]))
        tensor([[[-2.,  0.,  2.,  3.,  0.,  0.,  0.,  0.]]])
    """
    rows = averages.transpose(1, 2)
    mean = rows.mean(dim=1, keepdim=True)
    count = rows.shape[1]
    nothing = mean.new_zeros(()).expand(rows.shape[0], aligned(count + 1) - count - 1, rows.shape[2])
    return torch.cat([rows - mean, mean, nothing], dim=1).transpose(1, 2)


def restored(columns: Tensor, count: int) -> Tensor:
    """The (N, C, count) columns that a linear map of :func:`deviations` stands for."""
    return columns[..., :count] + columns[..., count : count + 1]


def coefficients(query: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """E by rows: what sets keys apart, (N, m, count), and what they share, (N, m, 1).

    Args:
        query: (N, d, m).
        keys: :func:`deviations` of ``count`` keys, or a linear map of them.
    """
    matrix = torch.bmm(query.transpose(1, 2), keys)
    apart, shared, _ = matrix.split([count, 1, keys.shape[2] - count - 1], dim=2)
    return apart, shared


def built_moments(apart: Tensor, shared: Tensor) -> Moments:
    """Batch statistics of E, one head's, as :func:`kronattn.ops.coefficients.coefficient_moments` has them.

    Args:
        apart, shared: what :func:`coefficients` gave.

    Example:
        >>> q, k = torch.randn(4, 8, 50), torch.randn(4, 8, 15)
        >>> members, mean, squares = built_moments(*coefficients(q, deviations(k), 15))
        >>> built = k.transpose(-2, -1) @ q
        >>> torch.allclose(squares / members, built.var(correction=0), rtol=1e-4)
        True
    """
    wide = torch.promote_types(apart.dtype, torch.float32)
    variance, mean = torch.var_mean(shared.to(wide), correction=0)
    # What sets keys apart adds up to zero at each query, so the squares of the two parts are all there is.
    squares = torch.linalg.vector_norm(apart, dtype=wide).square() + variance * apart.numel()
    return Moments(apart.numel(), mean.view(1), squares.view(1))


def attend(apart: Tensor, values: Tensor, scale: Tensor | None = None) -> Tensor:
    """V·Softmax(scale·E): (N, p, m) from E by rows and (N, p, n) values; ``scale`` is one number."""
    logits = apart if scale is None else apart * scale.reshape(())
    return torch.bmm(logits.softmax(dim=-1), values.transpose(1, 2)).transpose(1, 2)
