"""Another spread, for wide layers on a GPU: the coefficients E = QKᵀ are materialised by PyTorch's matrix products.

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

__all__ = ["attend_tokens", "moments", "spread"]

# Elements that make 16 bytes of half precision: tensor cores want rows of matrices to start at multiples of them.
_ALIGNMENT = 8


def spread(query: Tensor, keys: Tensor, values: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """The last stage of KAO_KV for one head, as :func:`kronattn.ops.torch_backend.spread`.

    Args:
        query: (N, C, *grid).
        keys: (N, S, C).
        values: (N, S, P).
        residual: (N, P, *grid).
    """
    count, dtype = keys.shape[1], query.dtype
    centred = (keys - keys.mean(dim=1, keepdim=True)).to(dtype)
    logits = torch.bmm(_rows(query), _aligned(centred).transpose(1, 2))
    logits[..., count:] = float("-inf")
    coefficients = logits.softmax(dim=-1)
    rows = torch.bmm(coefficients, _aligned(values.to(dtype)))
    y = rows.transpose(1, 2).unflatten(2, query.shape[2:])
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


def moments(query: Tensor, keys: Tensor) -> Moments:
    """Batch statistics of the coefficients of (N, C, *grid) queries and (N, S, C) keys, for one head.

    Example:
        >>> q, k = torch.randn(4, 8, 5, 10), torch.randn(4, 15, 8)
        >>> members, mean, squares = moments(q, k)
        >>> coefficients = k @ q.flatten(2)
        >>> torch.allclose(squares / members, coefficients.var(correction=0), rtol=1e-4)
        True
    """
    count = keys.shape[1]
    mean_key = keys.mean(dim=1, keepdim=True)
    columns = torch.cat([keys - mean_key, mean_key], dim=1).to(query.dtype)
    matrix = torch.bmm(_rows(query), _aligned(columns).transpose(1, 2))
    centred, shared = matrix[..., :count], matrix[..., count]
    wide = torch.promote_types(matrix.dtype, torch.float32)
    variance, mean = torch.var_mean(shared.to(wide), correction=0)
    # Centred coefficients add up to zero at each query, so the squares of the two parts are all there is.
    squares = torch.linalg.vector_norm(centred, dtype=wide).square() + variance * centred.numel()
    return Moments(centred.numel(), mean.view(1), squares.view(1))


def _rows(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def _aligned(tokens: Tensor) -> Tensor:
    """(N, S, C) with zeros after the last token up to a multiple of eight."""
    more = -tokens.shape[1] % _ALIGNMENT
    return torch.nn.functional.pad(tokens, (0, 0, 0, more)) if more else tokens
