"""Volumes with a label for each voxel, as NIfTI files, in folders or tar archives. Needs nibabel to read them.

Either ``images/NAME.nii.gz`` and ``labels/NAME.nii.gz`` with a ``splits.json`` beside them, which lists the names of
"train", "val" and "test"; or ``SPLIT/images/`` and ``SPLIT/labels/``. A file ``classes.txt`` may name the classes, a
line each, the background first; without it they are as many as the labels say.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kronattn.data.archives import Entry, list_files
from kronattn.data.decoded import DecodedSamples, Track, stack_padded, untracked
from kronattn.data.images import BadImage
from kronattn.extras import require_library

__all__ = ["IGNORED", "DecodedVolumes", "Volumes", "check_same_spacing", "decode_volumes", "load_volumes"]

# The label of voxels that do not count: those that a smaller volume is padded with.
IGNORED = 255
SUFFIXES = (".nii.gz", ".nii")
_SPLITS, _CLASSES = "splits.json", "classes.txt"
_PARTS = ("train", "val", "test")
_EXPECTED = "expected images/NAME.nii.gz and labels/NAME.nii.gz with splits.json, or SPLIT/images/ and SPLIT/labels/"
# Two spacings that differ by less than this share are the same, written with other digits.
_SAME_SPACING = 1e-3


@dataclass(frozen=True)
class Volumes:
    """One split: volumes by number, each with its labels."""

    images: Sequence[Entry]
    labels: Sequence[Entry]
    classes: Sequence[str] | None

    def __len__(self) -> int:
        return len(self.images)


def load_volumes(path: str, split: str) -> Volumes:
    """One split of the volumes below ``path``.

    Example:
        >>> load_volumes("nowhere", "train")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no folder or .tar archive 'nowhere'
    """
    files = {entry.name.replace("\\", "/"): entry for entry in list_files(path)}
    listed = next((entry for name, entry in files.items() if PurePosixPath(name).name == _SPLITS), None)
    around = set() if listed else {split}
    images, labels = (_placed(files, {kind, *around}) for kind in ("images", "labels"))
    if not images:
        raise ValueError(f"{path} holds no volumes{'' if listed else f' below {split}/'}: {_EXPECTED}")
    names = _names(listed, split) if listed else sorted(images)
    for name in names:
        if name not in images:
            raise FileNotFoundError(f"{listed} lists {name} in {split}, but there is no images/{name}.nii.gz")
        if name not in labels:
            raise FileNotFoundError(f"{images[name]} has no label: expected labels/{name}.nii.gz")
    written = next((entry for name, entry in files.items() if PurePosixPath(name).name == _CLASSES), None)
    return Volumes([images[name] for name in names], [labels[name] for name in names], _classes(written))


def _classes(written: Entry | None) -> list[str] | None:
    if written is None:
        return None
    classes = [line for line in written.text().splitlines() if line.strip()]
    if not classes:
        raise ValueError(f"{written} names no class: give a name on each line, the background first")
    return classes


def _names(listed: Entry, split: str) -> list[str]:
    try:
        splits = json.loads(listed.read())
        names = splits.get(split)
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{listed} must hold an object with the names of train, val and test") from None
    if split not in splits:
        raise ValueError(f"{listed} has no split {split!r}: it has {', '.join(splits)}")
    if names == []:
        raise ValueError(f"{listed}: {split} names no volume")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{listed}: {split} must be a list of names, such as ["a", "b"], not {names!r:.80}')
    # A volume that trains and tests would make every score too good.
    everywhere = Counter(str(name) for part in _PARTS if isinstance(splits.get(part), list) for name in splits[part])
    if several := [name for name in names if everywhere[name] > 1]:
        raise ValueError(f"{listed} lists {several[0]} more than once: a volume belongs to one of {', '.join(_PARTS)}")
    return names


def _placed(files: Mapping[str, Entry], folders: set[str]) -> dict[str, Entry]:
    """The NIfTI files that lie below all of ``folders``, by their names without a suffix."""
    found: dict[str, Entry] = {}
    for name, entry in files.items():
        place = PurePosixPath(name)
        suffix = next((suffix for suffix in SUFFIXES if place.name.lower().endswith(suffix)), None)
        if suffix and not place.name.startswith(".") and folders <= set(place.parent.parts):
            key = place.name[: -len(suffix)]
            if key in found:
                raise ValueError(f"{found[key]} and {entry} have the same name: which one is meant?")
            found[key] = entry
    return found


def decode_volumes(volumes: Volumes, *, track: Track = untracked) -> dict[str, Tensor]:
    """What :class:`DecodedVolumes` is made of.

    Each volume is standardised by itself (scanners have units of their own): cut off at its 0.5 and 99.5 percentiles,
    then of zero mean and unit variance. Labels out of range, of another shape than the volume, and volumes of another
    spacing than the first are errors that name the file.
    """
    decoded, spacing = [], None
    for index in track(range(len(volumes)), "Reading volumes"):
        image, label = volumes.images[index], volumes.labels[index]
        read = _read(image)
        spacing = spacing or read.spacing
        _check_spacing(image, read.spacing, volumes.images[0], spacing)
        decoded.append((_standardised(read.voxels, image), _checked(label, read, image, volumes.classes)))
    values, labels = ([torch.from_numpy(array) for array in arrays] for arrays in zip(*decoded, strict=True))
    sizes = torch.tensor([label.shape for label in labels])
    return {"voxels": stack_padded(values)[:, None], "labels": stack_padded(labels, IGNORED), "sizes": sizes}


def check_same_spacing(splits: Iterable[Volumes]) -> None:
    """Refuse splits whose first volumes have unlike spacings; within a split :func:`decode_volumes` looks at all."""
    first, *others = [volumes.images[0] for volumes in splits]
    spacing = _read(first).spacing
    for image in others:
        _check_spacing(image, _read(image).spacing, first, spacing)


def _check_spacing(image: Entry, found: Sequence[float], first: Entry, spacing: Sequence[float]) -> None:
    if not np.allclose(found, spacing, rtol=_SAME_SPACING):
        raise BadImage(
            f"{image} has a spacing of {_times(found)}, but {first} one of {_times(spacing)}: resample all volumes to "
            "one spacing first"
        )


class _Read(NamedTuple):
    """A file's voxels, the distance between two of them along each axis, and which way each axis points: ``"RAS"``."""

    voxels: np.ndarray
    spacing: tuple[float, ...]
    orientation: str


def _read(entry: Entry) -> _Read:
    nibabel: Any = require_library("nibabel", "NIfTI volumes")
    data = entry.read()
    try:
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        image = nibabel.Nifti1Image.from_bytes(data)
        voxels = np.asarray(image.dataobj)
    except Exception as error:  # nibabel, gzip and zlib have no error class in common
        raise BadImage(f"{entry} is not a NIfTI file, or a broken one: {' '.join(str(error).split())[:120]}") from None
    if voxels.dtype.kind not in "iuf":
        raise BadImage(f"{entry} holds colours or complex numbers ({voxels.dtype}), expected one number for each voxel")
    if voxels.ndim != 3:
        raise BadImage(f"{entry} has {voxels.ndim} axes {voxels.shape}, expected 3: one volume in a file")
    # An axis of no length points nowhere.
    points = "".join(code or "?" for code in nibabel.aff2axcodes(image.affine))
    return _Read(voxels, tuple(float(step) for step in image.header.get_zooms()[:3]), points)


def _standardised(voxels: np.ndarray, entry: Entry) -> np.ndarray:
    values = voxels.astype(np.float32)
    if not np.isfinite(values).all():
        raise BadImage(f"{entry} holds values that are no numbers (NaN or infinite)")
    values = values.clip(*np.percentile(values, (0.5, 99.5)))
    # Of a volume of one value nothing is left but zeros.
    return ((values - values.mean()) / max(float(values.std()), 1e-6)).astype(np.float16)


def _checked(entry: Entry, volume: _Read, image: Entry, classes: Sequence[str] | None) -> np.ndarray:
    found = _read(entry)
    labels = found.voxels
    if labels.shape != volume.voxels.shape:
        raise BadImage(f"{entry} is {_times(labels.shape)}, but its volume {image} is {_times(volume.voxels.shape)}")
    # Voxels are paired by their numbers: one of the two would lie mirrored, or turned.
    if found.orientation != volume.orientation:
        raise BadImage(
            f"{entry} has its axes as {found.orientation}, but its volume {image} as {volume.orientation}: reorient one"
        )
    if not np.isfinite(labels).all():
        raise BadImage(f"{entry} holds labels that are no numbers (NaN or infinite)")
    whole = np.rint(labels).astype(np.int64)
    most = len(classes) if classes is not None else IGNORED
    bad = (whole != labels) | (((whole < 0) | (whole >= most)) & (whole != IGNORED))
    if bad.any():
        place = tuple(np.argwhere(bad)[0].tolist())
        raise BadImage(
            f"{entry}: label {labels[place]:g} at {place}; labels are 0 to {most - 1}, and {IGNORED} where ignored"
        )
    return whole.astype(np.uint8)


@dataclass(eq=False)
class DecodedVolumes(DecodedSamples):
    """Volumes that are kept in memory.

    Args:
        voxels: (N, 1, D, H, W), float16, standardised.
        labels: (N, D, H, W), uint8.
        sizes: (N, 3): each volume's own; what lies beyond is no part of it.
    """

    voxels: Tensor
    labels: Tensor
    sizes: Tensor

    @cached_property
    def own_sizes(self) -> list[list[int]]:
        """The sizes for the host, which would otherwise wait for the device."""
        return self.sizes.tolist()


def _times(lengths: Iterable[float]) -> str:
    return "×".join(f"{length:g}" for length in lengths)
