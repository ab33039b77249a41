"""Datasets for segmentation in every layout, in folders and archives, and what is wrong with some of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kronattn.data.images import BadImage
from kronattn.data.segmentation import CAMVID, VOC, load_segmentation
from tests.data.segmentation_folders import (
    as_tar,
    labels,
    palette_image,
    picture,
    write,
    write_folder,
    write_list,
    write_sbd,
    write_voc,
)

REAL_CAMVID = Path(__file__).resolve().parents[3] / "shared" / "data" / "camvid.tar"


def stems(images):
    return [Path(entry.name).stem for entry in images.images]


class TestFolder:
    def test_pairs(self, tmp_path):
        root = write_folder(tmp_path / "mine", {"train": 3, "val": 2})
        train = load_segmentation("folder", root, "train", classes=3)
        assert len(train) == 3
        image, mask = train.pair(1)
        assert (image.mode, image.size, mask.shape, mask.dtype) == ("RGB", (30, 20), (20, 30), np.uint8)
        assert np.array_equal(mask, labels(1, 3))
        assert np.array_equal(np.asarray(image), np.asarray(picture(1)))
        assert len(load_segmentation("folder", root, "val", classes=("a", "b", "c"))) == 2

    def test_split_below_images(self, tmp_path):
        for kind, image in (("images", picture(0)), ("masks", Image.fromarray(labels(0, 3)))):
            write(tmp_path / "top" / kind / "train" / "deep" / "a.png", image)
        found = load_segmentation("folder", tmp_path, "train", classes=3)
        assert stems(found) == ["a"]
        assert np.array_equal(found.pair(0)[1], labels(0, 3))

    def test_archive(self, tmp_path):
        path = as_tar(write_folder(tmp_path / "mine", {"train": 2}), tmp_path / "mine.tar")
        found = load_segmentation("folder", path, "train", classes=3)
        assert np.array_equal(found.pair(1)[1], labels(1, 3))
        assert found.name(0) == f"{path}:mine/train/images/000.png"

    def test_classes_in_a_file(self, tmp_path):
        root = write_folder(tmp_path / "mine", {"train": 1})
        (root / "classes.txt").write_text("road\nblue sky\n\ncar\n")
        found = load_segmentation("folder", root, "train")
        assert found.labels.classes == ("road", "blue sky", "car")
        assert found.labels.palette is None

    def test_colours_in_a_file(self, tmp_path):
        root = tmp_path
        write(root / "train" / "images" / "a.png", picture(0))
        pixels = np.zeros((20, 30, 3), dtype=np.uint8)
        pixels[5:] = (7, 8, 9)
        write(root / "train" / "masks" / "a.png", Image.fromarray(pixels))
        (root / "classes.txt").write_text("wide road, 0, 0, 0\nsky 7 8 9\n")
        found = load_segmentation("folder", root, "train")
        assert found.labels.classes == ("wide road", "sky")
        assert found.pair(0)[1].sum() == 15 * 30
        (root / "classes.txt").write_text("road 0 0 0\nsky\n")
        with pytest.raises(ValueError, match="gives colours for 1 of 2 classes"):
            load_segmentation("folder", root, "train")

    def test_grey_images_become_rgb(self, tmp_path):
        root = write_folder(tmp_path, {"train": 1})
        write(root / "train" / "images" / "000.png", picture(0).convert("L"))
        image, _ = load_segmentation("folder", root, "train", classes=3).pair(0)
        assert image.mode == "RGB"

    def test_missing_mask(self, tmp_path):
        root = write_folder(tmp_path, {"train": 3})
        (root / "train" / "masks" / "001.png").unlink()
        with pytest.raises(FileNotFoundError, match="train/images/001.png has no mask in train/masks/$"):
            load_segmentation("folder", root, "train", classes=3)
        (root / "train" / "masks" / "002.png").unlink()
        with pytest.raises(FileNotFoundError, match=r"001.png has no mask in train/masks/ \(and 1 more\)"):
            load_segmentation("folder", root, "train", classes=3)

    def test_mask_without_image(self, tmp_path):
        root = write_folder(tmp_path, {"train": 3})
        (root / "train" / "images" / "001.png").unlink()
        with pytest.raises(FileNotFoundError, match="train/masks/001.png is a mask without an image"):
            load_segmentation("folder", root, "train", classes=3)

    def test_other_size(self, tmp_path):
        root = write_folder(tmp_path, {"train": 1})
        write(root / "train" / "masks" / "000.png", Image.fromarray(labels(0, 3, size=(21, 30))))
        with pytest.raises(BadImage, match="masks/000.png is 30×21, but its image .*images/000.png is 30×20"):
            load_segmentation("folder", root, "train", classes=3).pair(0)

    def test_label_out_of_range(self, tmp_path):
        root = write_folder(tmp_path, {"train": 1}, classes=9)
        with pytest.raises(BadImage, match="train/masks/000.png: label [3-8] at row .*; labels are 0 to 2, and 255"):
            load_segmentation("folder", root, "train", classes=3).pair(0)

    def test_two_of_a_name(self, tmp_path):
        root = write_folder(tmp_path, {"train": 1})
        write(root / "train" / "images" / "000.jpg", picture(0))
        with pytest.raises(ValueError, match="have the same name: which one is meant?"):
            load_segmentation("folder", root, "train", classes=3)

    def test_nothing_there(self, tmp_path):
        write_folder(tmp_path, {"train": 1})
        with pytest.raises(ValueError, match="holds no images below test/: expected test/images/ and test/masks/"):
            load_segmentation("folder", tmp_path, "test", classes=3)
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match="empty holds no images below train/"):
            load_segmentation("folder", tmp_path / "empty", "train")
        with pytest.raises(FileNotFoundError, match="there is no folder or .tar archive"):
            load_segmentation("folder", tmp_path / "none", "train", classes=3)

    def test_a_folder_of_another_layout_gets_no_classes(self, tmp_path):
        root = write_folder(tmp_path, {"Train": 2})
        with pytest.raises(ValueError, match="holds no images below train/"):
            load_segmentation("folder", root, "train")
        assert not (root / "classes.txt").exists()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"a 0 0 0\n\nb 999 0 0\n", r", line 3: a colour is three numbers from 0 to 255, not \(999, 0, 0\)"),
            (b"caf\xe9\n", " is not UTF-8: byte 4 belongs to no letter"),
            (b"\n", " names no class: give a name on each line"),
        ],
    )
    def test_classes_that_are_wrong(self, tmp_path, content, message):
        root = write_folder(tmp_path, {"train": 1})
        (root / "classes.txt").write_bytes(content)
        with pytest.raises(ValueError, match=f"classes.txt{message}"):
            load_segmentation("folder", root, "train")


class TestVOC:
    def test_torchvision_s_layout(self, tmp_path):
        datasets = pytest.importorskip("torchvision.datasets", reason="torchvision is not installed")
        write_voc(tmp_path, ["2007_1", "2007_2"], ["2008_1"])
        theirs = datasets.VOCSegmentation(tmp_path, year="2012", image_set="train")
        ours = load_segmentation("voc", tmp_path, "train")
        assert ours.labels == VOC
        assert len(ours) == len(theirs) == 2
        for index, (image, mask) in enumerate(theirs):
            mine = ours.pair(index)
            assert np.array_equal(np.asarray(image), np.asarray(mine[0]))
            assert np.array_equal(np.asarray(mask), mine[1])
        assert stems(load_segmentation("voc", tmp_path / "VOCdevkit" / "VOC2012", "val")) == ["2008_1"]
        assert len(load_segmentation("voc", tmp_path, "trainval")) == 3

    def test_archive(self, tmp_path):
        write_voc(tmp_path, ["a"], ["b"])
        path = as_tar(tmp_path / "VOCdevkit", tmp_path / "VOCtrainval.tar")
        found = load_segmentation("voc", path, "val")
        assert stems(found) == ["b"]
        image, mask = found.pair(0)
        assert image.size == mask.shape[::-1]
        assert set(np.unique(mask)) <= {*range(len(VOC.classes)), 255}

    def test_2012_among_several_years(self, tmp_path):
        base = write_voc(tmp_path, ["a"], ["b"])
        shutil.copytree(base, base.parent / "VOC2007")
        write_list(base.parent / "VOC2007" / "ImageSets" / "Segmentation" / "val.txt", ["a"])
        assert stems(load_segmentation("voc", tmp_path, "val")) == ["b"]

    def test_with_sbd(self, tmp_path):
        pytest.importorskip("scipy", reason="scipy is not installed")
        write_voc(tmp_path / "voc", ["a", "b"], ["v"], others=("s1", "s2"))
        # SBD has annotations of its own for some of VOC's images, of its training and of its validation.
        write_sbd(tmp_path / "sbd", ["b", "s1"], ["s2", "v"])
        where = f"{tmp_path / 'voc'},{tmp_path / 'sbd'}"
        found = load_segmentation("voc_aug", where, "train")
        assert stems(found) == ["a", "b", "s1", "s2"]
        assert [Path(entry.name).suffix for entry in found.masks] == [".png", ".png", ".mat", ".mat"]
        for index in range(4):
            image, mask = found.pair(index)
            assert image.size == mask.shape[::-1]
        assert stems(load_segmentation("voc_aug", where, "val")) == ["v"]

    @pytest.mark.parametrize("listing", ["trainaug", "train_aug", None])
    def test_with_the_augmented_folder(self, tmp_path, listing):
        base = write_voc(tmp_path, ["a"], ["v"], others=("s1", "s2"))
        for seed, name in enumerate(["a", "v", "s1", "s2"]):
            write(base / "SegmentationClassAug" / f"{name}.png", Image.fromarray(labels(50 + seed)))
        lines = {
            "trainaug": ["s1", "a"],
            "train_aug": [f"/JPEGImages/{n}.jpg /SegmentationClassAug/{n}.png" for n in ("s1", "a")],
        }
        if listing:
            write_list(base / "ImageSets" / "Segmentation" / f"{listing}.txt", lines[listing])
        found = load_segmentation("voc_aug", tmp_path, "train")
        assert stems(found) == (["s1", "a"] if listing else ["a", "s1", "s2"])
        assert all("SegmentationClassAug" in entry.name for entry in found.masks)
        assert np.array_equal(found.pair(stems(found).index("s1"))[1], labels(52))
        (entry,) = load_segmentation("voc_aug", tmp_path, "val").masks
        assert "SegmentationClass/" in entry.name

    def test_sbd_alone(self, tmp_path):
        pytest.importorskip("scipy", reason="scipy is not installed")
        datasets = pytest.importorskip("torchvision.datasets", reason="torchvision is not installed")
        write_sbd(tmp_path, ["x", "y"], ["z"])
        theirs = datasets.SBDataset(tmp_path, image_set="train", mode="segmentation")
        ours = load_segmentation("sbd", tmp_path, "train")
        assert len(ours) == len(theirs) == 2
        for index, (_, mask) in enumerate(theirs):
            assert np.array_equal(np.asarray(mask), ours.pair(index)[1])

    def test_what_is_missing_is_named(self, tmp_path):
        base = write_voc(tmp_path, ["a"], ["v"])
        with pytest.raises(FileNotFoundError, match="neither SegmentationClassAug/ nor SBD's cls/.*mat"):
            load_segmentation("voc_aug", tmp_path, "train")
        with pytest.raises(FileNotFoundError, match="has no list .*ImageSets/Segmentation/test.txt"):
            load_segmentation("voc", tmp_path, "test")
        with pytest.raises(FileNotFoundError, match="holds no SBD"):
            load_segmentation("sbd", tmp_path, "train")
        (base / "SegmentationClass" / "a.png").unlink()
        with pytest.raises(FileNotFoundError, match="a is listed, but there is no mask .*SegmentationClass/a.png"):
            load_segmentation("voc", tmp_path, "train")
        (base / "JPEGImages" / "a.jpg").unlink()
        with pytest.raises(FileNotFoundError, match="a is listed, but there is no image .*JPEGImages/a.jpg"):
            load_segmentation("voc", tmp_path, "train")
        write_list(base / "ImageSets" / "Segmentation" / "val.txt", [])
        with pytest.raises(ValueError, match="val.txt is empty"):
            load_segmentation("voc", tmp_path, "val")
        write(tmp_path / "other" / "a.png", picture(0))
        with pytest.raises(FileNotFoundError, match="holds no VOC"):
            load_segmentation("voc", tmp_path / "other", "val")


class TestCamVid:
    def test_folders(self, tmp_path):
        write_folder(tmp_path / "camvid", {"train": 2}, classes=11, ignore=11)
        found = load_segmentation("camvid", tmp_path, "train")
        assert found.labels == CAMVID
        assert found.pair(0)[1].max() == 11

    def test_segnet_s_layout(self, tmp_path):
        for folder, image in (("val", picture(0)), ("valannot", Image.fromarray(labels(0, 11, 11)))):
            write(tmp_path / "CamVid" / folder / "a.png", image)
        found = load_segmentation("camvid", tmp_path, "val")
        assert found.pair(0)[1].max() == 11

    @pytest.mark.skipif(not REAL_CAMVID.exists(), reason="CamVid is not at hand")
    def test_the_real_one(self):
        found = {split: load_segmentation("camvid", REAL_CAMVID, split) for split in ("train", "val", "test")}
        assert {split: len(images) for split, images in found.items()} == {"train": 367, "val": 101, "test": 233}
        image, mask = found["val"].pair(50)
        assert image.size == (480, 360)
        assert mask.max() <= 11


def test_bad_requests(tmp_path):
    with pytest.raises(ValueError, match="unknown dataset 'cityscapes': known are voc, voc_aug"):
        load_segmentation("cityscapes", tmp_path, "train")
    write(tmp_path / "a.png", palette_image(labels(0)))
    with pytest.raises(ValueError, match="classes are for the dataset 'folder'; those of 'voc' are known"):
        load_segmentation("voc", tmp_path, "train", classes=3)
