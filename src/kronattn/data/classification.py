"""Labelled images from where people keep them: folders, archives, torchvision's datasets, scikit-learn's digits.

A new dataset is one function that returns a split of it, and one line in ``DATASETS``.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from kronattn.data.archives import Entry, list_files, list_folders
from kronattn.data.images import central_square, decode_image, is_image_name
from kronattn.data.sounds import refuse_sounds
from kronattn.names import near_names

__all__ = ["DATASETS", "LabelledImages", "check_same_classes", "load_split", "with_classes"]


@dataclass
class LabelledImages(ABC):
    """One split: images by number, each with the number of its class."""

    classes: Sequence[str]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """Decode one image as RGB; a bad one raises :class:`kronattn.data.images.BadImage`."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What an error calls the image."""


@dataclass
class ImageFiles(LabelledImages):
    """Images in files, in a folder or an archive; with ``square``, the square in the middle of each."""

    entries: Sequence[Entry]
    square: bool = False

    def image(self, index: int) -> Image.Image:
        image = decode_image(self.entries[index].read(), self.name(index))
        return central_square(image) if self.square else image

    def name(self, index: int) -> str:
        return str(self.entries[index])


@dataclass
class ImageArray(LabelledImages):
    """Images that are pixels already: (N, H, W) or (N, H, W, 3), uint8."""

    pixels: np.ndarray

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index]).convert("RGB")

    def name(self, index: int) -> str:
        return f"image {index}"


def load_split(name: str, path: str | None, split: str) -> LabelledImages:
    """One split of a dataset.

    Args:
        name: one of ``DATASETS``.
        path: where it lies; ``None`` for digits, which come with scikit-learn.
        split: "train" or "val", or another that the dataset has.

    Example:
        >>> val = load_split("digits", None, "val")
        >>> len(val.labels), val.image(0).size
        (360, (8, 8))
    """
    if name not in DATASETS:
        raise ValueError(f"unknown dataset {name!r}: {near_names(name, DATASETS)}")
    if not path and name != "digits":
        raise ValueError(f"the dataset {name!r} needs to know where it lies: give --data PATH")
    return DATASETS[name](path or "", split)


def check_same_classes(train: LabelledImages, val: LabelledImages) -> None:
    """Refuse splits that would number their classes differently."""
    lonely = sorted(set(train.classes) ^ set(val.classes))
    if lonely:
        where = "train" if lonely[0] in train.classes else "val"
        raise ValueError(f"the class {lonely[0]!r} is in {where}/ alone: train/ and val/ must hold the same classes")


def with_classes(images: LabelledImages, classes: Sequence[str]) -> LabelledImages:
    """The same images with their labels counted in ``classes``, of which they may have some alone.

    Example:
        >>> val = with_classes(ImageFiles(["dog"], [0], []), ["cat", "dog"])
        >>> val.classes, val.labels
        (['cat', 'dog'], [1])
    """
    number = {name: index for index, name in enumerate(classes)}
    for name in images.classes:
        if name not in number:
            some = ", ".join(list(classes)[:5])
            raise ValueError(f"the data has a class {name!r} that the network does not know; it knows {some}, ...")
    return replace(images, classes=list(classes), labels=[number[images.classes[label]] for label in images.labels])


def _check_split(split: str, known: Sequence[str], where: str, hint: str = "") -> None:
    """Refuse what would otherwise be taken for one of the splits that there are."""
    if split not in known:
        listed = f"{', '.join(known[:-1])} and {known[-1]}"
        raise ValueError(f"{where} has no split {split!r}: it has {listed}{hint}")


def _folder(path: str, split: str) -> ImageFiles:
    """``train/CLASS/*`` and ``val/CLASS/*``, in a folder, a tar archive, or several of them; or ``CLASS/*`` alone, of
    which a fifth is held out."""
    files = list_files(path)
    entries = [entry for entry in files if is_image_name(entry.name)]
    if _is_unsplit(entries):
        return _split_by_us(entries, split, path)
    found = [(placed, entry) for entry in entries if (placed := _class_of(entry.name, split)) is not None]
    if not found:
        expected = f"{split}/CLASS/IMAGE or CLASS/IMAGE{_archives_in(path)}"
        if not entries:
            refuse_sounds(files, f"expected {expected}; for pictures of sounds there is data.name=spectrograms")
        raise ValueError(f"{path} holds no images below {split}/: expected {expected}")
    classes = sorted({name for name, _ in found})
    for folder in list_folders(path):
        empty = _class_of(f"{folder}/.image", split)
        if empty is not None and empty not in classes:
            raise ValueError(f"{path}: the class folder {split}/{empty} holds no image")
    number = {name: index for index, name in enumerate(classes)}
    return ImageFiles(classes, [number[name] for name, _ in found], [entry for _, entry in found])


# Names that speak of a split: folders of these names hold classes, they are none.
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "images", "masks"}
_HELD_OUT = 5
_TWO_SPLITS = ("train", "val")


def _is_unsplit(entries: Sequence[Entry]) -> bool:
    """Whether images lie in a folder for each class, with nobody's split."""
    parents = {Path(entry.name).parts[:-1] for entry in entries}
    return len(parents) > 1 and all(len(parts) == 1 and parts[0].lower() not in _SPLITS for parts in parents)


def _split_by_us(entries: Sequence[Entry], split: str, path: str) -> ImageFiles:
    """One image in five of each class for validation, always the same, whatever else the folder gets."""
    _check_split(split, _TWO_SPLITS, path, f"; give {split}/CLASS/IMAGE")
    classes = sorted({Path(entry.name).parts[0] for entry in entries})
    labels, chosen = [], []
    for number, name in enumerate(classes):
        of_class = [entry for entry in entries if Path(entry.name).parts[0] == name]
        if len(of_class) < 2:
            raise ValueError(f"{path}: the class {name} has a single image; training and validation need one each")
        ordered = sorted(of_class, key=lambda entry: hashlib.sha256(entry.name.encode()).digest())
        held_out = set(ordered[: max(1, len(ordered) // _HELD_OUT)])
        part = [entry for entry in of_class if (entry in held_out) == (split == "val")]
        chosen += part
        labels += [number] * len(part)
    return ImageFiles(classes, labels, chosen)


def _archives_in(path: str) -> str:
    """A hint for a folder of archives, which may be those of several datasets."""
    archives = sorted(Path(path).glob("*.tar")) if Path(path).is_dir() else []
    return f", or an archive itself, such as {archives[0]}" if archives else ""


def _class_of(name: str, split: str) -> str | None:
    """The class of a file below ``split``/, wherever that is: archives often have a folder around everything."""
    parts = Path(name).parts
    return parts[parts.index(split) + 1] if split in parts[:-2] else None


def _imagenet(path: str, split: str) -> ImageFiles:
    """torchvision's ImageNet where its development kit is at hand; the same folders without it otherwise."""
    if not any((Path(path) / kit).exists() for kit in ("meta.bin", "ILSVRC2012_devkit_t12.tar.gz")):
        return _folder(path, split)
    from torchvision.datasets import ImageNet

    images = ImageNet(path, split=split)
    return _listed([names[0] for names in images.classes], images.samples)


def _imagenette(path: str, split: str) -> ImageFiles:
    """torchvision's Imagenette, of whichever size lies there; or the same classes in folders or archives."""
    from torchvision.datasets import Imagenette

    for size, folder in (("160px", "imagenette2-160"), ("320px", "imagenette2-320"), ("full", "imagenette2")):
        if (Path(path) / folder).is_dir():
            images = Imagenette(path, split=split, size=size)
            return _listed([names[0] for names in images.classes], images._samples)
    words = {wnid: names[0] for wnid, names in Imagenette._WNID_TO_CLASS.items()}
    found = _folder(path, split)
    return replace(found, classes=[words.get(name, name) for name in found.classes])


_HELD_OUT_FOR_CHOICES = 10


def _imagenette_held_out(path: str, split: str) -> ImageFiles:
    """Imagenette for studies: a tenth of its training images, always the same, validates; its own "val" is the test."""
    _check_split(split, ("train", "val", "test"), path)
    if split == "test":
        return _imagenette(path, "val")
    found = _imagenette(path, "train")
    order = sorted(
        range(len(found)), key=lambda at: hashlib.sha256(Path(found.entries[at].name).name.encode()).digest()
    )
    held_out = set(order[: len(order) // _HELD_OUT_FOR_CHOICES])
    kept = [at for at in range(len(found)) if (at in held_out) == (split == "val")]
    return replace(found, labels=[found.labels[at] for at in kept], entries=[found.entries[at] for at in kept])


def _listed(classes: Sequence[str], samples: Sequence[tuple[str, int]]) -> ImageFiles:
    entries = [Entry(Path(file).name, Path(file)) for file, _ in samples]
    return ImageFiles(classes, [label for _, label in samples], entries)


def _cifar(number: int) -> Callable[[str, str], ImageArray]:
    def load(path: str, split: str) -> ImageArray:
        from torchvision import datasets

        _check_split(split, _TWO_SPLITS, f"CIFAR-{number}")
        try:
            images = getattr(datasets, f"CIFAR{number}")(path, train=split == "train")
        except RuntimeError as error:
            raise FileNotFoundError(f"{path} does not hold CIFAR-{number}: {error}") from None
        return ImageArray(images.classes, images.targets, images.data)

    return load


def _digits(path: str, split: str) -> ImageArray:
    """1,797 handwritten digits that come with scikit-learn; a fifth of each is held out, always the same."""
    _check_split(split, _TWO_SPLITS, "digits")
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError:
        raise ModuleNotFoundError("digits need scikit-learn: pip install 'kronattn[train]'", name="sklearn") from None
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)
    shares = train_test_split(pixels, digits.target, test_size=0.2, random_state=0, stratify=digits.target)
    part = 0 if split == "train" else 1
    return ImageArray([str(name) for name in digits.target_names], shares[2 + part].tolist(), shares[part])


DATASETS: dict[str, Callable[[str, str], LabelledImages]] = {
    "folder": _folder,
    "imagenet": _imagenet,
    "imagenette": _imagenette,
    "imagenette_held_out": _imagenette_held_out,
    "cifar10": _cifar(10),
    "cifar100": _cifar(100),
    "digits": _digits,
}
