"""What data costs: epochs with it, by turns with epochs without."""

import pytest

from kronattn.bench.loader import bench_loader
from kronattn.training import run
from kronattn.training.data import TrainingData
from kronattn.training.recipe import load_recipe
from kronattn.training.task_module import TaskModule
from tests.data.segmentation_folders import write_folder
from tests.training.test_spectrograms import settings_of_sounds, sounds

__all__ = ["sounds"]


@pytest.mark.parametrize("in_memory", ["yes", "no"])
def test_every_other_epoch_is_one_batch(recipe, monkeypatch, in_memory):
    recipe.data.in_memory, recipe.data.workers = in_memory, 0
    seen = []
    real = TaskModule.training_step
    monkeypatch.setattr(
        TaskModule, "training_step", lambda self, b, i: seen.append(float(b[0].sum())) or real(self, b, i)
    )
    found = bench_loader(recipe, epochs=2)
    steps = len(seen) // 4
    assert steps > 1
    first, without, second, without_again = (seen[start : start + steps] for start in range(0, len(seen), steps))
    assert len({*first, *second}) == 2 * steps
    assert set(without) == {first[-1]}
    assert set(without_again) == {second[-1]}
    assert (found["size"], found["batch_size"]) == (recipe.data.images.size, recipe.batch_size)


def test_whole_steps(recipe, monkeypatch):
    """As on a GPU, where the step prepares its batch: in every other epoch it is given one that is prepared."""
    monkeypatch.setattr(run, "steps_on_device", lambda recipe, device: True)
    monkeypatch.setattr(TrainingData, "gathers_on_device", lambda self, dataset: True)
    seen = []
    real = TaskModule.losses
    monkeypatch.setattr(TaskModule, "losses", lambda self, b: seen.append(float(b[0].sum())) or real(self, b))
    bench_loader(recipe, epochs=2)
    steps = len(seen) // 4
    first, without, second, without_again = (seen[start : start + steps] for start in range(0, len(seen), steps))
    assert len({*first, *second}) == 2 * steps
    assert len(set(without)) == len(set(without_again)) == 1
    assert without[0] != without_again[0]


def test_spectrograms(sounds):
    recipe = load_recipe(None, [*settings_of_sounds(sounds), "epochs=2", "batch_size=4"])
    assert bench_loader(recipe, epochs=2)["size"] == (32, 48)


def test_masks(tmp_path):
    write_folder(tmp_path, {"train": 4, "val": 2})
    (tmp_path / "classes.txt").write_text("road\nsky\ntree\n")
    recipe = load_recipe(
        "camvid/deeplabv2_kao_kv",
        [
            "data.name=folder",
            f"data.path={tmp_path}",
            "model.options={backbone: kanet_kv, backbone_options: {width: 0.25}}",
            "data.images.crop=33",
            "batch_size=2",
            "precision=32-true",
            "accelerator=cpu",
            "data.workers=0",
        ],
    )
    found = bench_loader(recipe, epochs=2)
    assert found["kept"] == found["pairs"][0] > 0
    assert (found["data"], found["size"]) == ("folder", 33)
