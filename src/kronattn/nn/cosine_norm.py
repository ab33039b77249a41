"""Cosines in the place of products: queries and keys of length one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kronattn.ops import stages
from kronattn.ops.attend import at_least_float32
from kronattn.ops.fx import leaf_function, leaf_module

__all__ = ["CosineNorm", "unit"]

# Of the scale, as Swin Transformer V2 starts it: weights differ from each other, and none is left at nothing.
_START = 10.0
_SMALLEST_SQUARE = 1e-12


class CosineNorm(nn.Module):
    """The learned scale of coefficients that are cosines, one for each head; what makes them cosines is :func:`unit`.

    It is called as :class:`kronattn.nn.coefficient_norm.CoefficientNorm` is.

    Example:
        >>> norm, keys = CosineNorm(num_heads=2), torch.randn(4, 15, 8)
        >>> torch.equal(norm(keys)[0], 10 * keys)
        True
    """

    def __init__(self, num_heads: int = 1, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.weight = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, _START)

    @leaf_module
    def forward(self, keys: Tensor, moments: Any = None, plan: Any = None) -> tuple[Tensor, None]:
        """(N, S, C) keys times the scale, and no bias."""
        return stages.scaled(keys, self.weight, self.num_heads), None

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


@leaf_function
def unit(x: Tensor, num_heads: int, dim: int) -> Tensor:
    """``x`` with each head's vectors along ``dim`` of length one; nothing stays nothing.

    Example:
        >>> unit(torch.tensor([[3.0, 4.0, 0.0, 5.0]]), num_heads=2, dim=1)
        tensor([[0.6000, 0.8000, 0.0000, 1.0000]])
    """
    heads = at_least_float32(x).unflatten(dim, (num_heads, -1))
    squares = heads.square().sum(dim=dim + 1, keepdim=True)
    return (heads * torch.rsqrt(squares + _SMALLEST_SQUARE)).flatten(dim, dim + 1).to(x.dtype)
