"""Real photographs that other packages bring along, to show things on: none has to be fetched or kept here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["CREDITS", "photographs"]

# The package that brings each, and where; with whose it is.
_PLACES = {
    "china.jpg": ("sklearn", "datasets/images"),
    "flower.jpg": ("sklearn", "datasets/images"),
    "grace_hopper.jpg": ("matplotlib", "mpl-data/sample_data"),
}
CREDITS = {
    "china.jpg": "photograph by danielbuechele, CC BY 2.0",
    "flower.jpg": "photograph by dany13, CC BY 2.0",
    "grace_hopper.jpg": "photograph by James S. Davis, public domain",
}


def photographs() -> list[Path]:
    """A temple in China, a flower and a portrait: those of them whose package is installed.

    Example:
        >>> all(path.name in CREDITS for path in photographs())
        True
    """
    found = []
    for name, (package, folder) in _PLACES.items():
        spec = importlib.util.find_spec(package)
        for place in (spec and spec.submodule_search_locations) or []:
            path = Path(place) / folder / name
            if path.exists():
                found.append(path)
    return found
