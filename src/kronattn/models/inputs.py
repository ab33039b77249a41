"""What a network may be given, each refusal one line."""

from __future__ import annotations

from torch import Tensor

from kronattn.ops.checks import dtype_name
from kronattn.ops.fx import is_captured, leaf_function

__all__ = ["checked_input"]


@leaf_function
def checked_input(x: Tensor, in_chans: int, axes: int = 2, least: int = 1) -> Tensor:
    """Refuse what is not (N, in_chans, *grid) with that many axes, each of at least ``least``; return it.

    >>> import torch
    >>> checked_input(torch.zeros(1, 1, 8, 8), 3)
    Traceback (most recent call last):
    ...
    ValueError: the input must have 3 channels (in_chans), but has 1
    """
    # A graph that is being captured is made for sizes it has yet to see.
    if is_captured():
        return x
    if not isinstance(x, Tensor):
        raise TypeError(f"the input must be a torch.Tensor, not {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"the input must be floating-point, not {dtype_name(x.dtype)}: convert it with x.float()")
    if x.dim() != axes + 2:
        expected = f"(N, {in_chans}, {'H, W' if axes == 2 else 'D, H, W'})"
        raise ValueError(f"the input must be {expected}, but its shape is {tuple(x.shape)}")
    if x.shape[1] != in_chans:
        raise ValueError(f"the input must have {in_chans} channels (in_chans), but has {x.shape[1]}")
    if min(x.shape[2:]) < least:
        raise ValueError(f"the input must be at least {least}×{least}, but is {x.shape[2]}×{x.shape[3]}")
    return x
