"""Spectrograms as pictures, in folds: ``foldN/CLASS/PICTURE``, in a folder or a tar archive.

With K folds, fold N is tested, the one after it (after the last the first) validates, and the others train: each sound
is tested once, and what is chosen for a fold is chosen without its test.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kronattn.data.archives import Entry, list_files
from kronattn.data.decoded import Track, decode_each, untracked
from kronattn.data.images import BadImage, decode_with, is_image_name, to_grey
from kronattn.data.sounds import refuse_sounds

__all__ = ["Spectrograms", "decode_spectrograms", "load_spectrograms"]

_LEAST_FOLDS = 3
_COLOURED = ("P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV")
# How far the colours of a grey picture may lie apart, after JPEG.
_ALMOST_GREY = 8
_FOLD = re.compile(r"fold[ _-]?(\d+)", re.IGNORECASE)
_EXPECTED = "expected spectrograms as pictures, foldN/CLASS/PICTURE.png"


@dataclass(frozen=True)
class Spectrograms:
    """One split: pictures by number, each with the number of its class."""

    classes: Sequence[str]
    labels: Sequence[int]
    entries: Sequence[Entry]

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, index: int) -> np.ndarray:
        """Decode one as (H, W) grey values, uint8: frequency up, time to the right."""
        entry = self.entries[index]

        def levels(image: Image.Image) -> np.ndarray:
            if image.mode in _COLOURED and np.ptp(np.asarray(image.convert("RGB")), axis=2).max() > _ALMOST_GREY:
                raise BadImage(f"{entry} is coloured: levels must be grey values, not the colours of a colour map")
            return np.array(to_grey(image))

        return decode_with(levels, entry.read(), str(entry))


def load_spectrograms(path: str, fold: int, split: str) -> Spectrograms:
    """One split of the folds below ``path``, seen from ``fold``.

    Args:
        path: a folder or a tar archive.
        fold: the one that is tested.
        split: "train", "val" or "test".

    Example:
        >>> load_spectrograms("nowhere", 1, "train")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no folder or .tar archive 'nowhere'
    """
    files = list_files(path)
    refuse_sounds(files, _EXPECTED)
    found = [(*place, entry) for entry in files if is_image_name(entry.name) and (place := _placed(entry.name))]
    if not found:
        raise ValueError(f"{path} holds no folds: {_EXPECTED}")
    folds = sorted({number for number, _, _ in found})
    if fold not in folds:
        raise ValueError(f"{path} has no fold {fold}: it has {', '.join(map(str, folds))}")
    if len(folds) < _LEAST_FOLDS:
        raise ValueError(f"{path} has {len(folds)} folds: training, validation and test need {_LEAST_FOLDS}")
    validating = folds[(folds.index(fold) + 1) % len(folds)]
    chosen = {"test": {fold}, "val": {validating}, "train": set(folds) - {fold, validating}}
    if split not in chosen:
        raise ValueError(f"folds have the splits train, val and test, not {split!r}")
    classes = sorted({name for _, name, _ in found})
    number = {name: index for index, name in enumerate(classes)}
    part = [(number[name], entry) for at, name, entry in found if at in chosen[split]]
    return Spectrograms(classes, [label for label, _ in part], [entry for _, entry in part])


def decode_spectrograms(
    pictures: Spectrograms, size: tuple[int, int], *, track: Track = untracked
) -> dict[str, Tensor]:
    """All pictures as ``pixels``, (N, 1, H, W) uint8, and their ``labels``; one of another size is an error."""

    def decode(index: int) -> Tensor:
        pixels = pictures.pixels(index)
        if pixels.shape != size:
            height, width = pixels.shape
            raise BadImage(
                f"{pictures.entries[index]} is {height}×{width} (frequencies × times), expected {size[0]}×{size[1]}: "
                "data.images.size must be that of all pictures"
            )
        return torch.from_numpy(pixels)

    found = list(decode_each(decode, len(pictures), track, "Decoding spectrograms"))
    return {"pixels": torch.stack(found)[:, None], "labels": torch.tensor(pictures.labels)}


def _placed(name: str) -> tuple[int, str] | None:
    """The fold and the class of a file, wherever the folds begin: archives often have a folder around everything."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    for at, part in enumerate(parts[:-2]):
        if matched := _FOLD.fullmatch(part):
            return int(matched[1]), parts[at + 1]
    return None
