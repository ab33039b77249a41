"""From an image to what a trained network wants to see, as the network's own description says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Seen", "prepare_image", "require_torchvision"]

# Feature maps shrink by 32: an image whose sides are multiples of it has no half-empty last row or column.
_STEP = 32


class Seen(Protocol):
    """The part of :class:`kronattn.models.files.Description` that says how images are prepared."""

    @property
    def mean(self) -> Sequence[float]: ...
    @property
    def std(self) -> Sequence[float]: ...
    @property
    def resize(self) -> int: ...
    @property
    def size(self) -> int: ...


def prepare_image(image: Image.Image, seen: Seen, *, cut: str = "centre") -> Tensor:
    """An RGB image as (3, height, width), float32, normalised; (1, height, width) where the network sees grey.

    Args:
        image: of any size.
        seen: a network's description.
        cut: "centre" scales to resize × resize and takes the centre of size × size, as when the network was
            evaluated; "whole" scales likewise and keeps everything; "shape" keeps the image's shape, its shorter
            side scaled to ``size``, both rounded to a multiple of 32.

    Example:
        >>> from PIL import Image
        >>> from kronattn.models.files import Description
        >>> seen, image = Description("kanet_kv"), Image.new("RGB", (300, 200))
        >>> [tuple(prepare_image(image, seen, cut=cut).shape) for cut in ("centre", "whole", "shape")]
        [(3, 224, 224), (3, 256, 256), (3, 224, 352)]
    """
    require_torchvision("reading images")
    from torchvision.transforms.v2 import functional

    # A network of grey images has one mean.
    pixels = functional.pil_to_tensor(image if len(seen.mean) == 3 else image.convert("L"))
    if cut == "shape":
        factor = seen.size / min(image.height, image.width)
        # A strip of an image would become a very long one: four times as long as wide is enough.
        sides = [min(side * factor, 4 * seen.size) for side in (image.height, image.width)]
        pixels = functional.resize(pixels, [max(_STEP, round(side / _STEP) * _STEP) for side in sides], antialias=True)
    else:
        pixels = functional.resize(pixels, [seen.resize, seen.resize], antialias=True)
        if cut == "centre":
            pixels = functional.center_crop(pixels, [seen.size, seen.size])
    mean, std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (seen.mean, seen.std))
    return (pixels.float() / 255 - mean) / std


def require_torchvision(wanted_by: str) -> None:
    """Say what to install if torchvision is missing.

    >>> require_torchvision("reading images")
    """
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{wanted_by} needs {missing.name}: pip install 'kronattn[vision]'", name=missing.name
        ) from None
