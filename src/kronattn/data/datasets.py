"""Labelled images as PyTorch datasets: decoded once and kept, or decoded as they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from kronattn.data.classification import LabelledImages
from kronattn.data.decoded import DecodedSamples, Track, decode_each, untracked
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


class ImageDataset(Dataset):
    """Images that are decoded when they are asked for, in worker processes for instance: (3, size, size) uint8.

    With ``skip_bad``, a bad image gives ``None``, which :func:`collate_good` leaves out, and is marked in ``skipped``,
    which all worker processes share.
    """

    def __init__(self, images: LabelledImages, size: int, *, skip_bad: bool = False) -> None:
        self.images = images
        self.size = size
        self.skip_bad = skip_bad
        self.skipped = torch.zeros(len(images.labels), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.images.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        try:
            image = self.images.image(index)
        except BadImage:
            if not self.skip_bad:
                raise
            self.skipped[index] = True
            return None
        return _scaled(image, self.size), self.images.labels[index]


def _scaled(image: Image.Image, size: int) -> Tensor:
    """RGB image to (3, size, size), uint8."""
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def collate_good(samples: list[Any]) -> Any:
    """A batch of those samples that could be read."""
    good = [sample for sample in samples if sample is not None]
    if not good:
        raise BadImage(f"all {len(samples)} images of a batch are bad: nothing is left to train on")
    return default_collate(good)


def decode_all(
    images: LabelledImages, size: int, *, skip_bad: bool = False, track: Track = untracked
) -> tuple[DecodedImages, list[str]]:
    """Decode every image, scaled to ``size`` × ``size``, with a thread for each processor.

    Returns:
        The images, and the names of bad ones: left out with ``skip_bad``, an error otherwise.

    Example:
        >>> from kronattn.data.classification import load_split
        >>> decoded, bad = decode_all(load_split("digits", None, "val"), 32)
        >>> decoded.pixels.shape, bad
        (torch.Size([360, 3, 32, 32]), [])
    """
    total = len(images.labels)
    pixels = torch.empty((total, 3, size, size), dtype=torch.uint8)

    def decode(index: int) -> str | None:
        try:
            image = images.image(index)
        except BadImage:
            if not skip_bad:
                raise
            return images.name(index)
        pixels[index] = _scaled(image, size)
        return None

    bad = list(decode_each(decode, total, track))
    labels = torch.tensor(images.labels)
    good = torch.tensor([name is None for name in bad])
    if not good.all():
        pixels, labels = pixels[good], labels[good]
    if not len(labels):
        raise BadImage(f"all {total} images are bad: nothing is left to train on")
    return DecodedImages(pixels, labels), [name for name in bad if name is not None]
