"""Samples that are decoded when they are asked for, or once, by all processors, and kept: on any device, handed out a
whole batch at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from kronattn.data.images import BadImage

__all__ = [
    "DecodedSamples",
    "ReadSamples",
    "Track",
    "available_processors",
    "decode_each",
    "good_samples",
    "stack_padded",
    "untracked",
]

Result = TypeVar("Result")

# Wraps a long loop, in a progress bar for instance; the text says what it does.
Track = Callable[[Sequence[Any], str], Iterable[Any]]


def untracked(items: Sequence[Any], description: str) -> Iterable[Any]:
    """A loop that nobody watches."""
    return items


class ReadSamples(Dataset):
    """Samples that are decoded when they are asked for, in worker processes for instance; a subclass says how.

    With ``skip_bad``, a bad sample gives ``None``, which batches leave out, and is marked in ``skipped``, which worker
    processes share.

    Args:
        images: has a length, and a name for each number.
    """

    def __init__(self, images: Any, *, skip_bad: bool = False) -> None:
        self.images = images
        self.skip_bad = skip_bad
        self.skipped = torch.zeros(len(images), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.images)

    def decode(self, index: int) -> tuple[Any, Any]:
        """A sample and its target; a bad one raises :class:`kronattn.data.images.BadImage`."""
        raise NotImplementedError

    def read(self, index: int) -> tuple[Any, Any] | None:
        """What :meth:`decode` gives; ``None`` for a bad sample that is left out."""
        try:
            return self.decode(index)
        except BadImage:
            if not self.skip_bad:
                raise
            self.skipped[index] = True
            return None

    def read_all(self, track: Track = untracked) -> Iterator[tuple[Any, Any] | None]:
        """Every sample, with a thread for each processor."""
        return decode_each(self.read, len(self), track)

    def bad_names(self) -> list[str]:
        """What was left out so far."""
        return [self.images.name(index) for index in self.skipped.nonzero().flatten().tolist()]


def good_samples(samples: Sequence[tuple[Any, Any] | None], of: str = "") -> list[tuple[Any, Any]]:
    """Those that could be read; none at all is an error."""
    good = [sample for sample in samples if sample is not None]
    if not good:
        raise BadImage(f"all {len(samples)} images{of} are bad: nothing is left to train on")
    return good


def stack_padded(tensors: Sequence[Tensor], fill: float = 0) -> Tensor:
    """Tensors of any sizes as one of the largest, each from the start of every axis on; beyond is ``fill``.

    >>> stack_padded([torch.tensor([1, 2, 3]), torch.tensor([4])], fill=9)
    tensor([[1, 2, 3],
            [4, 9, 9]])
    """
    largest = [max(lengths) for lengths in zip(*(tensor.shape for tensor in tensors), strict=True)]
    stacked = torch.full((len(tensors), *largest), fill, dtype=tensors[0].dtype)
    for place, tensor in zip(stacked, tensors, strict=True):
        place[tuple(map(slice, tensor.shape))] = tensor
    return stacked


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
