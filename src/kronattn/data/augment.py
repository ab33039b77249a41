"""Augmentation of whole batches on the device they are on, each image with draws of its own.

torchvision's transforms draw once for a batch; these draw once for an image, without leaving the device and without
waiting for it. All draws come from PyTorch's generator of that device.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "center_crop",
    "flip",
    "in_window",
    "jitter",
    "mix",
    "normalise",
    "random_crop",
    "random_erase",
    "random_resized_crop",
]


def random_crop(images: Tensor, size: int) -> Tensor:
    """(N, C, H, W) to (N, C, size, size): a window of each image, pixel for pixel.

    Example:
        >>> random_crop(torch.zeros(2, 3, 10, 12), 8).shape
        torch.Size([2, 3, 8, 8])
    """
    samples, channels, height, width = images.shape
    inside = torch.arange(size, device=images.device)
    rows = _draw_index(height - size + 1, samples, images.device) + inside
    columns = _draw_index(width - size + 1, samples, images.device) + inside
    sample = torch.arange(samples, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[None, :, None, None]
    return images[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def random_resized_crop(
    images: Tensor, size: int, scale: tuple[float, float], ratio: tuple[float, float] = (3 / 4, 4 / 3)
) -> Tensor:
    """(N, C, H, W) to (N, C, size, size), float32: a part of each image, of random area and shape, scaled.

    Example:
        >>> random_resized_crop(torch.zeros(2, 3, 10, 12), 8, scale=(0.3, 1.0)).shape
        torch.Size([2, 3, 8, 8])
    """
    samples = images.shape[0]
    area = _draw(samples, images.device, *scale)
    shape = _draw(samples, images.device, math.log(ratio[0]), math.log(ratio[1])).exp()
    width = (area * shape).sqrt().clamp(max=1)
    height = (area / shape).sqrt().clamp(max=1)
    # Centres in the coordinates of affine_grid, where the image spans -1 to 1.
    x = _draw(samples, images.device, -1, 1) * (1 - width)
    y = _draw(samples, images.device, -1, 1) * (1 - height)
    zero = torch.zeros_like(x)
    window = torch.stack((torch.stack((width, zero, x), 1), torch.stack((zero, height, y), 1)), 1)
    grid = F.affine_grid(window, [samples, images.shape[1], size, size], align_corners=False)
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def center_crop(images: Tensor, resize: int, size: int) -> Tensor:
    """(N, C, H, W) to (N, C, size, size): scaled to resize × resize unless they are, and the centre taken.

    Example:
        >>> center_crop(torch.zeros(2, 3, 10, 10), 10, 8).shape
        torch.Size([2, 3, 8, 8])
    """
    if images.shape[-2:] != (resize, resize):
        images = F.interpolate(images.float(), size=(resize, resize), mode="bilinear", antialias=True)
    start = round((resize - size) / 2)
    return images[..., start : start + size, start : start + size]


def flip(images: Tensor, probability: float) -> Tensor:
    """Mirror some images of (N, C, H, W) left to right."""
    chosen = torch.rand(images.shape[0], 1, 1, 1, device=images.device) < probability
    return torch.where(chosen, images.flip(-1), images)


def jitter(images: Tensor, strength: float) -> Tensor:
    """Vary brightness, contrast and saturation of each image of (N, 3, H, W), values from 0 to 255, in float32."""
    if not strength:
        return images
    images = images.float()
    brightness, contrast, saturation = (
        _draw(images.shape[0], images.device, 1 - strength, 1 + strength)[:, None, None, None] for _ in range(3)
    )
    images = images * brightness
    images = torch.lerp(images.mean((1, 2, 3), keepdim=True), images, contrast)
    return torch.lerp(images.mean(1, keepdim=True), images, saturation).clamp(0, 255)


def random_erase(images: Tensor, probability: float) -> Tensor:
    """Blank a random rectangle in some images of (N, C, H, W), which are normalised already: zero is the mean."""
    if not probability:
        return images
    samples, _, height, width = images.shape
    device = images.device
    share = _draw(samples, device, 0.02, 0.33)
    shape = _draw(samples, device, math.log(0.3), math.log(1 / 0.3)).exp()
    rows = in_window(height, (share * shape).sqrt())[:, None, :, None]
    columns = in_window(width, (share / shape).sqrt())[:, None, None, :]
    chosen = torch.rand(samples, 1, 1, 1, device=device) < probability
    return images.masked_fill(rows & columns & chosen, 0)


def mix(
    images: Tensor, labels: Tensor, classes: int, *, mixup: float = 0.0, cutmix: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Each image of (N, C, H, W) with a share of the one before it, and (N, classes) with the shares of both classes.

    Args:
        labels: (N,), class numbers.
        mixup: alpha of mixup, which blends two images; 0 for none.
        cutmix: alpha of CutMix, which pastes a rectangle of one into the other; 0 for none. With both, each batch takes
            one of them.

    Example:
        >>> images, labels = mix(torch.ones(4, 3, 8, 8), torch.arange(4), 5, cutmix=1.0)
        >>> images.shape, labels.sum(1).tolist()
        (torch.Size([4, 3, 8, 8]), [1.0, 1.0, 1.0, 1.0])
    """
    targets = (labels[:, None] == torch.arange(classes, device=labels.device)).float()
    # What each pixel keeps of its own image: the only thing in which the two differ.
    ways = [way(alpha, images) for way, alpha in ((_blended, mixup), (_pasted, cutmix)) if alpha]
    if not ways:
        return images, targets
    own = ways[0]
    if len(ways) > 1:
        own = torch.where(torch.rand((), device=images.device) < 0.5, ways[0], ways[1])
    return torch.lerp(images.roll(1, 0), images, own), torch.lerp(targets.roll(1, 0), targets, own.mean())


def _blended(alpha: float, images: Tensor) -> Tensor:
    return _beta(alpha, images.device).expand(images.shape[-2:])


def _pasted(alpha: float, images: Tensor) -> Tensor:
    half = 0.5 * (1 - _beta(alpha, images.device)).sqrt()

    def covered(length: int) -> Tensor:
        centre = torch.rand((), device=images.device) * length
        return (torch.arange(length, device=images.device) + 0.5 - centre).abs() < half * length

    height, width = images.shape[-2:]
    return 1 - (covered(height)[:, None] & covered(width)).float()


def _beta(alpha: float, device: torch.device) -> Tensor:
    both = torch.full((2,), alpha, device=device)
    return torch.distributions.Beta(both[0], both[1], validate_args=False).sample()


class Colours(Protocol):
    """The part of the settings that says what the colours are like."""

    @property
    def mean(self) -> tuple[float, ...]: ...
    @property
    def std(self) -> tuple[float, ...]: ...


def normalise(images: Tensor, settings: Colours) -> Tensor:
    """(N, C, H, W) of values from 0 to 255 to float32 of about zero mean and unit variance."""
    mean, std = (_colour(tuple(values), images.device) for values in (settings.mean, settings.std))
    return (images.float() - mean) / std


@lru_cache(maxsize=64)
def _colour(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A colour, from 0 to 1, as what images are compared with. Once: to bring it to a GPU waits for all of its work."""
    # Not as a tensor of an evaluation, if that asks first: training could not use it.
    with torch.inference_mode(False):
        return torch.tensor(values, device=device).view(-1, 1, 1) * 255


def in_window(length: int, share: Tensor) -> Tensor:
    """Which positions of an axis lie in windows of (N,) shares of its length, at random places: (N, length)."""
    window = share.clamp(max=1) * length
    start = torch.rand(len(share), device=share.device) * (length - window)
    position = torch.arange(length, device=share.device) + 0.5
    return (position >= start[:, None]) & (position < (start + window)[:, None])


def _draw(samples: int, device: torch.device, low: float, high: float) -> Tensor:
    return torch.empty(samples, device=device).uniform_(low, high)


def _draw_index(choices: int, samples: int, device: torch.device) -> Tensor:
    return torch.randint(choices, (samples, 1), device=device)
