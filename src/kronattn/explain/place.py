"""Places: from "x,y" on an image to a position of a layer's grid, and layers by name or number."""

from __future__ import annotations

from collections.abc import Sequence

from kronattn.explain.operators import Comparison

__all__ = ["choose_layers", "grid_position", "parse_place", "place_in_part"]


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


def place_in_part(place: tuple[float, float], part: tuple[float, float]) -> tuple[float, float]:
    """A place on an image as a place on its centre, which has these parts of its width and height; outside of it is an
    error.

    Example:
        >>> place_in_part((0.5, 0.25), (1.0, 0.5))
        (0.5, 0.0)
    """
    x, y = ((at - (1 - share) / 2) / share for at, share in zip(place, part, strict=True))
    if not (0 <= x <= 1 and 0 <= y <= 1):
        raise ValueError(
            f"--at is outside the centre that the network sees, {part[0]:.0%} of the image's width and {part[1]:.0%} "
            "of its height"
        )
    return x, y


def choose_layers(comparisons: Sequence[Comparison], wanted: str | None) -> list[Comparison]:
    """The first layer, the middle one and the last; "all"; or those whose names or numbers (from 0, from the end with a
    minus) are in a comma-separated list."""
    if not comparisons:
        raise ValueError("the network has no attention layer: there is nothing to explain")
    if wanted == "all":
        return list(comparisons)
    if wanted is None:
        return [comparisons[at] for at in sorted({0, (len(comparisons) - 1) // 2, len(comparisons) - 1})]
    chosen = []
    for part in (part.strip() for part in wanted.split(",")):
        by_name = [one for one in comparisons if one.name == part]
        if by_name:
            chosen += by_name
        elif part.lstrip("-").isdigit() and -len(comparisons) <= int(part) < len(comparisons):
            chosen.append(comparisons[int(part)])
        else:
            names = ", ".join(dict.fromkeys(one.name for one in comparisons))
            raise ValueError(f"--layer {part!r} is not there: give all, 0 to {len(comparisons) - 1}, or one of {names}")
    return chosen
