"""A learned gain for each channel, for new layers in trained networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LayerScale"]


class LayerScale(nn.Module):
    """Multiply channels by learned gains that all start at ``value``.

    Paper: *Going deeper with Image Transformers*, ICCV 2021.

    Shape:
        (..., channels) to the same.

    Example:
        >>> LayerScale(3, 0.5)(torch.ones(2, 3))
        tensor([[0.5000, 0.5000, 0.5000],
                [0.5000, 0.5000, 0.5000]], grad_fn=<MulBackward0>)
    """

    def __init__(self, channels: int, value: float, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"layer_scale must be a number that the gains start at, or None, not {value!r}")
        self.value = float(value)
        self.gain = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All gains as they start."""
        nn.init.constant_(self.gain, self.value)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.gain)}, value={self.value}"
