"""The norm of each sample's coefficients by itself, from its keys alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kronattn.ops.attend import at_least_float32
from kronattn.ops.autocast import without_autocast
from kronattn.ops.fx import leaf_module
from kronattn.ops.masks import present

__all__ = ["SampleNorm"]

_EPS = 1e-5


class SampleNorm(nn.Module):
    """Keys minus their mean, scaled so that a sample's coefficients among its keys have the variance one, times a
    learned weight for each head.

    A norm over the batch mostly sees what separates samples, which a softmax over one sample's keys ignores. So the
    typical sample's attention stays close to a mean, and a sample with large features gets coefficients, and a gradient
    through them, that are larger by the square of that. Here features twice as large give the same coefficients, in
    training as in evaluation, and no sample knows of the others.

    The keys stand for the queries, whose own moments would take a pass over all positions.

    Args:
        num_heads: each with a variance and a weight of its own.
        few: whether there are fewer keys than channels, as axes' averages are; whole grids have more.

    Example:
        >>> norm, keys = SampleNorm(), torch.randn(2, 15, 8)
        >>> coefficients = norm(keys) @ keys.transpose(1, 2)
        >>> torch.allclose(coefficients.square().mean(dim=(1, 2)), torch.ones(2), atol=1e-4)
        True
        >>> torch.allclose(norm(10 * keys) @ (10 * keys).transpose(1, 2), coefficients, atol=1e-4)
        True
    """

    def __init__(self, num_heads: int = 1, *, few: bool = True, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.few = few
        self.weight = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    @leaf_module
    def forward(self, keys: Tensor, shares: Tensor | None = None) -> Tensor:
        """(N, S, C) to the same; those whose (N, S) ``shares`` are zero stay out of mean and variance."""
        with without_autocast(keys):
            heads = at_least_float32(keys).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            if shares is None:
                count: Any = heads.shape[2]
                centred = heads - heads.mean(dim=2, keepdim=True)
            else:
                weights = present(shares).to(heads.dtype)[:, None, :, None]
                count = weights.sum(dim=(2, 3), keepdim=True)
                heads = heads * weights
                centred = (heads - heads.sum(dim=2, keepdim=True) / count) * weights
            if self.few:
                squares = (centred @ heads.transpose(2, 3)).square()
            else:
                squares = (centred.transpose(2, 3) @ centred) * (heads.transpose(2, 3) @ heads)
            # Never below zero but for rounding.
            variance = squares.sum(dim=(2, 3), keepdim=True).clamp_min(0) / count**2
            scale = torch.rsqrt(variance + _EPS) * self.weight.to(heads.dtype).view(-1, 1, 1)
            return (centred * scale).transpose(1, 2).flatten(2).to(keys.dtype)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"
