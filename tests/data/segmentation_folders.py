"""Tiny datasets in the layouts of the large ones, written by the tests themselves."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from kronattn.data.masks import voc_palette

SIZE = (20, 30)  # rows, columns


def picture(seed: int, size: tuple[int, int] = SIZE) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(values)


def labels(seed: int, classes: int = 21, ignore: int | None = 255, size: tuple[int, int] = SIZE) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, classes, size).astype(np.uint8)
    if ignore is not None:
        values[:2] = ignore
    return values


def write(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def write_list(path: Path, names: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name}\n" for name in names))


def palette_image(values: np.ndarray) -> Image.Image:
    """As VOC's own masks: a PNG with a palette whose entries are the labels."""
    image = Image.frombytes("P", values.shape[::-1], values.tobytes())
    image.putpalette([value for colour in voc_palette(256) for value in colour])
    return image


def write_voc(root: Path, train: list[str], val: list[str], others: tuple[str, ...] = ()) -> Path:
    """``root/VOCdevkit/VOC2012``, with images alone for ``others``."""
    base = root / "VOCdevkit" / "VOC2012"
    for seed, name in enumerate([*train, *val, *others]):
        write(base / "JPEGImages" / f"{name}.jpg", picture(seed))
        if name not in others:
            write(base / "SegmentationClass" / f"{name}.png", palette_image(labels(seed)))
    for split, names in (("train", train), ("val", val), ("trainval", [*train, *val])):
        write_list(base / "ImageSets" / "Segmentation" / f"{split}.txt", names)
    return base


def write_sbd(root: Path, train: list[str], val: list[str]) -> Path:
    """``root/{img,cls}`` and lists, as torchvision's SBDataset leaves them."""
    from scipy.io import savemat

    for seed, name in enumerate([*train, *val], start=100):
        write(root / "img" / f"{name}.jpg", picture(seed))
        (root / "cls").mkdir(exist_ok=True)
        inner = np.zeros((1,), dtype=[("Segmentation", object)])
        inner["Segmentation"][0] = labels(seed, ignore=None)
        savemat(root / "cls" / f"{name}.mat", {"GTcls": inner.reshape(1, 1)})
    for split, names in (("train", train), ("val", val)):
        write_list(root / f"{split}.txt", names)
    return root


def write_folder(root: Path, splits: dict[str, int], classes: int = 3, ignore: int | None = 255) -> Path:
    """``root/SPLIT/{images,masks}/*.png``, with so many images in each split."""
    for split, count in splits.items():
        for seed in range(count):
            write(root / split / "images" / f"{seed:03}.png", picture(seed))
            write(root / split / "masks" / f"{seed:03}.png", Image.fromarray(labels(seed, classes, ignore)))
    return root


def as_tar(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        archive.add(folder, folder.name)
    return path


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()
