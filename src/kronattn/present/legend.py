"""Which colour stands for which class: one place that decides, and a picture of it."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from kronattn.models.files import Description

__all__ = ["class_colour", "colours_of", "draw_legend"]

_LINE = 24
_MARGIN = 8


def class_colour(number: int) -> tuple[int, int, int]:
    """Colours that stay apart however many classes there are: steps of the golden angle around the circle of hues.

    Example:
        >>> class_colour(0), class_colour(0) == class_colour(1)
        ((235, 70, 70), False)
    """
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.7, 0.92 - 0.25 * (number % 3 == 2))
    return round(red * 255), round(green * 255), round(blue * 255)


def colours_of(description: Description, count: int) -> list[tuple[int, int, int]]:
    """A colour for each of ``count`` classes: the network's own palette, or ours where it has none."""
    own = [(red, green, blue) for red, green, blue in description.palette]
    return [own[number] if number < len(own) else class_colour(number) for number in range(count)]


def draw_legend(names: Sequence[str], colours: Sequence[tuple[int, int, int]]) -> Image.Image:
    """A picture with a coloured square before each name.

    Example:
        >>> draw_legend(["sky", "road"], [(0, 0, 255), (90, 90, 90)]).height
        64
    """
    font = ImageFont.load_default(size=14)
    widest = max(int(font.getlength(name)) for name in names)
    picture = Image.new("RGB", (widest + 2 * _LINE + 2 * _MARGIN, len(names) * _LINE + 2 * _MARGIN), "white")
    draw = ImageDraw.Draw(picture)
    for at, (name, colour) in enumerate(zip(names, colours, strict=True)):
        top = _MARGIN + at * _LINE
        draw.rectangle((_MARGIN, top + 3, _MARGIN + 18, top + 21), fill=tuple(colour), outline="#718096")
        draw.text((_MARGIN + 28, top + 4), name, fill="#1a202c", font=font)
    return picture
