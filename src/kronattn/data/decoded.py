"""Samples that are decoded once, by all processors, and kept: on any device, handed out a whole batch at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["DecodedSamples", "Track", "available_processors", "decode_each", "untracked"]

Result = TypeVar("Result")

# Wraps a long loop, in a progress bar for instance; the text says what it does.
Track = Callable[[Sequence[Any], str], Iterable[Any]]


def untracked(items: Sequence[Any], description: str) -> Iterable[Any]:
    """A loop that nobody watches."""
    return items


@dataclass(eq=False)
class DecodedSamples(Dataset):
    """Tensors whose first axis counts samples, all on one device; a subclass names them as its fields."""

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, entry.name) for entry in fields(self)]

    def __len__(self) -> int:
        return len(self._tensors()[0])

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self._tensors())

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        # The loader's own way of asking for a batch: one gather instead of a stack of single samples.
        return self.gather(torch.tensor(indices, device=self.device))

    @property
    def device(self) -> torch.device:
        return self._tensors()[0].device

    def gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The tensors of some samples; ``indices`` lie on the same device."""
        return self[indices]

    def to(self, device: torch.device) -> DecodedSamples:
        return type(self)(*(tensor.to(device) for tensor in self._tensors()))


def decode_each(
    decode: Callable[[int], Result], count: int, track: Track = untracked, description: str = "Decoding images"
) -> Iterator[Result]:
    """``decode(0)``, ``decode(1)`` and so on, in order, with a thread for each processor.

    >>> list(decode_each(lambda index: index**2, 3))
    [0, 1, 4]
    """
    with ThreadPoolExecutor(available_processors()) as pool:
        results = pool.map(decode, range(count))
        for _ in track(range(count), description):
            yield next(results)


def available_processors() -> int:
    """How many processors this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
