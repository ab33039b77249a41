"""Labelled images from folders, archives, torchvision's layouts and scikit-learn; and what is refused."""

import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image

from kronattn.data import archives
from kronattn.data.archives import list_files, list_folders
from kronattn.data.classification import ImageFiles, check_same_classes, load_split, with_classes
from kronattn.data.images import BadImage


@pytest.fixture
def folder(tmp_path):
    generator = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            place = tmp_path / "data" / split / name
            place.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 256, (10, 12, 3), dtype=np.uint8)
                suffix = ("png", "webp", "JPEG")[index]
                Image.fromarray(pixels).save(place / f"{index}.{suffix}", lossless=True)
    return tmp_path / "data"


def archived(folder, *, around="", mode="w"):
    path = folder.parent / "data.tar"
    with tarfile.open(path, mode) as archive:
        archive.add(folder, arcname=around or ".")
    return path


def test_folder(folder):
    train, val = load_split("folder", str(folder), "train"), load_split("folder", str(folder), "val")
    assert train.classes == val.classes == ["cat", "dog"]
    assert (train.labels, val.labels) == ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1])
    assert train.image(0).size == (12, 10)
    check_same_classes(train, val)


@pytest.mark.parametrize("around", ["", "imagenette"])
def test_archive_is_the_folder(folder, around):
    plain = load_split("folder", str(folder), "train")
    packed = load_split("folder", str(archived(folder, around=around)), "train")
    assert packed.labels == plain.labels
    for index in range(len(plain.labels)):
        assert np.array_equal(np.asarray(packed.image(index)), np.asarray(plain.image(index)))
    assert packed.name(0).endswith("data.tar:" + (f"{around}/" if around else "") + "train/cat/0.png")


def test_splits_in_two_archives(folder):
    for split in ("train", "val"):
        with tarfile.open(folder.parent / f"{split}.tar", "w") as archive:
            archive.add(folder / split, arcname=f"x/{split}")
    for place in (f"{folder.parent}/*.tar", f"{folder.parent}/train.tar,{folder.parent}/val.tar"):
        assert len(load_split("folder", place, "val").labels) == 4


def test_worker_processes_get_a_copy(folder):
    copy = pickle.loads(pickle.dumps(load_split("folder", str(archived(folder)), "val")))
    assert copy.image(1).size == (12, 10)


def test_compressed_archive_is_refused(folder):
    with pytest.raises(ValueError, match="not a folder or an uncompressed .tar archive"):
        load_split("folder", str(archived(folder, mode="w:gz")), "train")


def test_empty_class_folder(folder):
    (folder / "train" / "emu").mkdir()
    with pytest.raises(ValueError, match="the class folder train/emu holds no image"):
        load_split("folder", str(folder), "train")


def test_classes_that_differ(folder):
    (folder / "val" / "dog").rename(folder / "val" / "eel")
    with pytest.raises(ValueError, match="the class 'dog' is in train/ alone"):
        check_same_classes(load_split("folder", str(folder), "train"), load_split("folder", str(folder), "val"))


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("foldr", "x", "unknown dataset 'foldr': did you mean 'folder'?"),
        ("folder", None, "needs to know where it lies: give --data PATH"),
        ("imagenette", "", "needs to know where it lies: give --data PATH"),
        ("folder", "nowhere", "there is no folder or .tar archive 'nowhere'"),
        ("cifar10", "nowhere", "nowhere does not hold CIFAR-10"),
    ],
)
def test_refused(name, path, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_split(name, path, "train")


def test_folder_without_images(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.png").write_bytes(b"")
    with pytest.raises(ValueError, match="holds no images below train/: expected train/CLASS/IMAGE"):
        load_split("folder", str(tmp_path), "train")
    (tmp_path / "images.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"CLASS/IMAGE, or an archive itself, such as .*images\.tar"):
        load_split("folder", str(tmp_path), "train")


def test_sounds_in_the_place_of_images(tmp_path):
    (tmp_path / "train" / "dog").mkdir(parents=True)
    (tmp_path / "train" / "dog" / "bark.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"bark\.wav is a sound file: expected train/CLASS/IMAGE .* data.name=spectro"):
        load_split("folder", str(tmp_path), "train")
    # One among images is not what is wrong.
    Image.new("RGB", (4, 4)).save(tmp_path / "train" / "dog" / "a.png")
    with pytest.raises(ValueError, match="holds no images below val/"):
        load_split("folder", str(tmp_path), "val")


def test_bad_image_is_named(folder):
    (folder / "train" / "cat" / "1.webp").write_bytes(b"RIFF")
    with pytest.raises(BadImage, match=r"train/cat/1.webp is (broken|not an image)"):
        load_split("folder", str(folder), "train").image(1)


def test_splits_that_a_dataset_does_not_have(folder):
    """They were taken for train, or for val."""
    (folder / "train").rename(folder / "whole")
    with pytest.raises(ValueError, match="whole has no split 'test': it has train and val; give test/CLASS/IMAGE"):
        load_split("folder", str(folder / "whole"), "test")
    for name, known in (
        ("digits", "digits has no split 'tset': it has train and val"),
        ("cifar10", "CIFAR-10 has no split 'tset': it has train and val"),
        ("imagenette_held_out", "has no split 'tset': it has train, val and test"),
    ):
        with pytest.raises(ValueError, match=known):
            load_split(name, str(folder), "tset")


def test_labels_in_another_count():
    images = with_classes(ImageFiles(["b", "c"], [0, 1, 1], []), ["a", "b", "c"])
    assert (list(images.classes), images.labels) == (["a", "b", "c"], [1, 2, 2])
    with pytest.raises(ValueError, match="a class 'd' that the network does not know"):
        with_classes(ImageFiles(["d"], [0], []), ["a", "b"])


def test_digits_are_split_the_same_way_each_time():
    train, val = load_split("digits", None, "train"), load_split("digits", None, "val")
    assert (len(train.labels), len(val.labels)) == (1437, 360)
    counts = np.bincount(val.labels)
    assert counts.min() >= 35
    assert counts.max() <= 37
    assert np.asarray(val.image(0)).max() == 255
    assert load_split("digits", None, "val").labels == val.labels


def test_imagenette_folder_gets_words(folder):
    for split in ("train", "val"):
        (folder / split / "cat").rename(folder / split / "n01440764")
        (folder / split / "dog").rename(folder / split / "n02102040")
    assert load_split("imagenette", str(folder), "val").classes == ["tench", "English springer"]


def test_torchvisions_imagenette(folder):
    from torchvision.datasets import Imagenette

    for split in ("train", "val"):
        for wnid in Imagenette._WNID_TO_CLASS:
            place = folder / "imagenette2-160" / split / wnid
            place.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(place / "a.JPEG")
    images = load_split("imagenette", str(folder), "train")
    assert (len(images.labels), images.classes[0], images.image(3).size) == (10, "tench", (8, 8))


def test_cifar(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    place = tmp_path / CIFAR10.base_folder
    place.mkdir()
    names = [f"data_batch_{index}" for index in range(1, 6)] + ["test_batch"]
    for name in names:
        entry = {"data": np.zeros((2, 3072), dtype=np.uint8), "labels": [0, 9]}
        (place / name).write_bytes(pickle.dumps(entry))
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(n) for n in range(10)]}))
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *a: True)
    train = load_split("cifar10", str(tmp_path), "train")
    assert (len(train.labels), train.image(0).size, train.classes[9]) == (10, (32, 32), "9")


def test_listing(folder):
    assert [e.name for e in list_files(folder / "val")] == ["cat/0.png", "cat/1.webp", "dog/0.png", "dog/1.webp"]
    assert list_folders(folder) == ["train", "train/cat", "train/dog", "val", "val/cat", "val/dog"]


def test_an_archive_is_gone_through_once_and_again_when_it_changes(tmp_path, monkeypatch):
    def write(*names: str) -> None:
        with tarfile.open(tmp_path / "images.tar", "w") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(name))

    opened = []
    real = tarfile.open
    write("train/a/0.png")
    monkeypatch.setattr(archives.tarfile, "open", lambda *a, **o: opened.append(1) or real(*a, **o))
    for _ in range(2):
        assert [entry.name for entry in archives.list_files(tmp_path)] == ["images.tar"]
        assert [entry.name for entry in archives.list_files(tmp_path / "images.tar")] == ["train/a/0.png"]
    assert len(opened) == 1
    monkeypatch.undo()
    write("train/a/0.png", "train/a/1.png", *(f"train/b/{number}.png" for number in range(30)))
    assert len(archives.list_files(tmp_path / "images.tar")) == 32
