"""Images with a label for each pixel, from where people keep them: PASCAL VOC, SBD, CamVid, and plain folders.

All may lie in folders or in tar archives, read where they are. A new dataset is one function that returns a split of
it, and one line in ``DATASETS``.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from kronattn.atomic import write_atomically
from kronattn.data.archives import Entry, list_files
from kronattn.data.images import BadImage, decode_image, is_image_name
from kronattn.data.mask_classes import classes_from_masks, classes_text
from kronattn.data.masks import Colour, Labels, decode_mask, voc_palette
from kronattn.names import near_names

__all__ = ["CAMVID", "DATASETS", "FACADE", "VOC", "SegmentedImages", "load_segmentation"]

_VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
# The border around objects, which does not count, is painted in a colour that no class has.
VOC = Labels(_VOC_CLASSES, 255, voc_palette(21), ignore_colour=(224, 224, 192))

_CAMVID_COLOURS: dict[str, Colour] = {
    "sky": (128, 128, 128),
    "building": (128, 0, 0),
    "pole": (192, 192, 128),
    "road": (128, 64, 128),
    "pavement": (60, 40, 222),
    "tree": (128, 128, 0),
    "sign": (192, 128, 128),
    "fence": (64, 64, 128),
    "car": (64, 0, 128),
    "pedestrian": (64, 64, 0),
    "bicyclist": (0, 128, 192),
}
CAMVID = Labels(tuple(_CAMVID_COLOURS), 11, tuple(_CAMVID_COLOURS.values()), ignore_colour=(0, 0, 0))

# House fronts: in this order in the masks' palettes.
FACADE = Labels(("others", "facade", "pillar", "window", "balcony"))

_CLASSES_FILE = "classes.txt"
_COLOURED_LINE = re.compile(r"(.+?)[\s,]+(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\d{1,3})")


@dataclass(frozen=True)
class SegmentedImages:
    """One split: images by number, each with its mask."""

    labels: Labels
    images: Sequence[Entry]
    masks: Sequence[Entry]

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """What an error calls the image."""
        return str(self.images[index])

    def pair(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """Decode an image as RGB and its mask as (H, W) labels, uint8; a bad one raises
        :class:`kronattn.data.images.BadImage`."""
        image = decode_image(self.images[index].read(), self.name(index))
        mask_name = str(self.masks[index])
        mask = decode_mask(self.masks[index].read(), mask_name, self.labels)
        if image.size != mask.shape[::-1]:
            raise BadImage(
                f"{mask_name} is {mask.shape[1]}×{mask.shape[0]}, but its image {self.name(index)} is "
                f"{image.size[0]}×{image.size[1]}"
            )
        return image, mask


def load_segmentation(
    name: str, path: str | Path, split: str, *, classes: Sequence[str] | int | None = None, ignore_index: int = 255
) -> SegmentedImages:
    """One split of a dataset.

    Args:
        name: one of ``DATASETS``: "voc" (1,464 / 1,449 images), "voc_aug" (10,582 / 1,449: with SBD's annotations, or
            the folder SegmentationClassAug), "sbd", "camvid", "facade" (house fronts, 5 classes), or "folder".
        path: a folder, a tar archive, or several with commas (VOC and SBD, for instance).
        split: "train" or "val", or another that the dataset has.
        classes: for "folder": the names, or how many there are. By default the file ``classes.txt`` among the images'
            folders says it: a name on each line and, for masks that hold colours, three numbers behind it.
        ignore_index: for "folder": the label of pixels that do not count.

    Example:
        >>> load_segmentation("vox", "data", "train")
        Traceback (most recent call last):
        ...
        ValueError: unknown dataset 'vox': did you mean 'voc'?
    """
    if name not in DATASETS:
        raise ValueError(f"unknown dataset {name!r}: {near_names(name, DATASETS)}")
    files = {entry.name.replace("\\", "/"): entry for entry in list_files(path)}
    if name == "folder":
        return _folder(files, split, str(path), lambda: _labels_of(files, classes, ignore_index, str(path)))
    if classes is not None:
        raise ValueError(f"classes are for the dataset 'folder'; those of {name!r} are known")
    return DATASETS[name](files, split, str(path))


Files = Mapping[str, Entry]


def _folder(files: Files, split: str, path: str, labels: Callable[[], Labels]) -> SegmentedImages:
    """``SPLIT/images/*`` and ``SPLIT/masks/*``, or ``images/SPLIT/*`` and ``masks/SPLIT/*``, at any depth.

    Labels are asked for last: to find them may write a file, which a folder of another layout is not to get.
    """
    images = _placed(files, {split, "images"})
    masks = _placed(files, {split, "masks"})
    if not images:
        raise ValueError(f"{path} holds no images below {split}/: expected {split}/images/ and {split}/masks/")
    return _paired(images, masks, f"{split}/masks/", labels)


def _placed(files: Files, folders: set[str]) -> dict[str, Entry]:
    """The image files that lie below all of ``folders``, by their names without these and without a suffix."""
    found: dict[str, Entry] = {}
    for name, entry in files.items():
        parent = PurePosixPath(name).parent.parts
        if is_image_name(name) and folders <= set(parent):
            key = "/".join([*(part for part in parent if part not in folders), PurePosixPath(name).stem])
            if key in found:
                raise ValueError(f"{found[key]} and {entry} have the same name: which one is meant?")
            found[key] = entry
    return found


def _paired(
    images: Mapping[str, Entry], masks: Mapping[str, Entry], where: str, labels: Callable[[], Labels]
) -> SegmentedImages:
    _refuse_lonely(images, masks, f"has no mask in {where}")
    _refuse_lonely(masks, images, "is a mask without an image")
    names = sorted(images)
    return SegmentedImages(labels(), [images[name] for name in names], [masks[name] for name in names])


def _refuse_lonely(these: Mapping[str, Entry], others: Mapping[str, Entry], problem: str) -> None:
    lonely = [entry for name, entry in these.items() if name not in others]
    if lonely:
        more = f" (and {len(lonely) - 1} more)" if len(lonely) > 1 else ""
        raise FileNotFoundError(f"{lonely[0]} {problem}{more}")


def _labels_of(files: Files, classes: Sequence[str] | int | None, ignore_index: int, path: str) -> Labels:
    if isinstance(classes, int):
        return Labels(tuple(f"class {number}" for number in range(classes)), ignore_index)
    if classes is not None:
        return Labels(tuple(classes), ignore_index)
    written = next((entry for name, entry in files.items() if PurePosixPath(name).name == _CLASSES_FILE), None)
    if written is None:
        return _found_labels(files, ignore_index, path)
    names, colours = [], []
    for number, line in enumerate(written.text().splitlines(), 1):
        if line.strip():
            coloured = _COLOURED_LINE.fullmatch(line.strip())
            if coloured:
                colour = (int(coloured[2]), int(coloured[3]), int(coloured[4]))
                if max(colour) > 255:
                    raise ValueError(f"{written}, line {number}: a colour is three numbers from 0 to 255, not {colour}")
                colours.append(colour)
            names.append(coloured[1] if coloured else line.strip())
    if not names:
        raise ValueError(f"{written} names no class: give a name on each line")
    if colours and len(colours) != len(names):
        raise ValueError(f"{written} gives colours for {len(colours)} of {len(names)} classes: give all or none")
    return Labels(tuple(names), ignore_index, tuple(colours) or None)


def _found_labels(files: Files, ignore_index: int, path: str) -> Labels:
    """The classes that the masks of all splits hold; they are written down, where that can be, to be named by hand."""
    masks = [
        entry for name, entry in files.items() if is_image_name(name) and "masks" in PurePosixPath(name).parent.parts
    ]
    names, colours = classes_from_masks(masks, ignore_index)
    folder = Path(path)
    where = "kept in memory alone"
    if folder.is_dir() and os.access(folder, os.W_OK):
        write_atomically(folder / _CLASSES_FILE, classes_text(names, colours))
        where = f"written to {folder / _CLASSES_FILE}, where you can name them"
    logging.getLogger("kronattn").warning(
        "kronattn: note: no %s; found %d classes in %d masks, %s", _CLASSES_FILE, len(names), len(masks), where
    )
    return Labels(tuple(names), ignore_index, tuple(colours) if colours else None)


def _camvid(files: Files, split: str, path: str) -> SegmentedImages:
    """Folders ``images`` and ``masks`` for each split; or ``SPLIT`` and ``SPLITannot``, as SegNet's tutorial has it."""
    masks = _placed(files, {f"{split}annot"})
    if masks:
        return _paired(_placed(files, {split}), masks, f"{split}annot/", lambda: CAMVID)
    return _folder(files, split, path, lambda: CAMVID)


def _voc(files: Files, split: str, path: str) -> SegmentedImages:
    """VOC's own annotations, as torchvision's ``VOCSegmentation`` has them on disk."""
    root = _voc_root(files, path)
    return _listed(files, _names(files, f"{root}ImageSets/Segmentation/{split}.txt", path), [root], VOC)


def _voc_aug(files: Files, split: str, path: str) -> SegmentedImages:
    """VOC 2012 with the extra annotations: those 10,582 images that are not among the 1,449 of its validation."""
    if split != "train":
        return _voc(files, split, path)
    root = _voc_root(files, path)
    held_out = set(_names(files, f"{root}ImageSets/Segmentation/val.txt", path))
    augmented = f"{root}SegmentationClassAug/"
    inside = {PurePosixPath(name).stem for name in files if name.startswith(augmented)}
    if inside:
        lists = (f"{root}ImageSets/Segmentation/{name}.txt" for name in ("trainaug", "train_aug"))
        listed = next((name for name in lists if name in files), None)
        names = _names(files, listed, path) if listed else sorted(inside - held_out)
        return _listed(files, names, [root], VOC, masks=("SegmentationClassAug",))
    boundaries = _sbd_root(files)
    if boundaries is None:
        raise FileNotFoundError(
            f"{path} holds neither SegmentationClassAug/ nor SBD's cls/*.mat: the augmented split needs one of them"
        )
    extra = {PurePosixPath(name).stem for name in files if name.startswith(f"{boundaries}cls/")}
    own = set(_names(files, f"{root}ImageSets/Segmentation/train.txt", path))
    return _listed(files, sorted((own | extra) - held_out), [root, boundaries], VOC)


def _sbd(files: Files, split: str, path: str) -> SegmentedImages:
    """SBD by itself, as torchvision's ``SBDataset`` has it on disk."""
    root = _sbd_root(files)
    if root is None:
        raise FileNotFoundError(f"{path} holds no SBD: expected img/*.jpg and cls/*.mat")
    return _listed(files, _names(files, f"{root}{split}.txt", path), [root], VOC)


def _voc_root(files: Files, path: str) -> str:
    """What stands before ``ImageSets/Segmentation``; VOC 2012 where there are several years."""
    marker = "ImageSets/Segmentation/"
    roots = sorted({name[: name.index(marker)] for name in files if marker in name})
    if not roots:
        raise FileNotFoundError(f"{path} holds no VOC: expected VOCdevkit/VOC2012/ImageSets/Segmentation/")
    return next((root for root in roots if "2012" in root), roots[-1])


def _sbd_root(files: Files) -> str | None:
    found = (name for name in files if name.endswith(".mat") and PurePosixPath(name).parent.name == "cls")
    return next((name[: name.rindex("cls/")] for name in found), None)


def _names(files: Files, listing: str, path: str) -> list[str]:
    """The names in a list of a split; lines may hold paths of images and masks, as some lists do."""
    if listing not in files:
        raise FileNotFoundError(f"{path} has no list {listing}")
    lines = files[listing].text().splitlines()
    names = [PurePosixPath(line.split()[0]).stem for line in lines if line.strip()]
    if not names:
        raise ValueError(f"{files[listing]} is empty")
    return names


def _listed(
    files: Files,
    names: Iterable[str],
    roots: Sequence[str],
    labels: Labels,
    masks: Sequence[str] = ("SegmentationClass", "cls", "SegmentationClassAug"),
) -> SegmentedImages:
    """The images of a list of names, each with the first mask that there is: VOC's own are finer than SBD's."""
    chosen = list(names)
    images = [_first(files, name, roots, ("JPEGImages", "img"), (".jpg",), "image") for name in chosen]
    found = [_first(files, name, roots, masks, (".png", ".mat"), "mask") for name in chosen]
    return SegmentedImages(labels, images, found)


def _first(
    files: Files, name: str, roots: Sequence[str], folders: Sequence[str], suffixes: Sequence[str], what: str
) -> Entry:
    tried = [f"{root}{folder}/{name}{suffix}" for folder in folders for root in roots for suffix in suffixes]
    for path in tried:
        if path in files:
            return files[path]
    raise FileNotFoundError(f"{name} is listed, but there is no {what} {tried[0]}")


DATASETS: dict[str, Callable[..., SegmentedImages]] = {
    "voc": _voc,
    "voc_aug": _voc_aug,
    "sbd": _sbd,
    "camvid": _camvid,
    "facade": partial(_folder, labels=lambda: FACADE),
    "folder": _folder,
}
