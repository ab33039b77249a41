"""Segmenters: the paper's recipe proved on what is built, the metric against plain counting, runs on tiny datasets."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kronattn.cli import main
from kronattn.data.joint import joint_training_transform
from kronattn.models import create_model
from kronattn.models.files import Description, load_model
from kronattn.tasks import find_task
from kronattn.training.mask_data import MaskData
from kronattn.training.optimisation import build_optimiser, build_schedule
from kronattn.training.recipe import load_recipe
from kronattn.training.run import train
from tests.data.segmentation_folders import write_folder, write_sbd, write_voc

HEADS = ("aspp", "attn", "kao_kv", "kao_qkv")
SMALL = (
    "model.options={backbone: kanet_kv, backbone_options: {width: 0.25}}",
    "data.images.crop=33",
    "batch_size=2",
    "iterations=5",
    "precision=32-true",
    "accelerator=cpu",
    "data.workers=1",
)


class TestThePapersRecipe:
    @pytest.fixture
    def recipe(self):
        return load_recipe("voc/deeplabv2_kao_kv")

    def test_length_and_batch(self, recipe):
        assert (recipe.iterations, recipe.batch_size, recipe.data.name) == (25_000, 8, "voc_aug")

    @pytest.mark.parametrize("steps_per_epoch", [1322, 183])
    def test_schedule(self, recipe, steps_per_epoch):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimiser = torch.optim.SGD([parameter], lr=recipe.optimiser.lr)
        schedule = build_schedule(optimiser, recipe.schedule, recipe.iterations / steps_per_epoch, steps_per_epoch)
        factor = schedule.lr_lambdas[0]
        for step, expected in ((0, 1.0), (12_500, 0.5**0.9), (24_999, (1 / 25_000) ** 0.9), (25_000, 0.0)):
            assert factor(step) == pytest.approx(expected, abs=1e-9)
        assert optimiser.param_groups[0]["lr"] == 2.5e-4

    def test_parameter_groups(self, recipe):
        options = {**recipe.model.options, "backbone": "resnet18"}
        network = create_model(recipe.model.name, num_classes=21, **options)
        backbone, head = build_optimiser(network, recipe.optimiser).param_groups
        assert [group["momentum"] for group in (backbone, head)] == [0.9, 0.9]
        assert [group["weight_decay"] for group in (backbone, head)] == [5e-4, 5e-4]
        assert (backbone["lr"], head["lr"]) == (2.5e-4, pytest.approx(2.5e-3))
        assert {id(p) for p in head["params"]} == {id(p) for p in network.head.parameters()}
        trained = [p for p in network.parameters() if p.requires_grad]
        assert len(backbone["params"]) + len(head["params"]) == len(trained)

    def test_network(self, recipe):
        assert recipe.model.options == {"backbone": "resnet101", "output_stride": 8, "freeze_norm": True}
        for head in HEADS:
            other = load_recipe(f"voc/deeplabv2_{head}")
            assert other.model.name == f"deeplabv2_{head}"
            other.model.name = recipe.model.name
            assert other == recipe

    def test_crop_and_ignored_label(self, recipe, tmp_path):
        write_voc(tmp_path, ["a"], ["b"])
        data = MaskData(recipe.data, 1)
        data.settings.path, data.settings.name = str(tmp_path), "voc"
        image, mask = data.build("train")[0]
        assert image.shape == (3, 321, 321)
        assert (mask.shape, mask.dtype) == ((321, 321), torch.int64)
        assert int(mask.max()) == 255
        scales = {step.__class__.__name__: step for step in joint_training_transform(recipe.data.images).transforms}
        assert (scales["RandomScale"].smallest, scales["RandomScale"].largest) == (0.5, 1.5)


def plainly(truth: np.ndarray, predicted: np.ndarray, classes: int, ignore: int) -> tuple[float, float]:
    """Pixel accuracy and mean IoU by counting, class by class."""
    counted = truth != ignore
    truth, predicted = truth[counted], predicted[counted]
    ious = []
    for label in range(classes):
        union = ((truth == label) | (predicted == label)).sum()
        if union:
            ious.append(((truth == label) & (predicted == label)).sum() / union)
    return float((truth == predicted).mean()), float(np.mean(ious))


@given(st.integers(0, 2**31), st.integers(2, 8), st.sampled_from([255, 11]), st.integers(1, 3))
def test_metric_is_plain_counting(seed, classes, ignore, batches):
    generator = np.random.default_rng(seed)
    truth = generator.integers(0, classes, (batches, 2, 7, 9))
    predicted = np.where(generator.random(truth.shape) < 0.5, truth, generator.integers(0, classes, truth.shape))
    truth[generator.random(truth.shape) < 0.2] = ignore
    scores = find_task("segmentation").metrics(Description("m", classes=["x"] * classes, ignore_index=ignore))
    for t, p in zip(truth, predicted, strict=True):
        scores.update(torch.from_numpy(p), torch.from_numpy(t))
    found = scores.compute()
    accuracy, mean_iou = plainly(truth, predicted, classes, ignore)
    assert float(found["pixel_accuracy"]) == pytest.approx(accuracy, abs=1e-6)
    assert float(found["mean_iou"]) == pytest.approx(mean_iou, abs=1e-6)


@pytest.fixture
def places(tmp_path):
    names = [f"2008_{number:06}" for number in range(8)]
    write_voc(tmp_path / "voc", names[:3], names[3:5], others=tuple(names[5:]))
    write_sbd(tmp_path / "sbd", names[5:], names[4:5])
    write_folder(tmp_path / "folder", {"train": 4, "val": 2})
    (tmp_path / "folder" / "classes.txt").write_text("road\nsky\ntree\n")
    return {
        "voc": str(tmp_path / "voc"),
        "voc_aug": f"{tmp_path / 'voc'},{tmp_path / 'sbd'}",
        "sbd": str(tmp_path / "sbd"),
        "folder": str(tmp_path / "folder"),
    }


@pytest.mark.parametrize("name", ["voc", "voc_aug", "folder"])
def test_end_to_end(places, tmp_path, capsys, name):
    """Train by the paper's recipe, evaluate what came out, and draw it."""
    run, pictures = tmp_path / "run", tmp_path / "pictures.png"
    arguments = ["train", "--config", "voc/deeplabv2_kao_qkv", "--data", places[name], f"data.name={name}"]
    assert main([*arguments, *SMALL, "--output", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["task"], result["data"]) == ("segmentation", name)
    arguments = ["evaluate", str(run / "weights.safetensors"), "--data", places[name], "--device", "cpu"]
    assert main([*arguments, "--json", "--pictures", str(pictures)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mean_iou"] == pytest.approx(result["mean_iou"])
    assert found["pixel_accuracy"] == pytest.approx(result["pixel_accuracy"])
    counted = np.array(found["confusion"])
    assert np.trace(counted) / counted.sum() == pytest.approx(found["pixel_accuracy"])
    assert pictures.read_bytes().startswith(b"\x89PNG")
    assert main(arguments) == 0
    assert "Pixel accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("validate_every", [1, 2])
def test_a_killed_runs_steps_are_repeated(places, tmp_path, validate_every):
    """Resumed from the checkpoint of an earlier epoch, a run of iterations ends with the same weights.

    Found by the soak: an epoch that was not validated went on with a batch more, one that was had another row.
    """
    from lightning.pytorch.callbacks import Callback

    class Stop(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.current_epoch == 1:
                raise SystemExit

    recipe = load_recipe(
        "voc/deeplabv2_kao_kv",
        [*SMALL, "data.name=folder", f"data.path={places['folder']}", "ema=0.9", f"validate_every={validate_every}"],
    )
    train(recipe, folder=tmp_path / "whole")
    with pytest.raises(SystemExit):
        train(recipe, folder=tmp_path / "cut", callbacks=[Stop()])
    train(recipe, folder=tmp_path / "cut", resume=True)
    whole, cut = (load_model(tmp_path / name / "weights.safetensors")[0].state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    histories = [(tmp_path / name / "history.csv").read_text() for name in ("whole", "cut")]
    assert histories[0] == histories[1]


def test_bad_pairs(places, tmp_path, capsys):
    mask = Path(places["folder"]) / "train" / "masks" / "001.png"
    mask.write_bytes(mask.read_bytes()[:40])
    arguments = ["train", "--config", "voc/deeplabv2_kao_qkv", "--data", places["folder"], "data.name=folder", *SMALL]
    assert main([*arguments, "--output", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert "masks/001.png" in error
    assert error.count("\n") == 1
    assert main([*arguments, "--output", str(tmp_path / "b"), "--skip-bad-images", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped_images"] == 1


@pytest.mark.parametrize("split", ["train", "val"])
def test_masks_of_which_nothing_counts(places, tmp_path, capsys, split):
    """Their figures would be no numbers, which JSON does not have."""
    for mask in (Path(places["folder"]) / split / "masks").iterdir():
        Image.fromarray(np.full((20, 30), 255, np.uint8)).save(mask)
    arguments = ["train", "--config", "voc/deeplabv2_kao_qkv", "--data", places["folder"], "data.name=folder", *SMALL]
    assert main([*arguments, "--output", str(tmp_path / "run")]) == 2
    assert f"folder: every pixel of {split} has label 255, so that none counts" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_classes_of_another_dataset(places, tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ["train", "--config", "voc/deeplabv2_kao_qkv", "--data", places["folder"], "data.name=folder", *SMALL]
    assert main([*arguments, "--output", str(run)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run / "last.ckpt"), "--data", places["voc"], "--dataset", "voc"]) == 2
    assert "the data's classes are background, aeroplane" in capsys.readouterr().err


def test_camvid_recipe_is_the_same_for_every_head():
    recipes = [load_recipe(f"camvid/deeplabv2_{head}") for head in HEADS]
    for recipe in recipes:
        recipe.model.name = ""
    assert all(recipe == recipes[0] for recipe in recipes)


@pytest.mark.skipif(not Path("../shared/data/camvid.tar").exists(), reason="CamVid is not here")
def test_camvid_begins(tmp_path, capsys):
    arguments = ["train", "--config", "camvid/deeplabv2_kao_qkv", "--data", "../shared/data/camvid.tar", "iterations=1"]
    small = [setting for setting in SMALL if not setting.startswith("iterations")]
    assert main([*arguments, *small, "--output", str(tmp_path / "run"), "--json", "data.in_memory=no"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == "camvid"
