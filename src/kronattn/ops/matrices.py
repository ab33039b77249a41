"""Axis averages and the outer sum as products with constant matrices: on small maps one product takes less time than
the calls that it replaces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kronattn.ops.compat import needs_dispatcher, under_transform
from kronattn.ops.fx import is_captured
from kronattn.ops.grid import axis_averages, outer_sum

__all__ = ["eager_matrices_of", "matrices_of"]

# Rows and columns of a map, together, up to which products are faster: 28 of 14×14 are, 56 of 28×28 are not (nodes of
# onnxruntime on an AMD EPYC, one thread).
_MOST_TOKENS = 32
_WIDE = (torch.float32, torch.float64)
# Elements from which on arithmetic counts more than calls: at 14×14 products are slower from batches of ten on (PyTorch
# on an AMD EPYC, one thread).
_MOST_ELEMENTS = 2**17
_kept: dict[tuple[int, int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
_MOST_KEPT = 64


def matrices_of(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """For (N, C, h, w) on a small grid, what averages it, (w + h, h·w), and what gives every position the sum of its
    row's and its column's token with their mean counted once, (h·w, w + h). None on large grids and unknown ones.

    A graph that is captured gets those that an earlier call has made: its constants must be tensors with values.

    Example:
        >>> pool, spread = matrices_of(torch.randn(1, 4, 2, 3))
        >>> pool.shape, spread.shape
        (torch.Size([5, 6]), torch.Size([6, 5]))
    """
    height, width = x.shape[2:]
    if not (isinstance(height, int) and isinstance(width, int)) or height + width > _MOST_TOKENS:
        return None
    key = (height, width, x.dtype, x.device)
    if is_captured():
        return _kept.get(key) if torch.compiler.is_exporting() else None
    if under_transform() or needs_dispatcher(x):
        # What is made here would be theirs: not numbers for the calls that follow.
        return None
    # Asked once: another thread may clear them at any time.
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        with torch.inference_mode(False), torch.no_grad():
            found = _kept[key] = _made(height, width, x)
    return found


def eager_matrices_of(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same for layers in eager code on a CPU, where nobody watches: a counter would see products that the layer
    does not have."""
    if x.device.type != "cpu" or x.dim() != 4 or x.dtype not in _WIDE or x.numel() > _MOST_ELEMENTS:
        return None
    return None if is_captured() else matrices_of(x)


def _made(height: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both from what they stand for: the averages of every single position, the outer sum of every single token."""
    wide: Any = {"dtype": torch.float64, "device": like.device}
    positions = torch.eye(height * width, **wide).view(1, -1, height, width)
    pool = axis_averages(positions)[0].t()
    tokens = torch.eye(width + height, **wide)
    # Each axis gives up half of its mean.
    tokens[:, :width] -= tokens[:, :width].mean(dim=1, keepdim=True) / 2
    tokens[:, width:] -= tokens[:, width:].mean(dim=1, keepdim=True) / 2
    spread = outer_sum(tokens[None], (height, width))[0].flatten(1).t()
    return pool.to(like.dtype).contiguous(), spread.to(like.dtype).contiguous()
