"""What a network's output means, by task. A new task is one entry in ``TASKS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from kronattn.present.legend import class_name, colours_of

if TYPE_CHECKING:
    from PIL import Image

    from kronattn.models.files import Description

__all__ = ["TASKS", "Finding", "Interpretation", "Task"]


@dataclass(frozen=True)
class Finding:
    """A class, and its share: its probability, or for segmentation its part of the image's area."""

    name: str
    share: float


class Interpretation(NamedTuple):
    """Findings, largest share first; for segmentation also an overlay and the labels as a palette image."""

    classes: list[Finding]
    picture: Image.Image | None = None
    mask: Image.Image | None = None


@dataclass(frozen=True)
class Task:
    """``cut`` is :func:`kronattn.data.prepare.prepare_image`'s; ``interpret(output, image, description, top)`` says
    what an image's output means."""

    cut: str
    interpret: Callable[[Tensor, Image.Image, Description, int], Interpretation]


def classify(logits: Tensor, image: Image.Image, description: Description, top: int) -> Interpretation:
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
    found = zip(numbers.tolist(), shares.tolist(), strict=True)
    return Interpretation([Finding(class_name(classes, number), share) for number, share in found])


def segment(scores: Tensor, image: Image.Image, description: Description, top: int) -> Interpretation:
    """(num_classes, h, w) scores, at any resolution, to each class's part of the area, an overlay and the labels, both
    of the image's size."""
    from PIL import Image

    size = (image.height, image.width)
    labels = F.interpolate(scores.unsqueeze(0), size, mode="bilinear", align_corners=False)[0].argmax(dim=0).numpy()
    counts = np.bincount(labels.ravel(), minlength=len(scores)) / labels.size
    largest = np.argsort(-counts, kind="stable")[:top]
    found = [Finding(class_name(description.classes, int(n)), float(counts[n])) for n in largest if counts[n] > 0]
    colours = np.array(colours_of(description, len(scores)), dtype=np.uint8)
    mask = Image.fromarray(labels.astype(np.uint8))
    mask.putpalette(colours.tobytes())
    return Interpretation(found, Image.blend(image, Image.fromarray(colours[labels]), 0.55), mask)


TASKS = {"classification": Task("centre", classify), "segmentation": Task("own", segment)}
