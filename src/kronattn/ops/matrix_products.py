"""Another last stage, for wide layers on a GPU: the coefficients E = QKᵀ are materialised by PyTorch's matrix products.

Fused attention is slow beyond 256 channels, its gradient more so, and there E is smaller than the features.

Averages of features that are not negative are much alike: most of each is their common mean. The softmax does not see
what all keys share, so the mean is taken off before anything is rounded to half precision. E's batch statistics do see
it, as one more column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronattn.ops.attend import at_least_float32
from kronattn.ops.coefficients import Moments
from kronattn.ops.fx import leaf_function

__all__ = ["attend_tokens", "coefficients", "moments", "spread"]

# Elements that make 16 bytes of half precision: tensor cores want rows of matrices to start at multiples of them.
_ALIGNMENT = 8


@leaf_function
def coefficients(query: Tensor, keys: Tensor) -> Tensor:
    """E by rows, of (N, C, *grid) queries and (N, S, C) keys of one head.

    Returns:
        (N, m, M) with M > S a multiple of eight: what the S keys differ by from their mean, then what they share, then
        zeros.
    """
    mean = keys.mean(dim=1, keepdim=True)
    nothing = mean.new_zeros(()).expand(len(keys), -(keys.shape[1] + 1) % _ALIGNMENT, keys.shape[2])
    rows = torch.cat([keys - mean, mean, nothing], dim=1)
    return torch.bmm(query.flatten(2).transpose(1, 2), rows.to(query.dtype).transpose(1, 2))


@leaf_function
def moments(matrix: Tensor, count: int) -> Moments:
    """Batch statistics of E from :func:`coefficients` of ``count`` keys.

    Example:
        >>> q, k = torch.randn(4, 8, 5, 10), torch.randn(4, 15, 8)
        >>> members, mean, squares = moments(coefficients(q, k), 15)
        >>> exact = k @ q.flatten(2)
        >>> torch.allclose(squares / members, exact.var(correction=0), rtol=1e-4)
        True
    """
    wide = torch.promote_types(matrix.dtype, torch.float32)
    variance, mean = torch.var_mean(matrix[..., count].to(wide), correction=0)
    members = matrix.shape[0] * matrix.shape[1] * count
    # Centred coefficients add up to zero at each query, so the squares of the two parts are all there is.
    squares = torch.linalg.vector_norm(matrix[..., :count], dtype=wide).square() + variance * members
    return Moments(members, mean.view(1), squares.view(1))


@leaf_function
def spread(matrix: Tensor, values: Tensor, like: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """The last stage of KAO_KV for one head: softmax of E, scaled and normed, times the values.

    Args:
        matrix: (N, m, M), E of :func:`coefficients`, with the scale and the norm of the coefficients multiplied in.
        values: (N, S, P).
        like: (N, any, *grid), the queries.
        residual: (N, P, *grid).
    """
    count, dtype = values.shape[1], like.dtype
    rows = torch.bmm(matrix[..., :count].softmax(dim=-1).to(dtype), values.to(dtype))
    y = rows.transpose(1, 2).unflatten(2, like.shape[2:])
    return y if residual is None else y + residual


def attend_tokens(
    queries: Tensor, keys: Tensor, values: Tensor, *, num_heads: int = 1, key_bias: Tensor | None = None
) -> Tensor:
    """Attention of (N, M, C) queries to (N, S, C) keys with (N, S, P) values: (N, M, P), in float32 at least.

    Of rows and columns there are so few that their coefficients need not be rounded.
    """
    rows = [at_least_float32(x).unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (queries, keys, values)]
    logits = rows[0] @ rows[1].transpose(2, 3)
    if key_bias is not None:
        logits = logits + key_bias.unsqueeze(1)
    return (logits.softmax(dim=-1) @ rows[2]).transpose(1, 2).flatten(2)
