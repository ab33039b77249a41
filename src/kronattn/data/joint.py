"""What happens to an image and its mask between their files and the network: both alike. Needs torchvision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kronattn.data.decoded import ReadSamples, Track, good_samples, stack_padded, untracked
from kronattn.data.segmentation import SegmentedImages
from kronattn.data.transforms import check_shares, check_std

__all__ = [
    "JointSettings",
    "RandomScale",
    "SegmentationDataset",
    "collate_padded",
    "joint_evaluation_transform",
    "joint_training_transform",
]

Joint = Callable[[Any, Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class JointSettings:
    """How images and masks are prepared.

    Args:
        crop: the network sees crop × crop in training; smaller images are padded.
        scale: the smallest and largest factor of the random scaling; (1, 1) for none.
        flip: how often both are mirrored.
        ignore_index: the label that masks are padded with.
        mean: of the colours, subtracted (values from 0 to 1); images are padded with it.
        std: of the colours, divided by.
    """

    crop: int = 321
    scale: tuple[float, float] = (0.5, 1.5)
    flip: float = 0.5
    ignore_index: int = 255
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if self.crop < 1:
            raise ValueError(f"crop must be at least 1, not {self.crop}")
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale must be two factors, the smaller first, not {self.scale}")
        check_shares(self, "flip")
        check_std(self.std)
        if not 0 <= self.ignore_index <= 255:
            raise ValueError(f"ignore_index must lie between 0 and 255, not {self.ignore_index}")


class SegmentationDataset(ReadSamples):
    """Images and masks that are decoded when they are asked for.

    Each sample is ``(tv_tensors.Image, tv_tensors.Mask)``, (3, H, W) and (H, W) uint8, or what ``transform`` makes of
    the two.
    """

    def __init__(self, images: SegmentedImages, transform: Joint | None = None, *, skip_bad: bool = False) -> None:
        super().__init__(images, skip_bad=skip_bad)
        self.transform = transform
        self._kept: list[tuple[Any, Any] | None] | None = None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | None:
        pair = self.read(index) if self._kept is None else self._kept[index]
        return pair if pair is None or self.transform is None else self.transform(*pair)

    def keep(self, track: Track = untracked) -> None:
        """Decode everything now and keep it."""
        self._kept = list(self.read_all(track))

    def decode(self, index: int) -> tuple[Any, Any]:
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        picture, labels = self.images.pair(index)
        return functional.to_image(picture), tv_tensors.Mask(torch.from_numpy(labels))


class RandomScale:
    """Scales an image and its mask by one random factor: bilinearly, and to the nearest label.

    Example:
        >>> from torchvision import tv_tensors
        >>> image = tv_tensors.Image(torch.zeros(3, 40, 60, dtype=torch.uint8))
        >>> mask = tv_tensors.Mask(torch.zeros(40, 60, dtype=torch.uint8))
        >>> image, mask = RandomScale(0.5, 0.5)(image, mask)
        >>> image.shape, mask.shape
        (torch.Size([3, 20, 30]), torch.Size([20, 30]))
    """

    def __init__(self, smallest: float, largest: float) -> None:
        self.smallest = smallest
        self.largest = largest

    def __call__(self, image: Any, mask: Any) -> tuple[Any, Any]:
        from torchvision.transforms.v2 import functional

        factor = torch.empty(()).uniform_(self.smallest, self.largest).item()
        size = [max(1, round(length * factor)) for length in image.shape[-2:]]
        return functional.resize(image, size, antialias=True), functional.resize(mask, size)

    def __repr__(self) -> str:
        return f"RandomScale({self.smallest}, {self.largest})"


def joint_training_transform(settings: JointSettings) -> Joint:
    """An image and its mask to (3, crop, crop) float, normalised, and (crop, crop) int64: scaled, cropped and flipped
    at random, padded where smaller with the mean colour and the ignored label.

    Example:
        >>> from torchvision import tv_tensors
        >>> image = tv_tensors.Image(torch.zeros(3, 40, 60, dtype=torch.uint8))
        >>> mask = tv_tensors.Mask(torch.zeros(40, 60, dtype=torch.uint8))
        >>> x, y = joint_training_transform(JointSettings())(image, mask)
        >>> x.shape, y.shape, sorted(set(y.flatten().tolist()))
        (torch.Size([3, 321, 321]), torch.Size([321, 321]), [0, 255])
    """
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    fill = {
        tv_tensors.Image: [round(255 * value) for value in settings.mean],
        tv_tensors.Mask: settings.ignore_index,
    }
    steps: list[Any] = [] if settings.scale == (1, 1) else [RandomScale(*settings.scale)]
    steps += [
        v2.RandomCrop(settings.crop, pad_if_needed=True, fill=fill),
        v2.RandomHorizontalFlip(settings.flip),
        *_as_numbers(settings),
    ]
    return v2.Compose(steps)


def joint_evaluation_transform(settings: JointSettings) -> Joint:
    """An image and its mask to (3, H, W) float, normalised, and (H, W) int64, at their own size."""
    from torchvision.transforms import v2

    return v2.Compose(_as_numbers(settings))


def _as_numbers(settings: JointSettings) -> list[Any]:
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    return [
        v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64}, scale=True),
        v2.Normalize(settings.mean, settings.std),
        v2.ToPureTensor(),
    ]


def collate_padded(samples: Sequence[tuple[Tensor, Tensor] | None], ignore_index: int = 255) -> tuple[Tensor, Tensor]:
    """A batch of normalised images and masks of any sizes: padded at the right and at the bottom to the largest, with
    the mean colour and the ignored label. Samples that could not be read are left out.

    Example:
        >>> small, large = torch.ones(3, 2, 5), torch.ones(3, 4, 3)
        >>> images, masks = collate_padded([(small, torch.zeros(2, 5)), (large, torch.zeros(4, 3))])
        >>> images.shape, masks.shape, int((masks == 255).sum())
        (torch.Size([2, 3, 4, 5]), torch.Size([2, 4, 5]), 18)
    """
    images, masks = zip(*good_samples(samples, " of a batch"), strict=True)
    return stack_padded(images), stack_padded(masks, ignore_index)
