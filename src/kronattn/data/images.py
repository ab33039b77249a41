"""Image files of every kind, read as RGB; a file that cannot be read is an error that names it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

__all__ = [
    "IMAGE_SUFFIXES",
    "BadImage",
    "central_square",
    "decode_image",
    "decode_with",
    "is_image_name",
    "read_image",
    "to_grey",
]

Result = TypeVar("Result")

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")

# Pillow warns from here on and refuses twice this; a warning in the middle of a training run helps nobody.
MAX_PIXELS = 89_478_485


class BadImage(ValueError):
    """A file that is no image, or a broken or dangerous one. The message is one line and names the file."""

    def __init__(self, message: str) -> None:
        # A loader's worker process hands over its error inside a traceback, of which that line is the last.
        super().__init__(message.strip().splitlines()[-1].removeprefix(f"{__name__}.BadImage: "))


def is_image_name(name: str) -> bool:
    """Whether a file's name ends like an image's, in any case; hidden files are not images.

    >>> is_image_name("n01440764_18.JPEG"), is_image_name("labels.csv"), is_image_name("._a.png")
    (True, False, False)
    """
    base = name.rsplit("/", 1)[-1]
    return not base.startswith(".") and base.lower().endswith(IMAGE_SUFFIXES)


def read_image(path: str | Path) -> Image.Image:
    """Read an image file as RGB, upright, whatever its mode: see :func:`decode_image`."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise BadImage(f"{path} is a folder, not an image") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None
    return decode_image(data, str(path))


def decode_image(data: bytes, name: str) -> Image.Image:
    """Decode an image file's bytes as RGB.

    Turned as its EXIF tag says; transparency over white; 16-bit grey scaled to 8 bits; of an animation the first
    frame. ``name`` goes into the error, a :class:`BadImage`, when the bytes are no image, end early, or hold so many
    pixels that decoding them would exhaust the memory.

    Example:
        >>> decode_image(b"not an image", "cat.jpg")
        Traceback (most recent call last):
        ...
        kronattn.data.images.BadImage: cat.jpg is not an image that Pillow can read
    """
    return decode_with(lambda image: _to_rgb(ImageOps.exif_transpose(image)), data, name)


def central_square(image: Image.Image) -> Image.Image:
    """The largest square in the middle of an image.

    Example:
        >>> central_square(Image.new("RGB", (300, 200))).size
        (200, 200)
    """
    side = min(image.size)
    if image.size == (side, side):
        return image
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def decode_with(convert: Callable[[Image.Image], Result], data: bytes, name: str) -> Result:
    """Decode an image file's bytes as they are, and give what ``convert`` makes of it; errors as in
    :func:`decode_image`.

    Example:
        >>> decode_with(lambda image: image.mode, b"", "mask.png")
        Traceback (most recent call last):
        ...
        kronattn.data.images.BadImage: mask.png is empty
    """
    if not data:
        raise BadImage(f"{name} is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                image.load()
                return convert(image)
    except BadImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadImage(f"{name} has more than {MAX_PIXELS:,} pixels: too large to decode") from None
    except UnidentifiedImageError:
        raise BadImage(f"{name} is not an image that Pillow can read") from None
    except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
        raise BadImage(f"{name} is broken: {' '.join(str(error).split())}") from None


def to_grey(image: Image.Image) -> Image.Image:
    """A picture's grey values in 8 bits. Pillow by itself would take every value above 255 for 255."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return Image.fromarray(_eight_bits(np.asarray(image, dtype=np.float32)))
    return image.convert("L")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return to_grey(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _eight_bits(values: np.ndarray) -> np.ndarray:
    """Values of 8 bits stay; those of 16 bits lose the lower 8; others are spread over the range."""
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 255:
        return values.astype(np.uint8)
    if low >= 0 and high <= 65535:
        return (values / 257).astype(np.uint8)
    return ((values - low) * (255 / (high - low))).astype(np.uint8)
