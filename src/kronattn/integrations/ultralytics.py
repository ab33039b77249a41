"""ultralytics: Kronecker attention as a layer in a model's YAML.

Its licence is the AGPL, ours is not: it is imported by :func:`register` alone, and nothing of it is copied here.
"""

from __future__ import annotations

from torch import Tensor, nn

from kronattn.extras import require_library
from kronattn.nn import KroneckerAttention

__all__ = ["KroneckerBlock", "register"]


class KroneckerBlock(nn.Module):
    """x plus Kronecker attention of x: (N, C, h, w) to the same.

    In a model's YAML, after :func:`register`: ``- [-1, 1, KroneckerBlock, [c2]]``, or ``[c2, kv]``. There ``c2`` is the
    number of channels of the layer before.

    Example:
        >>> KroneckerBlock(16)(torch.randn(2, 16, 8, 12)).shape
        torch.Size([2, 16, 8, 12])
    """

    def __init__(self, channels: int, mode: str = "qkv") -> None:
        super().__init__()
        self.attn = KroneckerAttention(channels, mode)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


def register() -> str:
    """Make :class:`KroneckerBlock` known to models' YAML files, and return its name there."""
    tasks = require_library("ultralytics.nn.tasks", "register()")
    tasks.KroneckerBlock = KroneckerBlock
    return KroneckerBlock.__name__
