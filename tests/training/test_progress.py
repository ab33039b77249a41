"""What a run tells while it goes on: a line for each epoch, or a bar; and what it says where memory runs out."""

import os
import re
import signal
import threading
from dataclasses import replace

import pytest
import torch

from kronattn.cli import main
from kronattn.data.datasets import ImageDataset
from kronattn.training.callbacks import Diverged
from kronattn.training.errors import CannotTrain
from kronattn.training.halving import in_parts
from kronattn.training.progress import duration
from kronattn.training.run import train
from kronattn.training.task_module import TaskModule


def test_a_line_for_each_epoch(recipe, tmp_path, capsys):
    train(replace(recipe, epochs=3, validate_every=3), folder=tmp_path / "run", progress="lines")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    pattern = r"epoch 1 of 3: loss \d\.\d{3}, [\d,]+ images/s, \d+\.\d% waiting for data, \d+ s left"
    assert re.fullmatch(pattern, lines[0]), lines[0]
    assert re.search(r"epoch 3 of 3: .*top1 \d+\.\d%.* 0 s left", lines[2])


def test_a_run_of_iterations_counts_its_epochs(recipe, tmp_path, capsys):
    train(replace(recipe, iterations=5), folder=tmp_path / "run", progress="lines")
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"epoch {number} of 3" for number in (1, 2, 3)
    ]


def test_a_bar(recipe, tmp_path, capsys):
    train(replace(recipe, epochs=2), folder=tmp_path / "run", progress="bar")
    shown = capsys.readouterr().err
    assert "Epoch 2 of 2" in shown
    assert "images/s" in shown


def test_a_bar_ends_with_an_error(recipe, tmp_path, capsys):
    before = set(threading.enumerate())
    with pytest.raises(Diverged):
        train(replace(recipe, optimiser=replace(recipe.optimiser, lr=1e30)), folder=tmp_path / "run", progress="bar")
    # A thread that was told to end may not have got to it; that of a bar which nobody stopped never ends.
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()
    assert "Epoch 1 of 3" in capsys.readouterr().err


def test_the_command_prints_lines_where_nobody_watches(recipe_file, tmp_path, capsys):
    arguments = ["train", "--config", str(recipe_file), "--output"]
    assert main([*arguments, str(tmp_path / "a"), "epochs=2", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.lstrip().startswith("{")
    assert captured.err.count("epoch ") == 2
    assert main([*arguments, str(tmp_path / "b"), "epochs=1", "--quiet"]) == 0
    assert "epoch" not in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s")])
def test_durations(seconds, text):
    assert duration(seconds) == text


class TestMemory:
    def out_of_memory(self, *arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")

    def test_a_batch_that_does_not_fit_is_one_line(self, recipe, tmp_path, monkeypatch):
        monkeypatch.setattr(TaskModule, "losses", self.out_of_memory)
        with pytest.raises(CannotTrain) as found:
            train(recipe, folder=tmp_path / "run")
        assert str(found.value) == (
            "a step with batch_size 8 does not fit into the GPU's memory: give a smaller batch_size; "
            "there is no checkpoint yet (CUDA out of memory. Tried to allocate 2 GiB.)"
        )

    def test_other_errors_stay_what_they_are(self, recipe, tmp_path, monkeypatch):
        def wrong(*arguments):
            raise RuntimeError("shapes do not match")

        monkeypatch.setattr(TaskModule, "losses", wrong)
        with pytest.raises(RuntimeError, match="^shapes do not match") as found:
            train(recipe, folder=tmp_path / "run")
        assert not isinstance(found.value, CannotTrain)

    def test_a_worker_process_that_is_killed(self, recipe, tmp_path, monkeypatch):
        """As the system does with the largest process when memory runs out."""
        settings = replace(recipe.data, in_memory="no", workers=1)

        def killed(self, index):
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(ImageDataset, "__getitem__", killed)
        with pytest.raises(CannotTrain, match="a process that prepares images was killed.*there is no checkpoint yet"):
            train(replace(recipe, data=settings), folder=tmp_path / "run")

    def test_validation_goes_on_in_halves(self):
        sizes = []

        def function(batch):
            sizes.append(len(batch))
            return self.out_of_memory() if len(batch) > 2 else 2 * batch

        assert in_parts(function, torch.arange(5)).tolist() == [0, 2, 4, 6, 8]
        assert sizes == [5, 3, 2, 1, 2]

    def test_a_single_image_that_does_not_fit(self):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            in_parts(self.out_of_memory, torch.zeros(3))
