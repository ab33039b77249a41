"""From an image to what a trained network wants to see, as the network's own description says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kronattn.extras import require_library

if TYPE_CHECKING:
    from PIL import Image

    from kronattn.models.files import Description

__all__ = ["prepare_image", "seen_part"]

# A photograph of twenty million pixels would take gigabytes of features, and its objects exceed any training crop.
_LONGEST = 2048


def prepare_image(image: Image.Image, seen: Description, *, cut: str = "centre") -> Tensor:
    """An RGB image as (3, height, width), float32, normalised; (1, height, width) where the network sees grey.

    Args:
        image: of any size.
        seen: a network's description.
        cut: "centre" scales to resize × resize and takes the centre of size × size, as when the network was
            evaluated (of the square in its middle, where the network keeps the aspect); "whole" scales likewise and
            keeps everything; "own" takes the image as it is, as segmenters do, scaled down only where a side is longer
            than 2048.

    Example:
        >>> from PIL import Image
        >>> from kronattn.models.files import Description
        >>> seen, image = Description("kanet_kv"), Image.new("RGB", (300, 200))
        >>> [tuple(prepare_image(image, seen, cut=cut).shape) for cut in ("centre", "whole", "own")]
        [(3, 224, 224), (3, 256, 256), (3, 200, 300)]
    """
    require_library("torchvision", "reading images")
    from torchvision.transforms.v2 import functional

    from kronattn.data.images import central_square

    if cut == "centre" and seen.keep_aspect:
        image = central_square(image)
    # A network of grey images has one mean.
    pixels = functional.pil_to_tensor(image if len(seen.mean) == 3 else image.convert("L"))
    if cut == "own":
        longest = max(image.height, image.width)
        if longest > _LONGEST:
            sides = [max(1, round(side * _LONGEST / longest)) for side in (image.height, image.width)]
            pixels = functional.resize(pixels, sides, antialias=True)
    else:
        pixels = functional.resize(pixels, [seen.resize, seen.resize], antialias=True)
        if cut == "centre":
            pixels = functional.center_crop(pixels, [seen.size, seen.size])
    mean, std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (seen.mean, seen.std))
    return (pixels.float() / 255 - mean) / std


def seen_part(image: Image.Image, seen: Description, *, cut: str = "centre") -> Image.Image:
    """The part of an image that :func:`prepare_image` takes, at the image's own resolution.

    Example:
        >>> from PIL import Image
        >>> from kronattn.models.files import Description
        >>> seen_part(Image.new("RGB", (320, 640)), Description("kanet_kv", resize=256, size=224)).size
        (280, 560)
    """
    from kronattn.data.images import central_square

    if cut != "centre":
        return image
    if seen.keep_aspect:
        image = central_square(image)
    if seen.size == seen.resize:
        return image
    margin = (1 - seen.size / seen.resize) / 2
    left, top = round(image.width * margin), round(image.height * margin)
    return image.crop((left, top, image.width - left, image.height - top))
