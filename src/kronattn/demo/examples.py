"""Pictures to start from: photographs that other packages bring, and some of our own making, since no dataset's images
are in the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from PIL import Image, ImageDraw

from kronattn.data.photographs import photographs

__all__ = ["write_examples"]

_SIZE = (480, 360)


def write_examples(folder: Path) -> list[Path]:
    """Put the example pictures into a folder and return their paths.

    Example:
        >>> import tempfile
        >>> [path.name for path in write_examples(Path(tempfile.mkdtemp()))][-3:]
        ['discs.png', 'street.png', 'stripes.png']
    """
    found = [Path(shutil.copy(photograph, folder)) for photograph in photographs()]
    for name, draw in (("discs", _discs), ("street", _street), ("stripes", _stripes)):
        image = Image.new("RGB", _SIZE, "#e2e8f0")
        draw(ImageDraw.Draw(image))
        path = folder / f"{name}.png"
        image.save(path)
        found.append(path)
    return found


def _discs(draw: ImageDraw.ImageDraw) -> None:
    for centre, radius, colour in (
        ((140, 120), 70, "#c53030"),
        ((350, 250), 90, "#2b6cb0"),
        ((390, 70), 40, "#d69e2e"),
    ):
        x, y = centre
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def _street(draw: ImageDraw.ImageDraw) -> None:
    draw.rectangle((0, 0, 480, 190), fill="#90cdf4")
    draw.polygon([(0, 360), (480, 360), (270, 180), (210, 180)], fill="#4a5568")
    for left, top, right, colour in ((20, 60, 130, "#a0522d"), (340, 30, 460, "#8a94a6"), (150, 110, 205, "#b7791f")):
        draw.rectangle((left, top, right, 250), fill=colour)
        for x in range(left + 12, right - 16, 30):
            for y in range(top + 14, 230, 34):
                draw.rectangle((x, y, x + 14, y + 18), fill="#f6e05e")
    draw.rectangle((300, 250, 400, 300), fill="#c53030")
    draw.ellipse((312, 288, 340, 316), fill="#1a202c")
    draw.ellipse((360, 288, 388, 316), fill="#1a202c")


def _stripes(draw: ImageDraw.ImageDraw) -> None:
    for x in range(0, 480, 60):
        draw.rectangle((x, 0, x + 25, 360), fill="#2f855a")
    draw.rectangle((0, 210, 480, 260), fill="#c53030")
