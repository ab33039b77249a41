"""Stochastic depth: a residual branch that is sometimes left out in training."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["DropPath"]


class DropPath(nn.Module):
    """(N, ...) to the same shape: in training each sample is zero with probability ``rate`` and divided by 1 - rate
    otherwise, so that its mean stays; in evaluation nothing changes. No parameters, no state.

    Example:
        >>> import torch
        >>> DropPath(0.5).eval()(torch.ones(2, 1)).tolist()
        [[1.0], [1.0]]
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(1 - self.rate)
        return x * (kept / (1 - self.rate))

    def extra_repr(self) -> str:
        return f"{self.rate:g}"
