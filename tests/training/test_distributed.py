"""Two processes with half the batch each, under torchrun, take the step of one process with the whole batch."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from kronattn.training import run
from kronattn.training.image_data import ImageData
from tests.training.two_processes import build, keep_gradients

ROOT = Path(__file__).parents[2]
# No draws but the order of images, which all processes share.
SETTINGS = (
    "epochs=1",
    "data.images.resize=32",
    "data.images.flip=0",
    "model.options.drop_rate=0",
    "ema=null",
)


def two_processes(recipe_file: Path, *runs: str) -> None:
    """Runs one after the other, each a folder and its settings: starting the processes takes longer than any."""
    script = [str(ROOT / "tests" / "training" / "two_processes.py"), str(recipe_file)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *torchrun, *script, " ".join([*SETTINGS, "devices=2"]), *runs]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def gradients(folder: Path) -> dict[str, torch.Tensor]:
    assert json.loads((folder / "result.json").read_text())["epochs"] == 1
    return torch.load(folder / "gradients.pt")


def differences(one, two) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).norm() / one[name].norm().clamp_min(1e-12)) for name in one)


def test_gradients_of_two_processes_are_those_of_one(recipe_file, tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("one", "two", "apart")]
    monkeypatch.setattr(run, "build_model", build)
    keep_gradients(recipe_file, folders[0], SETTINGS)
    two_processes(recipe_file, str(folders[1]), "", str(folders[2]), "sync_batch_norm=false")
    one, two, apart = (gradients(folder) for folder in folders)
    assert differences(one, two) < 1e-8
    # And it is the synchronised statistics that make them so.
    assert differences(one, apart) > 1e-4


def test_every_validation_image_counts_once(recipe, folder, tmp_path, monkeypatch):
    """Five images over two processes: none is repeated to fill up."""
    shutil.copytree(folder, tmp_path / "images")
    (tmp_path / "images" / "val" / "n02102040" / "2.JPEG").unlink()
    monkeypatch.setattr(ImageData, "_processes", lambda self: 2)
    labels = []
    for rank in range(2):
        monkeypatch.setattr(ImageData, "_rank", lambda self, rank=rank: rank)
        data = ImageData(replace(recipe.data, path=str(tmp_path / "images")), 2)
        data.setup("validate")
        labels += [label for _, batch in data.val_dataloader() for label in batch.tolist()]
    assert sorted(labels) == [0, 0, 0, 1, 1]
