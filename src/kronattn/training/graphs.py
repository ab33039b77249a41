"""CUDA graphs: a function of tensors is run a few times as it is, captured once, and then repeated by the device."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kronattn.training.errors import OneLineError, one_line_of

__all__ = ["CannotGoOn", "Captured"]

log = logging.getLogger(__name__)

# Kernels are compiled and tuned, and optimisers make their state, in the first calls. The last of them is watched for
# what a graph could not repeat.
WARM_UP = 3
# Kinds of input that have a graph of their own; each holds as much memory as the function takes.
KINDS_AT_MOST = 2


class CannotGoOn(OneLineError):
    """A capture failed in a way that leaves PyTorch's generator of random numbers unusable."""


class _Graph(NamedTuple):
    """A captured call: its input and output lie where they were, and each repetition reads and writes them there."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor

    def __call__(self, *inputs: Tensor) -> Tensor:
        for place, x in zip(self.inputs, inputs, strict=True):
            place.copy_(x, non_blocking=True)
        self.graph.replay()
        return self.output.clone()


class Captured:
    """A function of tensors on a GPU, as a CUDA graph from the fourth call on.

    The first calls are ordinary calls and count like all others: nothing is run for warming up alone. Where the
    function cannot be captured it goes on as it is, and a line in the log says why. Input of another shape or dtype has
    a graph of its own, or none, if there are several such kinds.

    Args:
        function: tensors in, a tensor out. It must not ask the device for values, and may change tensors in place;
            those that it makes and keeps are at the same place in every repetition.
        device: the GPU.
    """

    def __init__(self, function: Callable[..., Tensor], device: torch.device) -> None:
        self.function = function
        self.device = device
        self.reason: str | None = None
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._graphs: dict[tuple[Any, ...], _Graph] = {}

    @property
    def captured(self) -> bool:
        return bool(self._graphs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        kind = tuple((x.shape, x.dtype) for x in inputs)
        if kind in self._graphs:
            return self._graphs[kind](*inputs)
        if self.reason is not None or (kind not in self._calls and len(self._calls) == KINDS_AT_MOST):
            return self.function(*inputs)
        if self._calls[kind] < WARM_UP:
            self._calls[kind] += 1
            return self._warm_up(inputs, watch=self._calls[kind] == WARM_UP)
        self._try_to_capture(kind, inputs)
        return self(*inputs)

    def _warm_up(self, inputs: tuple[Tensor, ...], watch: bool) -> Tensor:
        """An ordinary call, on another stream than the default one, as PyTorch asks for before a capture."""
        if not watch:
            return _on_side_stream(self.function, inputs, self.device)
        output, wait = _watched(self.function, inputs, self.device)
        if wait is not None:
            self._say(f"{wait} makes the host wait for the GPU")
        return output

    def _try_to_capture(self, kind: tuple[Any, ...], inputs: tuple[Tensor, ...]) -> None:
        places = tuple(x.to(self.device, copy=True) for x in inputs)
        try:
            graph, output = _capture(self.function, places)
        except RuntimeError as error:
            self._say(one_line_of(error))
            self._check_that_draws_work()
        else:
            self._graphs[kind] = _Graph(graph, places, output)

    def _check_that_draws_work(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
            torch.rand(1, device=self.device)
        except RuntimeError as error:
            raise CannotGoOn(
                f"the step could not be captured as a CUDA graph ({self.reason}), and nothing can be drawn on this GPU "
                f"after that ({one_line_of(error)}): --resume with compile=false goes on"
            ) from None

    def _say(self, reason: str) -> None:
        self.reason = reason
        log.warning("training without CUDA graphs: %s", reason)


def _capture(function: Callable[..., Tensor], places: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    # Other threads (one that writes checkpoints, those of loaders) may go on with what they do.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = function(*places)
    return graph, output


def _watched(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], device: torch.device
) -> tuple[Tensor, str | None]:
    """An ordinary call, and the first line of code in it that waited for the GPU: such a call cannot be captured, and
    a capture that fails half-way is not always survived."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            output = _on_side_stream(function, inputs, device)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [entry for entry in seen if "called a synchronizing" in str(entry.message)]
    return output, f"{Path(waits[0].filename).name}, line {waits[0].lineno}," if waits else None


def _on_side_stream(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], device: torch.device) -> Tensor:
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        output = function(*inputs)
    current.wait_stream(side)
    output.record_stream(current)
    return output


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all calls: PyTorch keeps memory for each stream apart.
    return torch.cuda.Stream(device)
