"""What happens to an image between its file and the network, as settings, and for one image at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

__all__ = ["ImageSettings", "evaluation_transform", "training_transform"]


@dataclass
class ImageSettings:
    """How images are prepared.

    Args:
        resize: every image is scaled to resize × resize first.
        keep_aspect: of an image that is not square, take the square in its middle before that, rather than squash it.
        size: the network sees size × size in training.
        crop: "random" cuts that from the scaled image; "resized" cuts a random part and scales it.
        scale: for "resized", the smallest and largest share of the image's area.
        flip: how often the image is mirrored.
        jitter: by how much brightness, contrast and saturation vary at most.
        erase: how often a random rectangle is blanked.
        mixup: alpha of mixup; 0 for none.
        cutmix: alpha of CutMix; 0 for none. With both, each batch takes one of them.
        eval_resize: as ``resize``, in evaluation; the same by default.
        eval_size: the centre that is taken in evaluation; ``size`` by default.
        mean: of the colours, subtracted (values from 0 to 1).
        std: of the colours, divided by.
    """

    resize: int = 256
    size: int = 224
    keep_aspect: bool = False
    crop: Literal["random", "resized"] = "random"
    scale: tuple[float, float] = (0.35, 1.0)
    flip: float = 0.5
    jitter: float = 0.0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    eval_resize: int | None = None
    eval_size: int | None = None
    mean: tuple[float, float, float] = field(default=(0.485, 0.456, 0.406))
    std: tuple[float, float, float] = field(default=(0.229, 0.224, 0.225))

    def __post_init__(self) -> None:
        if self.crop == "random" and self.size > self.resize:
            raise ValueError(f"size {self.size} cannot be cut from images of {self.resize}: raise resize or lower size")
        if self.evaluated_size > self.evaluated_resize:
            raise ValueError(f"eval_size {self.evaluated_size} cannot be cut from images of {self.evaluated_resize}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must be two shares of an area, the smaller first, not {self.scale}")

    @property
    def evaluated_resize(self) -> int:
        return self.eval_resize or self.resize

    @property
    def evaluated_size(self) -> int:
        return self.eval_size or self.size


def training_transform(settings: ImageSettings) -> Callable[[Image.Image], Tensor]:
    """RGB image to (3, size, size), uint8: scaled, cropped at random, flipped at random."""
    from torchvision.transforms import v2

    cut = (
        v2.RandomCrop(settings.size)
        if settings.crop == "random"
        else v2.RandomResizedCrop(settings.size, scale=settings.scale, antialias=True)
    )
    return v2.Compose([*_scaled(settings.resize), cut, v2.RandomHorizontalFlip(settings.flip), *_as_bytes()])


def evaluation_transform(settings: ImageSettings) -> Callable[[Image.Image], Tensor]:
    """RGB image to (3, eval_size, eval_size), uint8: scaled, and its centre taken."""
    from torchvision.transforms import v2

    cut = v2.CenterCrop(settings.evaluated_size)
    return v2.Compose([*_scaled(settings.evaluated_resize), cut, *_as_bytes()])


def _scaled(size: int) -> list[Callable]:
    from torchvision.transforms import v2

    return [v2.ToImage(), v2.Resize((size, size), antialias=True)]


def _as_bytes() -> list[Callable]:
    from torchvision.transforms import v2

    return [v2.ToDtype(torch.uint8), v2.ToPureTensor()]
