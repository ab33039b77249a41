"""Random crops and intensities of whole batches of volumes on the device they are on, each with draws of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kronattn.data.volumes import IGNORED

__all__ = ["VolumeSettings", "random_volume_crop", "vary_intensity"]


@dataclass(frozen=True)
class VolumeSettings:
    """How volumes are prepared.

    Args:
        crop: the network sees crop in training; smaller volumes are padded with their mean.
        intensity: by how much contrast and brightness of the standardised values vary at most.
    """

    crop: tuple[int, int, int] = (32, 48, 32)
    intensity: float = 0.1

    @property
    def mean(self) -> tuple[float]:
        """Nothing is left to subtract: each volume is standardised by itself."""
        return (0.0,)

    @property
    def std(self) -> tuple[float]:
        return (1.0,)

    def __post_init__(self) -> None:
        if min(self.crop) < 1:
            raise ValueError(f"crop must be three lengths from 1 up, not {self.crop}")
        if not 0 <= self.intensity < 1:
            raise ValueError(f"intensity must be at least 0 and below 1, not {self.intensity}")


def random_volume_crop(
    voxels: Tensor, labels: Tensor, sizes: Tensor, crop: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """(N, C, D, H, W) and (N, D, H, W) to (N, C, *crop) float32 and (N, *crop) int64: a window of each volume.

    A smaller volume lies anywhere within the window, among zeros and ignored labels.

    Example:
        >>> voxels, labels = torch.ones(2, 1, 6, 6, 6), torch.zeros(2, 6, 6, 6, dtype=torch.uint8)
        >>> x, y = random_volume_crop(voxels, labels, torch.tensor([[6, 6, 6], [3, 6, 6]]), (4, 4, 4))
        >>> x.shape, y.shape, int((y == 255).sum())
        (torch.Size([2, 1, 4, 4, 4]), torch.Size([2, 4, 4, 4]), 16)
    """
    samples, device = len(voxels), voxels.device
    places, inside = [], torch.ones((samples, 1, 1, 1), dtype=torch.bool, device=device)
    for axis, length in enumerate(crop):
        size = sizes[:, axis : axis + 1]
        room = size - length
        # A larger volume starts before the window, a smaller one within it: both anywhere that they can.
        drawn = (torch.rand(samples, 1, device=device) * (room.abs() + 1)).floor().long().minimum(room.abs())
        position = drawn * room.sign() + torch.arange(length, device=device)
        view = [samples, 1, 1, 1]
        view[axis + 1] = length
        inside = inside & ((position >= 0) & (position < size)).view(view)
        places.append(position.clamp(min=0).minimum(size - 1).view(view))
    sample = torch.arange(samples, device=device).view(-1, 1, 1, 1)
    # Indices side by side, with the channels between them, put the channels last.
    depth, height, width = places
    window = voxels[sample, :, depth, height, width].movedim(-1, 1).float()
    truth = labels[sample, depth, height, width].long()
    return window * inside[:, None], torch.where(inside, truth, IGNORED)


def vary_intensity(voxels: Tensor, strength: float) -> Tensor:
    """Another contrast and brightness for each of (N, C, D, H, W)."""
    if not strength:
        return voxels

    def draw(low: float, high: float) -> Tensor:
        return torch.empty(len(voxels), 1, 1, 1, 1, device=voxels.device).uniform_(low, high)

    return voxels * draw(1 - strength, 1 + strength) + draw(-strength, strength)
