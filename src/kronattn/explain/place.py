"""Places: from "x,y" on an image to a position of a layer's grid, and layers by name or number."""

from __future__ import annotations

from collections.abc import Sequence

from kronattn.explain.operators import Comparison

__all__ = ["choose_layers", "grid_position", "parse_place"]


def parse_place(text: str | None, width: int, height: int) -> tuple[float, float]:
    """Pixels "x,y" as fractions of an image's width and height; the centre where nothing is given.

    Example:
        >>> parse_place("30,10", 120, 40), parse_place(None, 120, 40)
        ((0.254..., 0.2625), (0.5, 0.5))
    """
    if text is None:
        return 0.5, 0.5
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--at must be two numbers, x,y in pixels from the upper left, not {text!r}") from None
    if not (0 <= x < width and 0 <= y < height):
        raise ValueError(f"--at {text} is outside the image, which is {width}×{height}")
    return (x + 0.5) / width, (y + 0.5) / height


def grid_position(place: tuple[float, float], grid: Sequence[int]) -> tuple[int, int]:
    """The row and column of a (rows, columns) grid in which a place (x, y), as fractions, lies.

    Example:
        >>> grid_position((0.5, 0.99), (4, 6))
        (3, 3)
    """
    x, y = place
    return min(int(y * grid[0]), grid[0] - 1), min(int(x * grid[1]), grid[1] - 1)


def choose_layers(comparisons: Sequence[Comparison], wanted: str | None) -> list[Comparison]:
    """All layers, or those whose names or numbers (from 0, from the end with a minus) are in a comma-separated list."""
    if not comparisons:
        raise ValueError("the network has no attention layer: there is nothing to explain")
    if wanted is None:
        return list(comparisons)
    chosen = []
    for part in (part.strip() for part in wanted.split(",")):
        by_name = [one for one in comparisons if one.name == part]
        if by_name:
            chosen += by_name
        elif part.lstrip("-").isdigit() and -len(comparisons) <= int(part) < len(comparisons):
            chosen.append(comparisons[int(part)])
        else:
            names = ", ".join(dict.fromkeys(one.name for one in comparisons))
            raise ValueError(f"--layer {part!r} is not there: give 0 to {len(comparisons) - 1}, or one of {names}")
    return chosen
