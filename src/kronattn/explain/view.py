"""One operator's view of an image, drawn quickly enough to follow a click: bars along the edges, a map on the image."""

from __future__ import annotations

from PIL import Image, ImageDraw

from kronattn.explain.heat import drawn_shares, overlaid
from kronattn.explain.place import grid_position
from kronattn.nn.recorded import RecordedAttention

__all__ = ["COLOURS", "MARGIN", "draw_view", "place_in_view"]

COLOURS = {"kv": "#2b6cb0", "qkv": "#dd6b20", "regular": "#718096"}
MARGIN = 72
_LONGEST = 520
_GAP = 4


def draw_view(image: Image.Image, call: RecordedAttention, place: tuple[float, float]) -> Image.Image:
    """An image with a margin above for its columns' weights and one on the left for its rows'.

    Args:
        image: the whole image that the network saw, of any size.
        call: a layer's record.
        place: x and y as fractions of the image's width and height.

    Example:
        >>> from kronattn.nn import KroneckerAttention, record_coefficients
        >>> layer = KroneckerAttention(8).eval()
        >>> with record_coefficients(layer) as recorded:
        ...     y = layer(torch.randn(1, 8, 4, 6))
        >>> view = draw_view(Image.new("RGB", (60, 40)), recorded[0], (0.5, 0.5))
        >>> view.size, place_in_view(view.size, (72, 72))
        ((592, 419), (0.0, 0.0))
    """
    factor = _LONGEST / max(image.size)
    shown = image.resize((max(1, round(image.width * factor)), max(1, round(image.height * factor))))
    position = grid_position(place, call.grid)
    rows, columns, places = drawn_shares(call.at(*position))
    shown = overlaid(shown, places)

    view = Image.new("RGB", (MARGIN + shown.width, MARGIN + shown.height), "white")
    view.paste(shown, (MARGIN, MARGIN))
    draw = ImageDraw.Draw(view)
    colour = COLOURS[call.mode]
    most = max(float(rows.max()), float(columns.max()))
    room = MARGIN - _GAP
    for at, weight in enumerate(columns):
        left, right = (MARGIN + shown.width * edge / len(columns) for edge in (at, at + 1))
        draw.rectangle((left, room - (room - 2) * weight / most, max(left, right - 1), room), fill=colour)
    for at, weight in enumerate(rows):
        top, bottom = (MARGIN + shown.height * edge / len(rows) for edge in (at, at + 1))
        draw.rectangle((room - (room - 2) * weight / most, top, room, max(top, bottom - 1)), fill=colour)
    row, column = position
    box = [
        (MARGIN + shown.width * (column + step) / call.grid[1], MARGIN + shown.height * (row + step) / call.grid[0])
        for step in (0, 1)
    ]
    for colour, line in (("white", 5), ("#e53e3e", 3)):
        draw.rectangle((*box[0], *box[1]), outline=colour, width=line)
    return view


def place_in_view(size: tuple[int, int], pixel: tuple[float, float]) -> tuple[float, float]:
    """Where a pixel of a view lies on its image, as fractions; a pixel in a margin belongs to the image's edge."""
    return tuple(  # type: ignore[return-value]
        min(max((at - MARGIN) / (whole - MARGIN), 0.0), 1.0) for at, whole in zip(pixel, size, strict=True)
    )
