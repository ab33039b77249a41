"""Classes that no file names: found in the masks, and written down."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from kronattn.data.images import BadImage
from kronattn.data.segmentation import load_segmentation
from tests.data.segmentation_folders import as_tar, picture, write, write_folder


def folder_with(root, *masks):
    """One training image for each mask, and the same for validation."""
    for split in ("train", "val"):
        for at, mask in enumerate(masks):
            write(root / split / "images" / f"{at}.png", picture(at).resize(mask.size))
            write(root / split / "masks" / f"{at}.png", mask)
    return root


def grey(*values):
    return Image.fromarray(np.array(values, dtype=np.uint8).reshape(2, -1).repeat(4, axis=0).repeat(4, axis=1))


def test_labels(tmp_path, caplog):
    root = write_folder(tmp_path, {"train": 3, "val": 1}, classes=3, ignore=255)
    found = load_segmentation("folder", root, "train")
    assert found.labels.classes == ("class 0", "class 1", "class 2")
    assert (root / "classes.txt").read_text() == "class 0\nclass 1\nclass 2\n"
    assert "no classes.txt; found 3 classes in 4 masks" in caplog.text
    caplog.clear()
    assert load_segmentation("folder", root, "val").labels == found.labels
    assert caplog.text == ""  # from the file, now
    found.pair(0)


def test_two_classes_as_black_and_white(tmp_path):
    """255 is the ignored label elsewhere; here it is the object."""
    root = folder_with(tmp_path, grey(0, 255, 255, 0), grey(0, 0, 0, 0))
    found = load_segmentation("folder", root, "train")
    assert (root / "classes.txt").read_text() == "background 0 0 0\nobject 255 255 255\n"
    assert np.unique(found.pair(0)[1]).tolist() == [0, 1]
    assert np.unique(found.pair(1)[1]).tolist() == [0]


def test_other_grey_values(tmp_path):
    root = folder_with(tmp_path, grey(0, 80, 160, 240))
    assert np.unique(load_segmentation("folder", root, "train").pair(0)[1]).tolist() == [0, 1, 2, 3]


def test_colours(tmp_path):
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    pixels[:4] = (0, 128, 0)
    root = folder_with(tmp_path, Image.fromarray(pixels))
    found = load_segmentation("folder", root, "train")
    assert found.labels.palette == ((0, 0, 0), (0, 128, 0))
    assert found.pair(0)[1][:, 0].tolist() == [1] * 4 + [0] * 4


def test_a_palette_s_colours(tmp_path):
    mask = grey(0, 1, 2, 1)
    mask.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    found = load_segmentation("folder", folder_with(tmp_path, mask), "train")
    assert found.labels.palette == ((10, 20, 30), (40, 50, 60), (70, 80, 90))
    assert np.unique(found.pair(0)[1]).tolist() == [0, 1, 2]


def test_an_archive_is_left_as_it_is(tmp_path):
    root = write_folder(tmp_path / "data", {"train": 2}, classes=3)
    archive = as_tar(root, tmp_path / "data.tar")
    before = archive.read_bytes()
    assert len(load_segmentation("folder", archive, "train").labels.classes) == 3
    assert archive.read_bytes() == before


def test_photographs_are_no_masks(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    with pytest.raises(BadImage, match="more than 256 colours"):
        load_segmentation("folder", folder_with(tmp_path / "a", Image.fromarray(noise)), "train")
    with pytest.raises(BadImage, match="more than 64 values"):
        load_segmentation("folder", folder_with(tmp_path / "b", Image.fromarray(noise[..., 0])), "train")
    assert not list(tmp_path.rglob("classes.txt"))
