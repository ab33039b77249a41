"""Image files from what was given on the command line: files, and folders of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kronattn.data.images import is_image_name

__all__ = ["list_images"]


def list_images(given: Iterable[Path]) -> list[Path]:
    """The files among ``given``, and the images at any depth in its folders, each once, folders in sorted order.

    A file is taken whatever its name, since somebody asked for it; in a folder what is not named like an image is
    passed over.
    """
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*") if one.is_file() and is_image_name(one.name))
            if not inside:
                raise ValueError(f"{path} holds no images")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise FileNotFoundError(f"there is no file {path}")
    return list(dict.fromkeys(found))
