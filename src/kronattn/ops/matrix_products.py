"""Another last stage, for wide layers on a GPU: the coefficients E = QKᵀ are materialised by PyTorch's matrix products.

Fused attention is slow beyond 256 channels, its gradient more so, and there E is smaller than the features.

Averages of features that are not negative are much alike: most of each is their common mean. The softmax does not see
what all keys share, so the mean is taken off before anything is rounded to half precision. E's batch statistics do see
it, as one more column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronattn.ops.autocast import without_autocast
from kronattn.ops.coefficients import Moments

__all__ = ["centred", "moments", "padded", "softmax"]

# Elements that make 16 bytes of half precision: tensor cores want rows of matrices to start at multiples of them.
_ALIGNMENT = 8


def padded(count: int) -> int:
    """Columns of E for ``count`` keys: one more for what they share, and then up to a multiple of eight."""
    return count + 1 + -(count + 1) % _ALIGNMENT


def centred(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, S, C) keys to (N, M, C) in ``dtype``, M = padded(S): what they differ by from their mean, that, and zeros."""
    mean = keys.mean(dim=1, keepdim=True)
    nothing = mean.new_zeros(()).expand(len(keys), padded(keys.shape[1]) - keys.shape[1] - 1, keys.shape[2])
    return torch.cat([keys - mean, mean, nothing], dim=1).to(dtype)


def moments(matrix: Tensor, count: int) -> tuple[Moments, Tensor]:
    """Batch statistics of (N, m, M) coefficients of centred keys, ``count`` of them, and these to go on with.

    Example:
        >>> q, k = torch.randn(4, 50, 8), torch.randn(4, 15, 8)
        >>> (members, mean, squares), _ = moments(q @ centred(k, q.dtype).transpose(1, 2), 15)
        >>> torch.allclose(squares / members, (q @ k.transpose(1, 2)).var(correction=0), rtol=1e-4)
        True
    """
    wide = torch.promote_types(matrix.dtype, torch.float32)
    variance, mean = torch.var_mean(matrix[..., count].to(wide), correction=0)
    members = matrix.shape[0] * matrix.shape[1] * count
    # Centred coefficients add up to zero at each query, so the squares of the two parts are all there is.
    squares = torch.linalg.vector_norm(matrix[..., :count], dtype=wide).square() + variance * members
    return Moments(members, mean.view(1), squares.view(1)), matrix


def softmax(matrix: Tensor, count: int) -> Tensor:
    """(N, m, count): the softmax of each query's coefficients."""
    with without_autocast(matrix):
        return matrix[..., :count].softmax(dim=-1)
