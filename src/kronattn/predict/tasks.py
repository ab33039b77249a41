"""What a network's output means, by task. A new task is one entry in ``TASKS``."""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

    from kronattn.models.files import Description

__all__ = ["TASKS", "Finding", "Task", "class_colour"]


@dataclass(frozen=True)
class Finding:
    """A class, and its share: its probability, or for segmentation its part of the image's area."""

    name: str
    share: float


@dataclass(frozen=True)
class Task:
    """``cut`` is :func:`kronattn.data.prepare.prepare_image`'s; ``interpret(output, image, description, top)`` gives
    the findings, largest share first, and a picture where there is one to draw."""

    cut: str
    interpret: Callable[[Tensor, Image.Image, Description, int], tuple[list[Finding], Image.Image | None]]


def classify(logits: Tensor, image: Image.Image, description: Description, top: int) -> tuple[list[Finding], None]:
    """(num_classes,) logits to the most probable classes.

    Example:
        >>> from PIL import Image
        >>> from kronattn.models.files import Description
        >>> pets = Description("kanet_kv", classes=["cat", "dog", "fish"])
        >>> classify(torch.tensor([0.0, 2.0, 1.0]), Image.new("RGB", (8, 8)), pets, 2)[0]
        [Finding(name='dog', share=0.665...), Finding(name='fish', share=0.244...)]
    """
    shares, numbers = logits.softmax(dim=0).topk(min(top, len(logits)))
    classes = description.classes
    return [Finding(_name(classes, n), s) for n, s in zip(numbers.tolist(), shares.tolist(), strict=True)], None


def segment(
    scores: Tensor, image: Image.Image, description: Description, top: int
) -> tuple[list[Finding], Image.Image | None]:
    """(num_classes, h, w) scores, at any resolution, to each class's part of the area, and an overlay."""
    from PIL import Image

    size = (image.height, image.width)
    labels = F.interpolate(scores.unsqueeze(0), size, mode="bilinear", align_corners=False)[0].argmax(dim=0).numpy()
    counts = np.bincount(labels.ravel(), minlength=len(scores)) / labels.size
    largest = np.argsort(-counts, kind="stable")[:top]
    found = [Finding(_name(description.classes, int(n)), float(counts[n])) for n in largest if counts[n] > 0]
    palette = description.palette or [list(class_colour(n)) for n in range(len(scores))]
    colours = np.array(palette, dtype=np.uint8)
    return found, Image.blend(image, Image.fromarray(colours[labels]), 0.55)


TASKS = {"classification": Task("centre", classify), "segmentation": Task("own", segment)}


def class_colour(number: int) -> tuple[int, int, int]:
    """Colours that stay apart however many classes there are: steps of the golden angle around the circle of hues.

    Example:
        >>> class_colour(0), class_colour(0) == class_colour(1)
        ((235, 70, 70), False)
    """
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.7, 0.92 - 0.25 * (number % 3 == 2))
    return round(red * 255), round(green * 255), round(blue * 255)


def _name(classes: Sequence[str], number: int) -> str:
    return classes[number] if number < len(classes) else f"class {number}"
