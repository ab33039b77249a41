"""A study's data made small: the same names and labels, and readers that take it for the original."""

import gzip
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from kronattn.data.images import BadImage
from kronattn.data.segmentation import load_segmentation
from kronattn.study.prepare import prepare_data


@pytest.fixture
def fronts(study, tmp_path):
    data = tmp_path / "originals"
    for split in ("train", "val", "test"):
        for kind, suffix in (("images", "webp"), ("masks", "png")):
            place = data / "fronts" / split / kind
            place.mkdir(parents=True)
            pixels = np.zeros((20, 30), np.uint8)
            pixels[:, 15:] = 3 if kind == "masks" else 200
            Image.fromarray(pixels).save(place / f"a.{suffix}", lossless=True)
    with tarfile.open(data / "fronts.tar", "w") as archive:
        archive.add(data / "fronts", "fronts")
    part = replace(study.parts[0], path="fronts.tar", prepared=[10, 12], folds=())
    return replace(study, parts=[part]), data


def test_pictures_are_scaled_and_masks_keep_their_labels(fronts, tmp_path):
    study, data = fronts
    (path,) = prepare_data(study, data, tmp_path / "small")
    image, mask = load_segmentation("facade", path, "test").pair(0)
    assert (image.size, mask.shape) == ((12, 10), (10, 12))
    assert np.unique(mask).tolist() == [0, 3]
    assert (mask[:, 6:] == 3).all()


def test_pictures_without_a_size_are_copied(fronts, tmp_path):
    study, data = fronts
    study = replace(study, parts=[replace(study.parts[0], prepared=())])
    (path,) = prepare_data(study, data, tmp_path / "small")
    with tarfile.open(path) as copy:
        content = copy.extractfile("fronts/train/images/a.webp").read()
    assert content == (data / "fronts" / "train" / "images" / "a.webp").read_bytes()


def test_volumes_have_fewer_steps(fronts, tmp_path):
    nibabel = pytest.importorskip("nibabel")
    study, _ = fronts
    values = np.random.default_rng(0).normal(1000, 200, (6, 7, 8)).astype(np.float32)
    original = nibabel.Nifti1Image(values, np.diag([1, 1, 2.5, 1.0]))
    (tmp_path / "volumes" / "images").mkdir(parents=True)
    (tmp_path / "volumes" / "images" / "a.nii.gz").write_bytes(gzip.compress(original.to_bytes()))
    study = replace(study, parts=[replace(study.parts[0], path="volumes")])
    (path,) = prepare_data(study, tmp_path, tmp_path / "small")
    with tarfile.open(path) as archive:
        small = nibabel.Nifti1Image.from_bytes(gzip.decompress(archive.extractfile("images/a.nii.gz").read()))
    assert small.get_data_dtype() == np.uint8
    assert small.header.get_zooms() == (1.0, 1.0, 2.5)
    # Half a step of the 256 between the percentiles.
    low, high = np.percentile(values, (0.5, 99.5))
    steps = np.asarray(small.dataobj) * (high - low) / 255 + low
    assert np.abs(steps - values.clip(low, high)).max() <= 0.51 * (high - low) / 255


def test_masks_beside_pictures_as_segnet_has_them(study, tmp_path):
    for split in ("train", "trainannot"):
        (tmp_path / "camvid" / split).mkdir(parents=True)
        pixels = np.full((20, 30), 11 if split.endswith("annot") else 200, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "camvid" / split / "a.png")
    study = replace(study, parts=[replace(study.parts[0], path="camvid", prepared=[10, 12])])
    (path,) = prepare_data(study, tmp_path, tmp_path / "small")
    image, mask = load_segmentation("camvid", path, "train").pair(0)
    assert (image.size, mask.shape, np.unique(mask).tolist()) == ((12, 10), (10, 12), [11])


@pytest.mark.parametrize("broken", ["NaN", "is not a NIfTI file, or a broken one"])
def test_volumes_that_cannot_be_used_are_refused(study, tmp_path, broken):
    nibabel = pytest.importorskip("nibabel")
    values = np.zeros((6, 7, 8), np.float32)
    values[0, 0, 0] = np.nan if broken == "NaN" else 1
    content = gzip.compress(nibabel.Nifti1Image(values, np.eye(4)).to_bytes())
    (tmp_path / "volumes" / "images").mkdir(parents=True)
    (tmp_path / "volumes" / "images" / "a.nii.gz").write_bytes(content if broken == "NaN" else content[:-20])
    study = replace(study, parts=[replace(study.parts[0], path="volumes")])
    with pytest.raises(BadImage, match=broken):
        prepare_data(study, tmp_path, tmp_path / "small")
    assert not (tmp_path / "small" / "volumes").exists()


def test_bad_input(fronts, tmp_path):
    study, data = fronts
    with pytest.raises(ValueError, match=r"--prepare would write over .*fronts.tar: give another folder"):
        prepare_data(study, data, data)
    part = study.parts[0]
    two = replace(study, parts=[part, replace(part, name="more", prepared=[5, 5])])
    with pytest.raises(ValueError, match=r"data.more.prepared is \[5, 5\], but data.sounds, of the same fronts.tar"):
        prepare_data(two, data, tmp_path / "small")
    gone = replace(study, parts=[replace(part, path="gone.tar")])
    with pytest.raises(FileNotFoundError, match=r"there is no .*gone.tar for data.sounds"):
        prepare_data(gone, data, tmp_path / "small")
