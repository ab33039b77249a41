"""Sounds learned from spectrograms, and volumes: from files to results, with and without what a run leaves."""

import gzip
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from kronattn.data.volumes import Volumes
from kronattn.training.evaluation import evaluate
from kronattn.training.folder import read_result
from kronattn.training.recipe import load_recipe
from kronattn.training.run import train
from kronattn.training.volume_data import VolumeBatches


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """High tones and low ones."""
    folder = tmp_path_factory.mktemp("sounds")
    generator = np.random.default_rng(0)
    for fold in (1, 2, 3):
        for name, rows in (("high", slice(0, 16)), ("low", slice(16, 32))):
            (folder / f"fold{fold}" / name).mkdir(parents=True)
            for number in range(8):
                pixels = generator.integers(0, 60, (32, 48), dtype=np.uint8)
                pixels[rows] += 150
                Image.fromarray(pixels).save(folder / f"fold{fold}" / name / f"{number}.png")
    return folder


def settings_of_sounds(sounds):
    settings = ["task=spectrograms", "data.name=spectrograms", f"data.path={sounds}", "data.images.size=[32, 48]"]
    return [*settings, "model.options={in_chans: 1, width: 0.25}", "model.context=axis_means", "accelerator=cpu"]


def test_sounds_of_one_class(sounds, tmp_path):
    """Which any network would name rightly."""
    shutil.copytree(sounds, tmp_path / "sounds", ignore=shutil.ignore_patterns("low"))
    recipe = load_recipe(None, [*settings_of_sounds(tmp_path / "sounds"), "epochs=1", "batch_size=8"])
    with pytest.raises(ValueError, match="sounds has a single class, high: there must be two or more"):
        train(recipe, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def recipe(sounds):
    settings = ["epochs=6", "batch_size=4", "optimiser.lr=0.05", "data.images.mixup=0.2"]
    return load_recipe(None, [*settings_of_sounds(sounds), *settings])


def test_sounds_are_learned_and_the_fold_is_remembered(recipe, tmp_path, sounds):
    recipe = replace(recipe, data=replace(recipe.data, images=replace(recipe.data.images, fold=2)))
    result = train(recipe, folder=tmp_path / "run", test="test")
    assert result["top1"] > 0.8
    assert result["test"] == {"split": "test", "top1": result["test"]["top1"], "loss": result["test"]["loss"]}
    # The weights that are kept are the best epoch's: the last epoch's are those that were tested.
    found = evaluate(tmp_path / "run" / "weights-last.safetensors", str(sounds), split="test", accelerator="cpu")
    assert found.description.fold == 2
    assert found.figures["top1"] == pytest.approx(result["test"]["top1"])
    assert found.figures["images"] == 16


def test_figures_only_leaves_figures_only(recipe, tmp_path):
    result = train(replace(recipe, epochs=1), folder=tmp_path / "run", figures_only=True, test="test")
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"config.yaml", "history.csv", "result.json"}
    assert read_result(tmp_path / "run") == json.loads(json.dumps(result))
    # Done is done.
    assert train(replace(recipe, epochs=1), folder=tmp_path / "run", figures_only=True) == read_result(tmp_path / "run")


def test_figures_only_changes_no_figure(recipe, tmp_path):
    one, other = (
        train(replace(recipe, epochs=1), folder=tmp_path / str(only), figures_only=only, test="test")
        for only in (False, True)
    )
    assert one["test"] == other["test"]
    assert one["train_loss"] == other["train_loss"]


def test_a_split_of_another_name(recipe, tmp_path):
    with pytest.raises(ValueError, match="folds have the splits train, val and test, not 'tset'"):
        train(replace(recipe, epochs=1), folder=tmp_path / "run", figures_only=True, test="tset")


def test_classes_are_known_before_the_device_is(tmp_path, monkeypatch):
    """Volumes that are read to count their classes lie on the CPU: training must not go on with those."""
    labels = torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    data = VolumeBatches(load_recipe(None, ["task=volumes", "data.name=nifti"]).data, 1)
    monkeypatch.setattr(data, "split", lambda name: Volumes([], [], None))
    monkeypatch.setattr(data, "build", lambda name: SimpleNamespace(labels=labels))
    assert data.class_names() == ["class 0", "class 1", "class 2"]
    assert data._datasets == {}


def write_volumes(folder, labels, spacing=(1.0, 1.0, 1.0)):
    """``labels``: for each split the one that all of its voxels have, but for a corner of zeros where it is no 255."""
    nibabel = pytest.importorskip("nibabel")
    for split, label in labels.items():
        truth = np.full((4, 5, 6), label, np.uint8)
        truth[:1, :, :] = label if label == 255 else 0
        voxels = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
        for kind, array in (("images", voxels), ("labels", truth)):
            place = folder / split / kind
            place.mkdir(parents=True, exist_ok=True)
            steps = spacing if split == "val" else (1.0, 1.0, 1.0)
            (place / "v.nii.gz").write_bytes(
                gzip.compress(nibabel.Nifti1Image(array, np.diag([*steps, 1.0])).to_bytes())
            )
    settings = ["task=volumes", "data.name=nifti", f"data.path={folder}", "data.images.crop=[4, 4, 4]", "epochs=1"]
    return load_recipe(None, [*settings, "model.options={widths: [4, 8]}", "accelerator=cpu", "batch_size=1"])


@pytest.mark.parametrize(
    ("labels", "spacing", "message"),
    [
        ({"train": 255, "val": 1}, 1.0, "every voxel of train has label 255, so that none counts"),
        ({"train": 1, "val": 255}, 1.0, "every voxel of val has label 255, so that none counts"),
        ({"train": 0, "val": 0}, 1.0, "has a single class, class 0: there must be two or more"),
        ({"train": 3, "val": 1}, 1.0, "train.labels.v.nii.gz has label 3, but no volume of train has 1: .*classes.txt"),
        ({"train": 1, "val": 1}, 2.0, "val.images.v.nii.gz has a spacing of 1×1×2, but .*train.* one of 1×1×1"),
    ],
)
def test_volumes_from_which_nothing_can_be_learned(tmp_path, labels, spacing, message):
    recipe = write_volumes(tmp_path / "data", labels, (1.0, 1.0, spacing))
    with pytest.raises(ValueError, match=message):
        train(recipe, folder=tmp_path / "run", figures_only=True)


def test_a_gap_between_labels_is_right_where_classes_have_names(tmp_path):
    recipe = write_volumes(tmp_path / "data", {"train": 3, "val": 3})
    (tmp_path / "data" / "classes.txt").write_text("background\nhead\nbody\ntail\n")
    assert train(recipe, folder=tmp_path / "run", figures_only=True)["epochs"] == 1


def test_volumes(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    generator = np.random.default_rng(0)
    names = [f"v{number}" for number in range(8)]
    for number, name in enumerate(names):
        shape = (10 + number % 3, 12, 9)
        labels = np.zeros(shape, np.uint8)
        labels[3:7, 3:8, 2:6] = 1
        voxels = (generator.normal(0, 1, shape) + 6 * labels).astype(np.float32)
        for kind, array in (("images", voxels), ("labels", labels)):
            (tmp_path / "data" / kind).mkdir(parents=True, exist_ok=True)
            content = nibabel.Nifti1Image(array, np.eye(4)).to_bytes()
            (tmp_path / "data" / kind / f"{name}.nii.gz").write_bytes(gzip.compress(content))
    splits = {"train": names[:4], "val": names[4:6], "test": names[6:]}
    (tmp_path / "data" / "splits.json").write_text(json.dumps(splits))
    settings = ["task=volumes", "data.name=nifti", f"data.path={tmp_path / 'data'}", "data.images.crop=[8, 8, 8]"]
    settings += ["model.options={widths: [4, 8]}", "model.context=kao_qkv", "accelerator=cpu", "channels_last=true"]
    settings += ["optimiser.name=adamw", "optimiser.lr=0.02", "epochs=12", "batch_size=2", "validate_every=12"]
    torch.manual_seed(0)
    result = train(load_recipe(None, settings), folder=tmp_path / "run", test="test")
    assert result["dice"] > 0.7
    found = evaluate(tmp_path / "run", str(tmp_path / "data"), split="test", accelerator="cpu").figures
    assert found["dice"] == pytest.approx(result["test"]["dice"], abs=1e-5)
    assert [entry["name"] for entry in found["classes"]] == ["class 0", "class 1"]
    assert found["classes"][1]["voxels"] == 2 * 4 * 5 * 4
