"""Two processes with half the batch each, under torchrun, take the step of one process with the whole batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# No draws but the order of images, which all processes share.
SETTINGS = (
    "epochs=1",
    "data.images.resize=32",
    "data.images.flip=0",
    "model.options.drop_rate=0",
    "ema=null",
)


def step(recipe_file: Path, folder: Path, processes: int, *settings: str) -> dict[str, torch.Tensor]:
    script = [str(ROOT / "tests" / "training" / "two_processes.py"), str(recipe_file), str(folder)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *torchrun, *script, *SETTINGS, f"devices={processes}", *settings]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((folder / "result.json").read_text())["epochs"] == 1
    return torch.load(folder / "gradients.pt")


def differences(one, two) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).norm() / one[name].norm().clamp_min(1e-12)) for name in one)


def test_gradients_of_two_processes_are_those_of_one(recipe_file, tmp_path):
    one = step(recipe_file, tmp_path / "one", 1)
    two = step(recipe_file, tmp_path / "two", 2)
    assert differences(one, two) < 1e-8
    # And it is the synchronised statistics that make them so.
    apart = step(recipe_file, tmp_path / "apart", 2, "sync_batch_norm=false")
    assert differences(one, apart) > 1e-4


@pytest.mark.parametrize("count", [3])
def test_every_validation_image_counts_once(recipe_file, tmp_path, count):
    """Six images over two processes, in batches of two: none is repeated to fill up."""
    step(recipe_file, tmp_path / "two", 2, "batch_size=4")
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert result["top1"] * 6 == pytest.approx(round(result["top1"] * 6))
