"""What plain PyTorch does differently on a GPU, and where: every such rule is here.

The kernels' own are in :mod:`kronattn.ops.triton.rules`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronattn.ops.attend import is_captured

__all__ = ["aligned", "builds_coefficients", "multiplies_rows", "on_gpu"]

# Channels of a head up to which PyTorch has fast fused attention; beyond, what it has is slow, its gradient more so.
_WIDEST_FUSED = 256
# Elements that make 16 bytes of half precision: tensor cores want rows of matrices to start at multiples of them.
_ALIGNMENT = 8


def on_gpu(x: Tensor) -> bool:
    """The one question that all rules start with, so that tests can answer it otherwise."""
    return x.is_cuda


def aligned(size: int) -> int:
    """The number of columns, at least ``size``, that products on tensor cores are fast for."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def builds_coefficients(query: Tensor, queries: int, keys: int) -> bool:
    """Whether attention of ``queries`` to ``keys`` vectors had better build its coefficients than fuse its products.

    Where (N, C, *grid) ``query`` has more channels than fused attention is fast for, and as long as the matrix is at
    most half as large as ``query`` itself. A compiler is left to see to it.
    """
    if is_captured() or not on_gpu(query) or query.shape[1] <= _WIDEST_FUSED:
        return False
    return 0 < 2 * query.shape[0] * queries * keys <= query.numel()


def multiplies_rows(x: Tensor) -> bool:
    """Whether a 1×1 convolution of (N, C, h, w) is faster as a product of matrices with :func:`aligned` columns."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return half and on_gpu(x) and not is_captured() and x.stride(1) == 1
