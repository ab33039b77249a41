"""The operators that Table 2 compares, each with a linear map on its values, and what they are run on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.nn import KroneckerAttention
from kronattn.ops.attention import pool_grid

__all__ = ["OPERATORS", "BuiltAttention", "Case", "FusedAttention", "Operator"]


@dataclass(frozen=True)
class Case:
    """A feature map, (batch, channels, *grid).

    >>> Case((56, 56)).label, Case((16, 28, 28)).label
    ('8×56²×8', '8×16×28×28×8')
    """

    grid: tuple[int, ...]
    batch: int = 8
    channels: int = 8

    @property
    def positions(self) -> int:
        """The number of positions of the grid."""
        return math.prod(self.grid)

    @property
    def label(self) -> str:
        """Batch × grid × channels, as the paper writes it."""
        square = len(self.grid) == 2 and self.grid[0] == self.grid[1]
        sizes = f"{self.grid[0]}²" if square else "×".join(str(size) for size in self.grid)
        return f"{self.batch}×{sizes}×{self.channels}"


class BuiltAttention(nn.Module):
    """Regular attention as the paper describes it: the coefficient matrix is built. Takes (N, C, *grid).

    :class:`kronattn.nn.DenseAttention` gives the same result block by block, without that matrix, and would be
    a different operator to compare with.

    >>> BuiltAttention(8, pool=2)(torch.randn(2, 8, 7, 7)).shape
    torch.Size([2, 8, 7, 7])
    """

    def __init__(self, channels: int, *, pool: int | None = None) -> None:
        super().__init__()
        self.pool = pool
        self.value_map = nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query = x.flatten(2)
        key = query if self.pool is None else pool_grid(x, self.pool).flatten(2)
        # One row a query: the softmax runs along memory, which is the fastest of the ways to write Eq. 1.
        coefficients = torch.bmm(query.transpose(1, 2), key).softmax(dim=-1)
        output = torch.bmm(self.value_map.weight @ key, coefficients.transpose(1, 2))
        return output.unflatten(2, x.shape[2:])


class FusedAttention(nn.Module):
    """Regular attention by PyTorch's fused kernel, in the layout it likes best: (N, 1, positions, C) to the same.

    >>> FusedAttention(8)(torch.randn(2, 1, 49, 8)).shape
    torch.Size([2, 1, 49, 8])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.value_map = nn.Linear(channels, channels, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(rows, rows, self.value_map(rows), scale=1.0)


@dataclass(frozen=True)
class Operator:
    """One operator of the table.

    >>> OPERATORS["kao_qkv"].label
    'KAO_QKV'
    """

    label: str
    build: Callable[[int], nn.Module]
    keys_per_query: Callable[[Case], int] = lambda case: 0  # of the matrix that it builds, if it builds one
    takes_rows: bool = False

    def input_of(self, x: Tensor) -> Tensor:
        """Return (N, C, *grid) in the operator's own layout, which is not part of its cost."""
        return x.flatten(2).transpose(1, 2).contiguous().unsqueeze(1) if self.takes_rows else x

    def bytes_needed(self, case: Case, itemsize: int) -> int:
        """Return about what the operator will allocate: logits and coefficients live at once, where built."""
        matrices = 2 * case.positions * self.keys_per_query(case)
        return case.batch * (matrices + 2 * case.positions * case.channels) * itemsize


def _pooled_positions(case: Case) -> int:
    return math.prod(-(-size // 2) for size in case.grid)


OPERATORS: dict[str, Operator] = {
    "attn": Operator("Attn", BuiltAttention, lambda case: case.positions),
    "attn_pool": Operator("Attn+Pool", lambda channels: BuiltAttention(channels, pool=2), _pooled_positions),
    "attn_fused": Operator("Fused", FusedAttention, takes_rows=True),
    "kao_kv": Operator("KAO_KV", lambda channels: KroneckerAttention(channels, "kv", coefficient_norm=None)),
    "kao_qkv": Operator("KAO_QKV", lambda channels: KroneckerAttention(channels, "qkv", coefficient_norm=None)),
    "kao_qkv_as_printed": Operator(
        "KAO_QKV printed", lambda channels: KroneckerAttention(channels, "qkv", coefficient_norm=None, mean="each")
    ),
}
