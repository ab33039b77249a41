"""Kronecker attention's first and last stage on a CPU, for inference.

Four operators of PyTorch under ``torch.ops.kronattn_cpu``, without gradients. ``kronattn.ops.native`` calls them; it
sees to dtypes and layouts, and they trust it. ``rows`` says that the channels of a position lie side by side.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

__all__ = ["INTERFACE"]

# Changes with the operators' signatures, so that kronattn can tell a build of another version.
INTERFACE = 1

torch.ops.load_library(next(Path(__file__).parent.glob("_kernels*")))


def _grid_of(like: Tensor, channels: int, rows: bool) -> Tensor:
    """(N, channels, *grid) as ``like``, in one of the two layouts."""
    if not rows:
        return like.new_empty((like.shape[0], channels, *like.shape[2:]))
    return like.new_empty((like.shape[0], *like.shape[2:], channels)).movedim(-1, 1)


# What compilers are told of the results: their shapes and layouts.
@torch.library.register_fake("kronattn_cpu::pool")
def _(x: Tensor, rows: bool) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2] + x.shape[3], x.shape[1])


@torch.library.register_fake("kronattn_cpu::attend")
def _(query: Tensor, keys: Tensor, values: Tensor, residual: Tensor | None, scale: float, rows: bool) -> Tensor:
    return _grid_of(query, values.shape[2], rows)


@torch.library.register_fake("kronattn_cpu::outer")
def _(tokens: Tensor, like: Tensor, residual: Tensor | None, mean_once: bool, rows: bool) -> Tensor:
    return _grid_of(like, tokens.shape[2], rows)


@torch.library.register_fake("kronattn_cpu::fused_")
def _(y: Tensor, x: Tensor, weight: Tensor, direct: Tensor | None, scale: float, qkv: bool, mean_once: bool) -> None:
    return None
