"""Augmentation of whole batches of spectrograms on the device they are on, each with draws of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kronattn.data.augment import in_window
from kronattn.data.transforms import check_not_negative, check_shares, check_std

__all__ = ["SpectrogramSettings", "mask_bands", "shift_in_time"]


@dataclass(frozen=True)
class SpectrogramSettings:
    """How spectrograms are prepared.

    Args:
        size: frequencies and times of every picture.
        fold: the one that is tested; the next one validates, the others train.
        shift: by how much of the length a sound is moved in time at most; what leaves at one end comes in at the other.
        bands: how many bands of frequencies, and as many of times, are blanked (SpecAugment).
        band: the widest band, as a share of the axis.
        mixup: alpha of mixup; 0 for none.
        mean: of the values from 0 to 1, subtracted.
        std: of the values, divided by.
    """

    size: tuple[int, int] = (64, 216)
    fold: int = 1
    shift: float = 0.5
    bands: int = 1
    band: float = 0.2
    mixup: float = 0.0
    mean: tuple[float] = (0.4,)
    std: tuple[float] = (0.2,)

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(f"size must be frequencies and times, from 1 up, not {self.size}")
        check_shares(self, "shift", "band")
        check_not_negative(self, "bands", "mixup")
        check_std(self.std)


def shift_in_time(images: Tensor, share: float) -> Tensor:
    """Move each of (N, C, H, W) along its last axis, by up to ``share`` of it either way; the end joins the beginning.

    Example:
        >>> shift_in_time(torch.arange(4.0).view(1, 1, 1, 4), 1.0).sort().values.flatten().tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    if not share:
        return images
    samples, _, _, width = images.shape
    moved = (torch.empty(samples, device=images.device).uniform_(-share, share) * width).round().long()
    source = (torch.arange(width, device=images.device) - moved[:, None]) % width
    return images.gather(-1, source[:, None, None, :].expand_as(images))


def mask_bands(images: Tensor, bands: int, widest: float) -> Tensor:
    """Blank bands of rows and of columns of (N, C, H, W), which are normalised already: zero is the mean."""
    for _ in range(bands):
        for axis in (-2, -1):
            band = in_window(images.shape[axis], torch.rand(len(images), device=images.device) * widest)
            images = images.masked_fill(band[:, None, :, None] if axis == -2 else band[:, None, None, :], 0)
    return images
