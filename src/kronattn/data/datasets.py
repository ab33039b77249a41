"""Labelled images as PyTorch datasets: decoded once and kept, or decoded as they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from kronattn.data.classification import LabelledImages
from kronattn.data.decoded import DecodedSamples, ReadSamples, Track, good_samples, untracked
from kronattn.data.images import BadImage

__all__ = ["DecodedImages", "ImageDataset", "collate_good", "decode_all"]


@dataclass(eq=False)
class DecodedImages(DecodedSamples):
    """Images that are kept in memory.

    Args:
        pixels: (N, 3, S, S), uint8, on any device.
        labels: (N,), on the same device.

    Example:
        >>> data = DecodedImages(torch.zeros(5, 3, 8, 8, dtype=torch.uint8), torch.arange(5))
        >>> images, labels = data.__getitems__([3, 1])
        >>> images.shape, labels.tolist()
        (torch.Size([2, 3, 8, 8]), [3, 1])
    """

    pixels: Tensor
    labels: Tensor


class ImageDataset(ReadSamples):
    """Images that are decoded when they are asked for: (3, size, size) uint8, and their labels."""

    def __init__(self, images: LabelledImages, size: int, *, skip_bad: bool = False) -> None:
        super().__init__(images, skip_bad=skip_bad)
        self.size = size

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        return self.read(index)

    def decode(self, index: int) -> tuple[Tensor, int]:
        image = self.images.image(index)
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), self.images.labels[index]


def collate_good(samples: list[Any]) -> Any:
    """A batch of those samples that could be read."""
    return default_collate(good_samples(samples, " of a batch"))


def decode_all(
    images: LabelledImages, size: int, *, skip_bad: bool = False, track: Track = untracked
) -> tuple[dict[str, Tensor], list[str]]:
    """Decode every image, scaled to ``size`` × ``size``, with a thread for each processor.

    Returns:
        What :class:`DecodedImages` is made of, and the names of bad images: left out with ``skip_bad``, an error
        otherwise.

    Example:
        >>> from kronattn.data.classification import load_split
        >>> decoded, bad = decode_all(load_split("digits", None, "val"), 32)
        >>> decoded["pixels"].shape, bad
        (torch.Size([360, 3, 32, 32]), [])
    """
    dataset = ImageDataset(images, size, skip_bad=skip_bad)
    # Into one tensor at once: a list of images and their stack would take twice the memory.
    pixels, labels = torch.empty((len(images), 3, size, size), dtype=torch.uint8), torch.tensor(images.labels)
    for index, sample in enumerate(dataset.read_all(track)):
        if sample is not None:
            pixels[index] = sample[0]
    good = ~dataset.skipped
    if not good.any():
        raise BadImage(f"all {len(images)} images are bad: nothing is left to train on")
    if not good.all():
        pixels, labels = pixels[good], labels[good]
    return {"pixels": pixels, "labels": labels}, dataset.bad_names()
