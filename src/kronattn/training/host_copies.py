"""Copies of tensors in the host's memory, as they are now, without waiting for the device to get there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopies"]


class HostCopies:
    """Copies collections of tensors to the host, over and over into the same memory.

    Tensors on a GPU are put side by side there and come over in one transfer for each dtype, to memory that the GPU can
    write to by itself. Their layout in memory stays what it was.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def __call__(self, collection: Any) -> tuple[Any, Callable[[], None]]:
        """The collection with copies of its tensors, and what to call before they are read.

        The copies of one call are overwritten by the next.

        Example:
            >>> weights = torch.ones(2)
            >>> copies, wait = HostCopies()({"weights": weights, "epoch": 3})
            >>> _ = weights.zero_()
            >>> wait()
            >>> copies
            {'weights': tensor([1., 1.]), 'epoch': 3}
        """
        found: dict[int, Tensor] = {}
        _with_tensors(collection, lambda tensor: found.setdefault(id(tensor), tensor))
        copies = {name: tensor.detach().clone() for name, tensor in found.items() if not tensor.is_cuda}
        on_gpu = {name: _dense(tensor.detach()) for name, tensor in found.items() if tensor.is_cuda}
        for dtype in {tensor.dtype for tensor in on_gpu.values()}:
            copies |= self._transfer({name: tensor for name, tensor in on_gpu.items() if tensor.dtype == dtype}, dtype)
        wait = _nothing
        if on_gpu:
            arrived = torch.cuda.Event()
            arrived.record()
            wait = arrived.synchronize
        return _with_tensors(collection, lambda tensor: copies[id(tensor)]), wait

    def _transfer(self, tensors: dict[int, Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
        flat = torch.cat([x.as_strided((x.numel(),), (1,)) for x in tensors.values()])
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() != flat.numel():
            buffer = self._buffers[dtype] = torch.empty(flat.shape, dtype=dtype, pin_memory=True)
        buffer.copy_(flat, non_blocking=True)
        copies, start = {}, 0
        for name, tensor in tensors.items():
            copies[name] = buffer.as_strided(tensor.shape, tensor.stride(), start)
            start += tensor.numel()
        return copies


def _with_tensors(collection: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The collection, its dictionaries and lists made anew, with what the function makes of each tensor."""
    if isinstance(collection, Tensor):
        return function(collection)
    # By exact type: those that are not the ordinary ones stay what they are, and there are thousands to go through.
    kind = type(collection)
    if kind is dict:
        return {key: _with_tensors(value, function) for key, value in collection.items()}
    if kind is OrderedDict:
        return OrderedDict((key, _with_tensors(value, function)) for key, value in collection.items())
    if kind is list or kind is tuple:
        return kind(_with_tensors(value, function) for value in collection)
    return collection


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its elements do not fill a piece of memory, in whatever order."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return tensor.contiguous()
        expected *= length
    return tensor


def _nothing() -> None: ...
