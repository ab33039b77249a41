"""How tensors lie in memory: the strides that the kernels take, and outputs laid out like their input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Strides",
    "aligned",
    "as_rows",
    "dense_strides",
    "empty_grid",
    "empty_like_grid",
    "flat",
    "flat_strides",
    "is_channels_last",
    "kernel_strides",
    "on_device",
    "row_distance",
    "rows_and_width",
]


_HERE = nullcontext()


class Strides(NamedTuple):
    """Of a grid tensor read as (sample, channel, position), and whether channels lie side by side."""

    sample: int
    channel: int
    position: int
    channels_last: bool


def flat_strides(x: Tensor) -> Strides | None:
    """Strides of (N, C, *grid) with its grid flattened; None where one stride cannot step through the grid."""
    shape, strides = x.shape, x.stride()
    position, expected = 1, -1
    for axis in range(x.dim() - 1, 1, -1):
        if shape[axis] == 1:
            continue
        if expected < 0:
            position = strides[axis]
        elif strides[axis] != expected:
            return None
        expected = strides[axis] * shape[axis]
    channel = strides[1] if shape[1] > 1 else 1
    # A lone channel or position has no stride of its own: it is read as whichever layout the other one has.
    return Strides(strides[0], channel, position, channel == 1 and (position != 1 or shape[1] > 1))


def is_channels_last(x: Tensor) -> bool:
    """Whether channels lie side by side; what is neither that nor contiguous is copied, and contiguous then."""
    strides = flat_strides(x)
    return strides is not None and strides.channels_last


def row_distance(x: Tensor) -> int | None:
    """Of (N, C, h, w) as N·h·w rows with channels side by side; None where rows are not evenly apart."""
    batch, channels, height, width = x.shape
    sample, channel, row, position = x.stride()
    if channels > 1 and channel != 1:
        return None
    # Axes of one element have no stride that means anything.
    if width > 1:
        distance = position
    elif height > 1:
        distance = row
    else:
        distance = sample if batch > 1 else channels
    even = (height == 1 or row == distance * width) and (batch == 1 or sample == distance * width * height)
    return distance if even and distance >= channels else None


def as_rows(x: Tensor) -> Tensor:
    """(N, C, h, w) as rows of channels at an even distance: slices of channels-last maps are that already."""
    distance = row_distance(x)
    if distance is not None and x.numel() // x.shape[1] * distance < 2**31:
        return x
    return x.contiguous(memory_format=torch.channels_last)


def aligned(*distances: int | None) -> tuple[int, ...]:
    """The largest power of two, up to 16, that divides all numbers of channels and distances, and these divided by it.

    Kernels multiply by it, so that the compiler knows how much they can load at once, for any number of channels.
    """
    known = [distance for distance in distances if distance is not None]
    assert len(known) == len(distances)
    align = math.gcd(16, *known)
    return align, *(distance // align for distance in known)


def flat(x: Tensor) -> tuple[Tensor, Strides]:
    """``x`` with its strides, copied only if its layout is neither of the two usual ones nor a slice of them."""
    strides = flat_strides(x)
    if strides is None:
        x = x.contiguous()
        strides = flat_strides(x)
        assert strides is not None
    return x, strides


@lru_cache(maxsize=1024)
def kernel_strides(*tensors: Strides) -> tuple[list[int], tuple[int, ...]]:
    """What kernels take of the layouts of tensors.

    Returns:
        The strides of one tensor after the other, those that kernels multiply by the alignment divided by it; and which
        tensors have their channels last, then the alignment: the largest power of two, up to 16, that divides these.
    """
    others = [strides.position if strides.channels_last else strides.channel for strides in tensors]
    align = math.gcd(16, *others, *(strides.sample for strides in tensors))
    numbers = []
    for strides, other in zip(tensors, others, strict=True):
        parts = (0, other // align) if strides.channels_last else (other // align, strides.position)
        numbers += [strides.sample // align, *parts]
    return numbers, (*(strides.channels_last for strides in tensors), align)


def empty_grid(
    batch: int, channels: int, grid: Sequence[int], channels_last: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Uninitialised (batch, channels, *grid), channels last or contiguous."""
    if not channels_last:
        return torch.empty((batch, channels, *grid), dtype=dtype, device=device)
    strides = [channels]
    for size in reversed(grid):
        strides.append(strides[-1] * size)
    whole = strides.pop()
    return torch.empty_strided((batch, channels, *grid), (whole, 1, *reversed(strides)), dtype=dtype, device=device)


def empty_like_grid(x: Tensor, channels: int, channels_last: bool) -> Tensor:
    """Uninitialised (N, channels, *grid) with ``x``'s batch, grid and dtype."""
    return empty_grid(x.shape[0], channels, x.shape[2:], channels_last, x.dtype, x.device)


def dense_strides(x: Tensor, channels_last: bool) -> Strides:
    """Of what :func:`empty_grid` made: they need not be found out."""
    channels, positions = x.shape[1], math.prod(x.shape[2:])
    if channels_last:
        return Strides(channels * positions, 1, channels, True)
    return Strides(channels * positions, positions, 1, False)


def rows_and_width(grid: Sequence[int]) -> tuple[int, int]:
    """A grid of any number of axes as the two that the kernels know: all but the last, and the last."""
    return math.prod(grid[:-1]), grid[-1]


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be ``x``'s."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device_of(x)
