"""Volumes: NIfTI files and their labels, what is said of those that are wrong, and crops."""

import gzip
import json

import numpy as np
import pytest
import torch

from kronattn.data.images import BadImage
from kronattn.data.volume_augment import VolumeSettings, random_volume_crop, vary_intensity
from kronattn.data.volumes import IGNORED, check_same_spacing, decode_volumes, load_volumes

nibabel = pytest.importorskip("nibabel", reason="volumes are an extra")


def write(path, array, spacing=(1.0, 1.0, 1.0)):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(array, np.diag([*spacing, 1.0]))
    path.write_bytes(gzip.compress(image.to_bytes()))


def pair(folder, name, shape=(4, 5, 6), label=2, **options):
    voxels = np.random.default_rng(len(name)).normal(100, 20, shape).astype(np.float32)
    labels = np.zeros(shape, np.uint8)
    labels[1, 2, 3] = label
    write(folder / "images" / f"{name}.nii.gz", voxels, **options)
    write(folder / "labels" / f"{name}.nii.gz", labels, **options)


@pytest.fixture
def folder(tmp_path):
    pair(tmp_path, "a")
    pair(tmp_path, "bb", (3, 7, 5))
    pair(tmp_path, "ccc")
    (tmp_path / "splits.json").write_text(json.dumps({"train": ["a", "bb"], "val": ["ccc"]}))
    return tmp_path


def test_volumes_are_standardised_and_padded(folder):
    found = decode_volumes(load_volumes(str(folder), "train"))
    assert found["voxels"].shape == (2, 1, 4, 7, 6)
    assert found["sizes"].tolist() == [[4, 5, 6], [3, 7, 5]]
    inside = found["voxels"][0, 0, :4, :5, :6].float()
    assert abs(float(inside.mean())) < 1e-2
    assert float(inside.std()) == pytest.approx(1, abs=2e-2)
    assert (found["voxels"][0, 0, :, 5:] == 0).all()
    assert (found["labels"][0, :, 5:] == IGNORED).all()
    assert found["labels"][1, 1, 2, 3] == 2


def test_folders_for_each_split(tmp_path):
    pair(tmp_path / "train", "a")
    pair(tmp_path / "val", "b")
    assert [entry.name for entry in load_volumes(str(tmp_path), "val").images] == ["val/images/b.nii.gz"]


def test_a_volume_without_its_label(folder):
    (folder / "labels" / "bb.nii.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"bb.nii.gz has no label: expected labels/bb.nii.gz"):
        load_volumes(str(folder), "train")


def test_a_volume_that_is_listed_and_not_there(folder):
    (folder / "images" / "bb.nii.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"splits.json lists bb in train, but there is no images/bb.nii.gz"):
        load_volumes(str(folder), "train")


def test_a_split_that_is_not_there(folder):
    with pytest.raises(ValueError, match="has no split 'test': it has train, val"):
        load_volumes(str(folder), "test")


def test_labels_out_of_range(folder):
    (folder / "classes.txt").write_text("background\norgan\n")
    with pytest.raises(BadImage, match=r"labels.a.nii.gz: label 2 at \(1, 2, 3\); labels are 0 to 1, and 255"):
        decode_volumes(load_volumes(str(folder), "train"))


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": ["a", "bb"], "val": ["ccc", "a"]}, "lists a more than once: a volume belongs to one of train, val"),
        ({"train": ["a", "a"], "val": ["ccc"]}, "lists a more than once"),
        ({"train": [], "val": ["ccc"]}, "splits.json: train names no volume"),
        ({"val": ["ccc"]}, "has no split 'train': it has val"),
        ({"train": ["a", "bb", "a"], "val": [["ccc"]]}, "lists a more than once"),
    ],
)
def test_splits_that_share_volumes(folder, splits, message):
    (folder / "splits.json").write_text(json.dumps(splits))
    with pytest.raises(ValueError, match=message):
        load_volumes(str(folder), "train")


def test_a_list_of_splits_that_is_too_deep(folder):
    (folder / "splits.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="must hold an object with the names of train, val and test"):
        load_volumes(str(folder), "train")


def test_a_label_that_lies_mirrored(folder):
    label = np.zeros((4, 5, 6), np.uint8)
    write(folder / "labels" / "a.nii.gz", label, spacing=(-1.0, 1.0, 1.0))
    with pytest.raises(BadImage, match=r"a.nii.gz has its axes as LAS, but its volume .*a.nii.gz as RAS: reorient one"):
        decode_volumes(load_volumes(str(folder), "train"))


def test_another_spacing(folder):
    pair(folder, "bb", spacing=(1.0, 1.0, 2.5))
    with pytest.raises(BadImage, match=r"bb.nii.gz has a spacing of 1×1×2.5, but .*a.nii.gz one of 1×1×1: resample"):
        decode_volumes(load_volumes(str(folder), "train"))


def test_another_spacing_in_another_split(folder):
    pair(folder, "ccc", spacing=(2.0, 1.0, 1.0))
    splits = [load_volumes(str(folder), split) for split in ("train", "val")]
    check_same_spacing(splits[:1])
    with pytest.raises(BadImage, match=r"ccc.nii.gz has a spacing of 2×1×1, but .*a.nii.gz one of 1×1×1: resample"):
        check_same_spacing(splits)


@pytest.mark.parametrize("other", ["images/site/a.nii.gz", "images/a.nii"])
def test_two_volumes_of_one_name(folder, other):
    (folder / other).parent.mkdir(exist_ok=True)
    (folder / other).write_bytes((folder / "images" / "a.nii.gz").read_bytes())
    with pytest.raises(ValueError, match="have the same name: which one is meant"):
        load_volumes(str(folder), "train")


@pytest.mark.parametrize("names", [5, "a", {"a": 1}, [["a"]], [{"image": "a"}], [None]])
def test_splits_of_another_shape(folder, names):
    (folder / "splits.json").write_text(json.dumps({"train": names}))
    with pytest.raises(ValueError, match=r"splits.json: train must be a list of names, such as \["):
        load_volumes(str(folder), "train")


@pytest.mark.parametrize(("content", "message"), [(b"\n", "names no class: give a name"), (b"a\n\xe9", "is not UTF-8")])
def test_classes_that_cannot_be_read(folder, content, message):
    (folder / "classes.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"classes.txt {message}"):
        load_volumes(str(folder), "train")


def test_voxels_that_are_no_numbers_of_one_part(folder):
    for array in (np.zeros((4, 5, 6), [("R", "u1"), ("G", "u1"), ("B", "u1")]), np.ones((4, 5, 6), np.complex64)):
        write(folder / "images" / "a.nii.gz", array)
        with pytest.raises(BadImage, match=r"images.a.nii.gz holds colours or complex numbers .*, expected one number"):
            decode_volumes(load_volumes(str(folder), "train"))


@pytest.mark.filterwarnings("error")
def test_labels_that_are_no_numbers(folder):
    write(folder / "labels" / "a.nii.gz", np.full((4, 5, 6), np.nan, np.float32))
    with pytest.raises(BadImage, match=r"labels.a.nii.gz holds labels that are no numbers"):
        decode_volumes(load_volumes(str(folder), "train"))


def test_labels_of_another_shape(folder):
    write(folder / "labels" / "a.nii.gz", np.zeros((4, 5, 5), np.uint8))
    with pytest.raises(BadImage, match=r"labels.a.nii.gz is 4×5×5, but its volume .*images.a.nii.gz is 4×5×6"):
        decode_volumes(load_volumes(str(folder), "train"))


def test_no_nifti(folder):
    (folder / "images" / "a.nii.gz").write_bytes(b"no volume")
    with pytest.raises(BadImage, match=r"images.a.nii.gz is not a NIfTI file, or a broken one"):
        decode_volumes(load_volumes(str(folder), "train"))


def test_no_numbers(folder):
    voxels = np.full((4, 5, 6), np.nan, np.float32)
    write(folder / "images" / "a.nii.gz", voxels)
    with pytest.raises(BadImage, match="holds values that are no numbers"):
        decode_volumes(load_volumes(str(folder), "train"))


def test_crops_are_windows_of_the_volume():
    """Each voxel says where it was: a window has neighbours next to each other, and labels lie with their voxels."""
    torch.manual_seed(0)
    grid = torch.arange(8 * 9 * 7).view(8, 9, 7)
    voxels, labels = grid.float().expand(20, 1, 8, 9, 7), (grid % 250).to(torch.uint8).expand(20, 8, 9, 7)
    x, y = random_volume_crop(voxels, labels, torch.tensor([[8, 9, 7]]).expand(20, 3), (4, 5, 6))
    assert x.shape == (20, 1, 4, 5, 6)
    assert torch.equal(x[:, 0].long() % 250, y)
    assert (x[:, 0, 1:] - x[:, 0, :-1] == 63).all()
    assert (x[:, 0, :, :, 1:] - x[:, 0, :, :, :-1] == 1).all()
    assert len(x[:, 0, 0, 0, 0].unique()) > 5


def test_smaller_volumes_lie_among_zeros():
    torch.manual_seed(0)
    voxels, labels = torch.ones(30, 1, 5, 5, 5), torch.zeros(30, 5, 5, 5, dtype=torch.uint8)
    sizes = torch.tensor([[3, 5, 2]]).expand(30, 3)
    x, y = random_volume_crop(vary_intensity(voxels, 0.5), labels, sizes, (5, 4, 4))
    assert ((y == IGNORED) == (x[:, 0] == 0)).all()
    assert ((y != IGNORED).flatten(1).sum(1) == 3 * 4 * 2).all()


@pytest.mark.parametrize("bad", [{"crop": (0, 4, 4)}, {"intensity": 1.0}])
def test_bad_settings(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        VolumeSettings(**bad)
