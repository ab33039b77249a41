"""What happens to an image between its file and the network, as settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["ImageSettings", "check_not_negative", "check_shares", "check_std"]


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
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        for name in ("resize", "size", "eval_resize", "eval_size"):
            if (length := getattr(self, name)) is not None and length < 1:
                raise ValueError(f"{name} must be at least 1, not {length}")
        check_shares(self, "flip", "erase")
        check_not_negative(self, "jitter", "mixup", "cutmix")
        check_std(self.std)
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


def check_shares(settings: Any, *names: str) -> None:
    """Refuse settings that are no shares."""
    for name in names:
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {getattr(settings, name)}")


def check_not_negative(settings: Any, *names: str) -> None:
    """Refuse settings below zero, and those that are no numbers."""
    for name in names:
        if not getattr(settings, name) >= 0:
            raise ValueError(f"{name} must be at least 0, not {getattr(settings, name)}")


def check_std(std: Sequence[float]) -> None:
    """Refuse what values cannot be divided by."""
    if not all(value > 0 for value in std):
        raise ValueError(f"std must be above 0, not {', '.join(f'{value:g}' for value in std)}")
