"""Random scales, crops and flips of images and masks together, in whole batches on the device they are on.

As :func:`kronattn.data.joint.joint_training_transform` does for one pair at a time; each pair has draws of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kronattn.data.augment import normalise
from kronattn.data.joint import JointSettings

__all__ = ["random_scaled_crop"]


def random_scaled_crop(pixels: Tensor, masks: Tensor, sizes: Tensor, settings: JointSettings) -> tuple[Tensor, Tensor]:
    """Images and masks scaled, cropped and flipped at random; padded where smaller than the crop.

    Args:
        pixels: (N, 3, H, W), values from 0 to 255.
        masks: (N, H, W), labels.
        sizes: (N, 2), each image's own height and width within H and W.

    Returns:
        (N, 3, crop, crop) float32, normalised, and (N, crop, crop) int64. Padding is the mean colour and the ignored
        label.

    Example:
        >>> pixels, masks = torch.zeros(2, 3, 40, 60), torch.zeros(2, 40, 60, dtype=torch.uint8)
        >>> x, y = random_scaled_crop(pixels, masks, torch.tensor([[40, 60], [30, 20]]), JointSettings(crop=33))
        >>> x.shape, y.shape, y.dtype
        (torch.Size([2, 3, 33, 33]), torch.Size([2, 33, 33]), torch.int64)
    """
    samples, device = len(pixels), pixels.device
    factor = torch.empty(samples, device=device).uniform_(*settings.scale)
    rows = _crop_axis(sizes[:, 0], factor, settings.crop)
    columns = _crop_axis(sizes[:, 1], factor, settings.crop)
    columns = columns.mirrored(torch.rand(samples, 1, device=device) < settings.flip)
    # Interpolation is linear in the pixels, one axis after the other: two products with matrices of weights.
    down = _weights(rows, sizes[:, 0], pixels.shape[-2])[:, None]
    across = _weights(columns, sizes[:, 1], pixels.shape[-1])[:, None]
    images = normalise(down @ pixels.float() @ across.transpose(-1, -2), settings)
    inside = rows.inside[:, :, None] & columns.inside[:, None, :]
    sample = torch.arange(samples, device=device)[:, None, None]
    labels = masks[sample, rows.nearest[:, :, None], columns.nearest[:, None, :]].long()
    return images * inside[:, None], torch.where(inside, labels, settings.ignore_index)


class _Axis(NamedTuple):
    """Where the pixels of a crop come from, along one axis; (N, crop) each, but for ``step``."""

    centre: Tensor  # in pixels of the image, counted from the middle of the first
    nearest: Tensor  # the pixel that it falls into
    inside: Tensor  # whether it is in the image at all
    step: Tensor  # (N, 1): from one to the next, in pixels of the image

    def mirrored(self, chosen: Tensor) -> _Axis:
        """The other way round for those that are chosen, (N, 1)."""

        def turned(values: Tensor) -> Tensor:
            return torch.where(chosen, values.flip(1), values)

        return _Axis(turned(self.centre), turned(self.nearest), turned(self.inside), self.step)


def _crop_axis(size: Tensor, factor: Tensor, crop: int) -> _Axis:
    size = size[:, None].float()
    scaled = (size * factor[:, None]).round().clamp(min=1)
    room = scaled - crop
    # A larger image starts before the crop, a smaller one within it: both anywhere that they can.
    start = (torch.rand_like(room) * (room.abs() + 1)).floor().minimum(room.abs()) * room.sign()
    position = start + torch.arange(crop, device=size.device) + 0.5
    step = size / scaled
    source = position * step
    nearest = source.floor().clamp(min=0).minimum(size - 1).long()
    return _Axis(source - 0.5, nearest, (position > 0) & (position < scaled), step)


def _weights(axis: _Axis, size: Tensor, length: int) -> Tensor:
    """What each pixel of the image weighs in each of the crop: (N, crop, length), float32.

    Triangles around the centres, as wide as a pixel of the crop where the image is scaled down: torchvision's bilinear
    interpolation with antialiasing.
    """
    pixel = torch.arange(length, device=size.device)
    weights = (1 - (pixel - axis.centre[:, :, None]).abs() / axis.step.clamp(min=1)[:, :, None]).clamp(min=0)
    weights = weights * (pixel < size[:, None, None])
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
