"""Masks: a label for each pixel, from files that hold them as grey values, palette entries, colours or matrices."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from kronattn.data.images import BadImage, decode_with

__all__ = ["Colour", "Labels", "decode_mask", "voc_palette"]

Colour = tuple[int, int, int]

_GREY = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")
_COLOURED = ("RGB", "RGBA")


@dataclass(frozen=True)
class Labels:
    """What the numbers in a mask mean.

    Args:
        classes: names; label i is the i-th.
        ignore_index: the label of pixels that count neither in training nor in evaluation.
        palette: the colour of each class, for masks that hold colours; None where there is none.
        ignore_colour: the colour of ignored pixels.
    """

    classes: tuple[str, ...]
    ignore_index: int = 255
    palette: tuple[Colour, ...] | None = None
    ignore_colour: Colour | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.classes) <= 255:
            raise ValueError(f"there must be from 1 to 255 classes, not {len(self.classes)}")
        if not 0 <= self.ignore_index <= 255:
            raise ValueError(f"ignore_index must lie between 0 and 255, not {self.ignore_index}")
        if self.ignore_index < self.num_classes:
            raise ValueError(f"ignore_index {self.ignore_index} is also the label of {self.classes[self.ignore_index]}")
        if self.palette is not None and len(self.palette) != self.num_classes:
            raise ValueError(f"the palette has {len(self.palette)} colours for {self.num_classes} classes")

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def colours(self) -> tuple[Colour, ...]:
        """A colour for each class, to draw masks with: the palette, or PASCAL VOC's."""
        return self.palette or voc_palette(self.num_classes)

    def __str__(self) -> str:
        return f"labels are 0 to {self.num_classes - 1}, and {self.ignore_index} where ignored"


def decode_mask(data: bytes, name: str, labels: Labels) -> np.ndarray:
    """Decode a mask file's bytes to labels, (H, W) uint8.

    Grey values and palette entries are labels; colours are looked up in the palette of ``labels``; a ``.mat`` is one
    of SBD's. ``name`` goes into the error, a :class:`kronattn.data.images.BadImage`, where a file is broken, lossy, or
    has a label or a colour that means nothing.

    Example:
        >>> decode_mask(b"", "masks/a.png", Labels(("road", "sky")))
        Traceback (most recent call last):
        ...
        kronattn.data.images.BadImage: masks/a.png is empty
    """
    if name.lower().endswith(".mat"):
        return _checked(_read_sbd(data, name), name, labels)
    return _checked(decode_with(lambda image: _numbers(image, name, labels), data, name), name, labels)


def voc_palette(count: int) -> tuple[Colour, ...]:
    """PASCAL VOC's colours: the bits of a label, dealt out to red, green and blue from the top.

    Example:
        >>> voc_palette(3)
        ((0, 0, 0), (128, 0, 0), (0, 128, 0))
    """

    def channel(label: int, at: int) -> int:
        return sum((label >> (3 * place + at) & 1) << (7 - place) for place in range(3))

    return tuple((channel(label, 0), channel(label, 1), channel(label, 2)) for label in range(count))


def _numbers(image: Image.Image, name: str, labels: Labels) -> np.ndarray:
    if image.format in ("JPEG", "MPO"):
        raise BadImage(f"{name} is a JPEG, which does not keep labels: masks must be PNG or another lossless format")
    if image.mode in ("1", "L") and labels.palette is not None and all(len(set(grey)) == 1 for grey in labels.palette):
        # Such as 0 and 255 for two classes: grey is the colour, not the label.
        return _from_colours(np.asarray(image.convert("RGB")), name, labels)
    if image.mode in _GREY:
        return np.asarray(image).astype(np.int64)
    if image.mode in _COLOURED:
        return _from_colours(np.asarray(image.convert("RGB")), name, labels)
    raise BadImage(f"{name} is a mask of mode {image.mode}: it must hold grey values, palette entries or RGB colours")


def _from_colours(pixels: np.ndarray, name: str, labels: Labels) -> np.ndarray:
    if labels.palette is None:
        raise BadImage(f"{name} holds RGB colours, and there is no palette that says which label each stands for")
    wanted: list[tuple[Colour, int]] = [(colour, label) for label, colour in enumerate(labels.palette)]
    if labels.ignore_colour is not None:
        wanted.append((labels.ignore_colour, labels.ignore_index))
    codes = _codes(pixels)
    numbers = np.full(codes.shape, -1, dtype=np.int64)
    for colour, label in wanted:
        numbers[codes == _codes(np.array(colour))] = label
    if (numbers < 0).any():
        row, column = np.argwhere(numbers < 0)[0].tolist()
        colour_found = tuple(pixels[row, column].tolist())
        raise BadImage(f"{name}: the colour {colour_found} at row {row}, column {column} is not in the palette")
    return numbers


def _codes(pixels: np.ndarray) -> Any:
    red, green, blue = (pixels[..., at].astype(np.int32) for at in range(3))
    return red << 16 | green << 8 | blue


def _read_sbd(data: bytes, name: str) -> np.ndarray:
    """The class segmentation inside one of SBD's MATLAB files."""
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{name} is a MATLAB file and needs scipy: pip install 'kronattn[train]'", name="scipy"
        ) from None
    try:
        found = np.asarray(loadmat(io.BytesIO(data))["GTcls"][0]["Segmentation"][0])
    except Exception as error:  # the reader has no error class of its own
        raise BadImage(f"{name} is not one of SBD's MATLAB files: {' '.join(str(error).split())[:120]}") from None
    if found.ndim != 2:
        raise BadImage(f"{name} holds a segmentation of shape {found.shape}, not of rows and columns")
    return found.astype(np.int64)


def _checked(numbers: np.ndarray, name: str, labels: Labels) -> np.ndarray:
    bad = ((numbers < 0) | (numbers >= labels.num_classes)) & (numbers != labels.ignore_index)
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        raise BadImage(f"{name}: label {numbers[row, column]} at row {row}, column {column}; {labels}")
    return numbers.astype(np.uint8)
