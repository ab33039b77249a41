"""Two branches of a module at the same time, where a CUDA graph is being captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from kronattn.ops.fx import is_captured

__all__ = ["side_by_side"]


def side_by_side(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Tensor, Tensor]:
    """first(x) and second(x).

    A graph that is captured holds them as branches, and so do their backwards, which autograd runs on the stream of
    their forward: an attention's kernels are too small to fill a GPU, and run beside convolutions. In eager code the
    host is what bounds such layers, and waiting for streams would cost more than it gains.

    Example:
        >>> side_by_side(torch.relu, torch.neg, torch.tensor([-1.0, 2.0]))
        (tensor([0., 2.]), tensor([ 1., -2.]))
    """
    if not _in_cuda_graph(x):
        return first(x), second(x)
    here, aside = torch.cuda.current_stream(x.device), _stream(x.device)
    aside.wait_stream(here)
    # Memory must not be handed out again while the other stream may still read it.
    x.record_stream(aside)
    with torch.cuda.stream(aside):
        y = first(x)
    z = second(x)
    here.wait_stream(aside)
    y.record_stream(here)
    return y, z


def _in_cuda_graph(x: Any) -> bool:
    if isinstance(x, fx.Proxy) or is_captured() or not x.is_cuda:
        return False
    return torch.cuda.is_current_stream_capturing()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
