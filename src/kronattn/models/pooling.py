"""Global pooling, by name."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["GlobalPool"]

KINDS = ("avg", "max", "avgmax", "")


class GlobalPool(nn.Module):
    """(N, C, H, W) to (N, C): the average, the maximum, the mean of both ("avgmax"), or unchanged ("").

    Example:
        >>> import torch
        >>> GlobalPool("max")(torch.arange(4.0).reshape(1, 1, 2, 2))
        tensor([[3.]])
    """

    def __init__(self, kind: str = "avg") -> None:
        super().__init__()
        if kind not in KINDS:
            known = ", ".join(repr(known) for known in KINDS)
            raise ValueError(f"global_pool must be one of {known}, not {kind!r}")
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "":
            return x
        if self.kind == "avg":
            return x.mean(dim=(2, 3))
        if self.kind == "max":
            return x.amax(dim=(2, 3))
        return 0.5 * (x.mean(dim=(2, 3)) + x.amax(dim=(2, 3)))

    def extra_repr(self) -> str:
        return repr(self.kind)
