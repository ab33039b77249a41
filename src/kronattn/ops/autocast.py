"""Whether autocast is on where a tensor lives, and how to do without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["autocast_is_on", "autocasted", "without_autocast"]

_AS_IT_IS = nullcontext()


def autocast_is_on(x: Tensor) -> bool:
    """Whether autocast is enabled for ``x``'s kind of device."""
    # Not torch.amp.is_autocast_available: the compiler of PyTorch 2.11 cannot look into it.
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocasted(x: Tensor) -> Tensor:
    """``x`` in autocast's dtype where autocast is on, as PyTorch's own attention takes it; float64 stays."""
    if x.dtype == torch.float64 or not autocast_is_on(x):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off: it would round the coefficients to half precision in the middle of the computation."""
    return torch.autocast(x.device.type, enabled=False) if autocast_is_on(x) else _AS_IT_IS
