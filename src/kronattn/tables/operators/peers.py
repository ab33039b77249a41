"""Attention operators to compare with, written plainly: (N, C, h, w) to the same, one head, no linear maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kronattn.ops.attention import pool_grid

__all__ = ["axial", "criss_cross", "efficient", "fused", "pooled", "regular"]


def regular(x: Tensor) -> Tensor:
    """Eq. 1 of the paper with its coefficient matrix materialised.

    >>> regular(torch.randn(2, 8, 4, 5)).shape
    torch.Size([2, 8, 4, 5])
    """
    rows = _rows(x)
    return _grid((rows @ rows.transpose(1, 2)).softmax(dim=-1) @ rows, x)


def fused(x: Tensor) -> Tensor:
    """The same through PyTorch's fused attention.

    >>> fused(torch.randn(2, 8, 4, 5)).shape
    torch.Size([2, 8, 4, 5])
    """
    rows = _rows(x)
    return _grid(_attend(rows, rows), x)


def pooled(x: Tensor) -> Tensor:
    """Fused attention to keys and values max-pooled by two along each axis.

    >>> pooled(torch.randn(2, 8, 5, 5)).shape
    torch.Size([2, 8, 5, 5])
    """
    return _grid(_attend(_rows(x), _rows(pool_grid(x, 2))), x)


def axial(x: Tensor) -> Tensor:
    """Fused attention along rows, then along columns (Axial-DeepLab, without its positions).

    >>> axial(torch.randn(2, 8, 4, 5)).shape
    torch.Size([2, 8, 4, 5])
    """
    by_rows = x.permute(0, 2, 3, 1)
    by_rows = F.scaled_dot_product_attention(by_rows, by_rows, by_rows, scale=1.0)
    by_columns = by_rows.transpose(1, 2)
    return F.scaled_dot_product_attention(by_columns, by_columns, by_columns, scale=1.0).permute(0, 3, 2, 1)


def criss_cross(x: Tensor) -> Tensor:
    """Every position attends to its row and its column at once (CCNet): one softmax over h + w - 1 positions.

    >>> criss_cross(torch.randn(2, 8, 4, 5)).shape
    torch.Size([2, 8, 4, 5])
    """
    by_rows = x.permute(0, 2, 3, 1)
    by_columns = by_rows.transpose(1, 2)
    along_rows = by_rows @ by_rows.transpose(-2, -1)  # (N, h, w, w)
    along_columns = by_columns @ by_columns.transpose(-2, -1)  # (N, w, h, h)
    # A position is in its row and in its column, and counts once.
    own = torch.eye(x.shape[2], dtype=torch.bool, device=x.device)
    along_columns = along_columns.masked_fill(own, float("-inf")).transpose(1, 2)
    weights = torch.cat([along_rows, along_columns], dim=-1).softmax(dim=-1)
    in_row, in_column = weights.split([x.shape[3], x.shape[2]], dim=-1)
    return (in_row @ by_rows + (in_column.transpose(1, 2) @ by_columns).transpose(1, 2)).permute(0, 3, 1, 2)


def efficient(x: Tensor) -> Tensor:
    """Efficient (linear) attention: softmax of queries over channels and of keys over positions.

    >>> efficient(torch.randn(2, 8, 4, 5)).shape
    torch.Size([2, 8, 4, 5])
    """
    rows = _rows(x)
    context = rows.softmax(dim=1).transpose(1, 2) @ rows
    return _grid(rows.softmax(dim=2) @ context, x)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def _grid(rows: Tensor, x: Tensor) -> Tensor:
    return rows.transpose(1, 2).unflatten(2, x.shape[2:])


def _attend(query: Tensor, key: Tensor) -> Tensor:
    query, key = query.unsqueeze(1), key.unsqueeze(1)
    return F.scaled_dot_product_attention(query, key, key, scale=1.0).squeeze(1)
