"""Which classes there are, found out from the masks where no file says it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from kronattn.data.archives import Entry
from kronattn.data.images import BadImage, decode_with
from kronattn.data.masks import Colour

__all__ = ["MOST_CLASSES", "classes_from_masks", "classes_text"]

# A mask with more values than this is a photograph, or has been through a lossy format.
MOST_CLASSES = 64


def classes_from_masks(masks: Sequence[Entry], ignore_index: int) -> tuple[list[str], list[Colour] | None]:
    """Names, and colours where masks hold these rather than labels.

    Small grey values and palette entries are labels: class 0 up to the largest. Other grey values (0 and 255, for
    instance) and colours each stand for a class, the darkest first.
    """
    values: set[int] = set()
    colours: set[Colour] = set()
    palette: list[Colour] = []
    for mask in masks:
        found = decode_with(_content, mask.read(), str(mask))
        if isinstance(found[0], np.ndarray):
            values |= set(np.unique(found[0]).tolist())
            palette = palette or found[1]
        else:
            colours |= found[0]
        if max(len(values), len(colours)) > 4 * MOST_CLASSES:
            break
    if values and colours:
        raise BadImage(f"some masks hold grey values or palette entries and others colours, such as {masks[0]}")
    if not values and not colours:
        raise BadImage("there is no mask to find the classes in: add classes.txt, a name on each line")
    labels = values - {ignore_index}
    if values and (not labels or max(labels) < MOST_CLASSES) and values != {0, 255}:
        count = max(labels, default=0) + 1
        return _names(count), palette[:count] if len(palette) >= count else None
    colours |= {(value, value, value) for value in values}
    if len(colours) > MOST_CLASSES:
        raise BadImage(
            f"the masks hold more than {MOST_CLASSES} values, so these are no labels; where they are, add classes.txt"
        )
    ordered = sorted(colours, key=lambda colour: (sum(colour), colour))
    return _names(len(ordered)), ordered


def classes_text(names: Sequence[str], colours: Sequence[Colour] | None) -> str:
    """What goes into classes.txt.

    Example:
        >>> classes_text(["background", "object"], [(0, 0, 0), (255, 255, 255)])
        'background 0 0 0\\nobject 255 255 255\\n'
    """
    if colours is None:
        return "".join(f"{name}\n" for name in names)
    return "".join(f"{name} {red} {green} {blue}\n" for name, (red, green, blue) in zip(names, colours, strict=True))


def _names(count: int) -> list[str]:
    return ["background", "object"] if count == 2 else [f"class {number}" for number in range(count)]


def _content(image: Image.Image) -> tuple[np.ndarray, list[Colour]] | tuple[set[Colour], None]:
    """Labels with the colours that a palette has for them, or a set of colours."""
    if image.mode in ("RGB", "RGBA"):
        counted = image.convert("RGB").getcolors(maxcolors=4 * MOST_CLASSES)
        if counted is None:
            raise BadImage(f"a mask has more than {4 * MOST_CLASSES} colours: it is no mask, or was kept as a JPEG")
        return {(int(c[0]), int(c[1]), int(c[2])) for _, c in counted if isinstance(c, tuple)}, None
    palette: list[Colour] = []
    if image.mode == "P":
        flat = image.getpalette() or []
        palette = [(flat[at], flat[at + 1], flat[at + 2]) for at in range(0, len(flat) - 2, 3)]
    values = np.asarray(image).astype(np.int64)
    return (255 * values if image.mode == "1" else values), palette
