"""The operators that tables compare, and the feature maps that they are run on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.nn import KroneckerAttention
from kronattn.ops.attention import pool_grid
from kronattn.ops.kronecker import kronecker_attention
from kronattn.tables.operators import peers

__all__ = [
    "OPERATORS",
    "Case",
    "FusedAttention",
    "MappedAttention",
    "MaterialisedAttention",
    "Operator",
    "with_call",
    "with_map",
]


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
        sizes = f"{self.grid[0]}²" if self.is_square else "×".join(str(size) for size in self.grid)
        return f"{self.batch}×{sizes}×{self.channels}"

    @property
    def is_square(self) -> bool:
        """Whether it has two axes of one length."""
        return len(self.grid) == 2 and self.grid[0] == self.grid[1]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Case:
        """Read what :meth:`to_dict` gave."""
        return cls(tuple(found["grid"]), found["batch"], found["channels"])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"batch": self.batch, "channels": self.channels, "grid": list(self.grid)}


class MaterialisedAttention(nn.Module):
    """Regular attention as the paper describes it: the coefficient matrix is materialised. Takes (N, C, *grid).

    :class:`kronattn.nn.DenseAttention` gives the same result block by block, without that matrix, and would be
    a different operator to compare with.

    >>> MaterialisedAttention(8, pool=2)(torch.randn(2, 8, 7, 7)).shape
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


class MappedAttention(nn.Module):
    """An operator without linear maps, and one on its output: the same as one on its values, as softmax sums to one.

    >>> MappedAttention(torch.clone, 8)(torch.randn(2, 8, 4, 5)).shape
    torch.Size([2, 8, 4, 5])
    """

    def __init__(self, call: Callable[[Tensor], Tensor], channels: int) -> None:
        super().__init__()
        self.call = call
        self.value_map = nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.value_map.weight @ self.call(x).flatten(2)).unflatten(2, x.shape[2:])


@dataclass(frozen=True)
class Operator:
    """One operator, for every table of operators.

    ``call`` takes (N, C, h, w), without linear maps, for ``kronattn bench operators``; ``build(channels)`` makes a
    module with a linear map on its values, for Table 2. ``keys_per_query`` is of the coefficients that it materialises.
    """

    label: str
    call: Callable[[Tensor], Tensor] | None = None
    build: Callable[[int], nn.Module] | None = None
    keys_per_query: Callable[[Case], int] = lambda case: 0
    takes_rows: bool = False
    differentiable: bool = True
    compiled: bool = False

    def input_of(self, x: Tensor) -> Tensor:
        """Return (N, C, *grid) in the module's own layout, which is not part of its cost."""
        return x.flatten(2).transpose(1, 2).contiguous().unsqueeze(1) if self.takes_rows else x

    def bytes_needed(self, case: Case, itemsize: int, matrices: int = 2) -> int:
        """Return about what the operator will allocate: logits and coefficients live at once, where materialised."""
        coefficients = matrices * case.positions * self.keys_per_query(case)
        return case.batch * (coefficients + 2 * case.positions * case.channels) * itemsize


def _pooled_positions(case: Case) -> int:
    return math.prod(-(-size // 2) for size in case.grid)


def _copy(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x)


def _kao(mode: str, backend: str) -> Callable[[Tensor], Tensor]:
    return lambda x: kronecker_attention(x, mode=mode, backend=backend)


def _layer(mode: str, mean: str = "once") -> Callable[[int], nn.Module]:
    return lambda channels: KroneckerAttention(channels, mode, coefficient_norm=None, mean=mean)


# A new operator is one line here.
OPERATORS: dict[str, Operator] = {
    "copy": Operator("copy of x", _copy, differentiable=False),
    "attn": Operator("Attn", peers.regular, MaterialisedAttention, lambda case: case.positions),
    "attn_pool": Operator("Attn+Pool", peers.pooled, partial(MaterialisedAttention, pool=2), _pooled_positions),
    "attn_fused": Operator("Fused", peers.fused, FusedAttention, takes_rows=True),
    "criss_cross": Operator("criss-cross", peers.criss_cross, keys_per_query=lambda case: sum(case.grid)),
    "axial": Operator("axial", peers.axial),
    "efficient": Operator("efficient", peers.efficient),
    "kao_kv_torch": Operator("KAO_KV, torch", _kao("kv", "torch")),
    "kao_qkv_torch": Operator("KAO_QKV, torch", _kao("qkv", "torch")),
    "kao_kv_compiled": Operator("KAO_KV, compiled", _kao("kv", "torch"), compiled=True),
    "kao_qkv_compiled": Operator("KAO_QKV, compiled", _kao("qkv", "torch"), compiled=True),
    "kao_kv": Operator("KAO_KV", _kao("kv", "triton"), _layer("kv")),
    "kao_qkv": Operator("KAO_QKV", _kao("qkv", "triton"), _layer("qkv")),
    "kao_qkv_as_printed": Operator("KAO_QKV printed", None, _layer("qkv", "each")),
}


def with_call() -> list[str]:
    """Those that are measured beside a copy; KAO_QKV is the paper's equation there, as in the function.

    >>> "kao_qkv_as_printed" in with_call()
    False
    """
    return [name for name, operator in OPERATORS.items() if operator.call is not None]


def with_map() -> list[str]:
    """Those of Table 2, which have a linear map on their values.

    >>> with_map()
    ['attn', 'attn_pool', 'attn_fused', 'kao_kv', 'kao_qkv', 'kao_qkv_as_printed']
    """
    return [name for name, operator in OPERATORS.items() if operator.build is not None]
