"""What a run leaves when it is interrupted, when its best epoch is not its last, and which files it does not leave."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file

from kronattn.cli import main
from kronattn.training.evaluation import evaluate
from kronattn.training.recipe import load_recipe
from kronattn.training.run import train
from tests.data.segmentation_folders import write_folder
from tests.trained import CLASSES, photo, weights_file


class Spoil(Callback):
    """A first epoch with a network that is always right, and a second from which on it takes each class for the other.

    Nothing is trained: whether so small a run learns to tell red from blue hangs on its seed and on the last bit of
    every sum. The untrained features of the images do tell them apart, and the classifier asks which mean is nearer.
    """

    @torch.no_grad()
    def on_fit_start(self, trainer, module):
        network = module.network
        for norm in network.modules():
            if hasattr(norm, "momentum"):
                norm.momentum = 0.0
        batch = next(iter(trainer.datamodule.val_dataloader()))
        images, labels = trainer.datamodule.prepare(batch, "val")
        network.eval()
        features = network.forward_head(network.forward_features(images), pre_logits=True)
        network.train()
        means = torch.stack([features[labels == label].mean(dim=0) for label in (0, 1)])
        scale = 1 / (means[0] - means[1]).square().sum()
        network.classifier.weight.copy_(2 * means * scale)
        network.classifier.bias.copy_(-means.square().sum(dim=1) * scale)

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            with torch.no_grad():
                module.network.classifier.weight.neg_()
                module.network.classifier.bias.neg_()


def test_the_best_weights_are_kept_and_the_last_ones(recipe, tmp_path, folder):
    run = tmp_path / "run"
    spoilt = replace(recipe, ema=None, epochs=2, optimiser=replace(recipe.optimiser, lr=0.0))
    result = train(spoilt, folder=run, callbacks=[Spoil()])
    assert (result["best_epoch"], result["epochs"]) == (1, 2)
    assert (result["best_top1"], result["top1"]) == (1.0, 0.0)
    scores = {
        name: evaluate(run / name, str(folder), accelerator="cpu").figures["top1"]
        for name in ("weights.safetensors", "weights-last.safetensors", "best.ckpt", "last.ckpt")
    }
    best, last = pytest.approx(result["best_top1"]), pytest.approx(result["top1"])
    assert scores["weights.safetensors"] == scores["best.ckpt"] == best
    assert scores["weights-last.safetensors"] == scores["last.ckpt"] == last
    card = (run / "README.md").read_text()
    assert "after epoch 1 of 2, which validated best" in card
    assert f"| validation top-1 | {100 * result['best_top1']:.2f}% |" in card


def test_fewer_epochs_than_between_validations(recipe, tmp_path):
    result = train(replace(recipe, epochs=2, validate_every=5), folder=tmp_path / "run")
    assert (tmp_path / "run" / "best.ckpt").exists()
    assert (result["best_epoch"], result["best_top1"]) == (2, result["top1"])
    best, last = (load_file(tmp_path / "run" / f"weights{end}.safetensors") for end in ("", "-last"))
    assert all(torch.equal(best[name], last[name]) for name in best)


def test_no_stray_files_and_a_card_that_names_the_right_one(recipe, tmp_path):
    train(replace(recipe, epochs=1), folder=tmp_path / "run")
    assert not (tmp_path / "run" / "hparams.yaml").exists()
    assert "kronattn train --config config.yaml" in (tmp_path / "run" / "README.md").read_text()
    assert load_recipe(tmp_path / "run" / "config.yaml").epochs == 1


def test_how_to_turn_the_average_off(recipe_file):
    with pytest.raises(ValueError, match="not 0: ema=null turns it off"):
        load_recipe(recipe_file, ["ema=0"])
    assert load_recipe(recipe_file, ["ema=null"]).ema is None


def test_ctrl_c(recipe_file, tmp_path):
    """One line with the checkpoint and the command that goes on, exit code 130; and the command does go on."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "kronattn.cli", "train", "--config", str(recipe_file), "--output", str(run)]
    process = subprocess.Popen(
        [*command, "epochs=25", "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
        # Where tests run in the background, a shell has the signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 240
    while not (run / "last.ckpt").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert out == ""
    assert err.startswith(
        f"kronattn: error: interrupted; the checkpoint is {run}/last.ckpt, and this goes on from it: "
    )
    assert err.count("\n") == 1
    assert not (run / "result.json").exists()
    goes_on = shlex.split(err.split("goes on from it: ")[1])
    assert goes_on[0] == "kronattn"
    assert main([*goes_on[1:], "epochs=26"]) == 0
    assert json.loads((run / "result.json").read_text())["epochs"] == 26


def test_ctrl_c_before_the_first_checkpoint(recipe_file, tmp_path, monkeypatch, capsys):
    from kronattn.training import run as module

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_build_network", interrupted)
    assert main(["train", "--config", str(recipe_file), "--output", str(tmp_path / "run")]) == 130
    err = capsys.readouterr().err
    assert err == "kronattn: error: interrupted before the first checkpoint: the same command starts again\n"


def test_ctrl_c_while_a_network_is_examined(tmp_path, monkeypatch, capsys):
    from kronattn.training import evaluation

    def interrupted(self, batch, index):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation._Evaluator, "test_step", interrupted)
    for name in CLASSES:
        (tmp_path / "val" / name).mkdir(parents=True)
        photo(tmp_path / "val" / name / "a.png")
    assert main(["evaluate", str(weights_file(tmp_path)), "--data", str(tmp_path), "--device", "cpu"]) == 130
    assert "kronattn: error: interrupted\n" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_ignored_label_is_the_one_that_was_given(tmp_path, capsys):
    root = write_folder(tmp_path / "data", {"train": 2, "val": 2}, classes=3, ignore=7)
    (root / "classes.txt").write_text("a\nb\nc\n")
    settings = [
        "model.options={backbone: kanet_kv, backbone_options: {width: 0.25}}",
        *("data.name=folder", "data.images.crop=33", "batch_size=2", "epochs=1", "accelerator=cpu", "ema=null"),
        *("compile=false", "precision=32-true", "data.workers=0"),
    ]
    run = tmp_path / "run"
    arguments = ["train", "--config", "camvid/deeplabv2_kao_kv", "--data", str(root), "--output", str(run), *settings]
    assert main([*arguments, "data.images.ignore_index=7"]) == 0
    assert main(["evaluate", str(run / "weights.safetensors"), "--data", str(root), "--device", "cpu"]) == 0
    capsys.readouterr()
    known_kind = [one for one in arguments if one != "data.name=folder"]
    assert main([*known_kind, "--output", str(tmp_path / "b"), "data.images.ignore_index=7"]) == 2
    err = capsys.readouterr().err
    assert "data.images.ignore_index is 7, but camvid ignores 11" in err
    assert err.count("\n") == 1


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
