"""Copies in the host's memory: as things were, whatever happens after; and checkpoints that a thread writes."""

import threading

import pytest
import torch

from kronattn.training import checkpoints as checkpoints_module
from kronattn.training.checkpoints import WholeCheckpoints
from kronattn.training.host_copies import HostCopies, _dense


def test_copies_stay_what_they_were():
    weight, rows = torch.ones(3), [{"loss": 1.0}]
    copies, wait = HostCopies()({"a": weight, "b": [weight, {"c": torch.arange(2)}], "rows": rows, "epoch": 1})
    weight.zero_()
    rows.append({"loss": 2.0})
    rows[0]["loss"] = 3.0
    wait()
    assert copies["a"].tolist() == copies["b"][0].tolist() == [1.0, 1.0, 1.0]
    assert copies["b"][1]["c"].tolist() == [0, 1]
    assert (copies["rows"], copies["epoch"]) == ([{"loss": 1.0}], 1)


@pytest.mark.parametrize(
    ("tensor", "as_it_is"),
    [
        (torch.zeros(2, 3, 4, 5), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(2, 3, 1, 1).to(memory_format=torch.channels_last), True),
        (torch.zeros(()), True),
        (torch.zeros(4, 6)[:, ::2], False),
        (torch.zeros(4, 1).expand(4, 3), False),
    ],
)
def test_what_fills_its_memory(tensor, as_it_is):
    assert (_dense(tensor) is tensor) is as_it_is
    found = _dense(tensor)
    assert sum((length - 1) * stride for length, stride in zip(found.shape, found.stride(), strict=True)) < max(
        1, found.numel()
    )


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The write is held up; meanwhile the weights change, and the file has them as they were."""
    may_write = threading.Event()
    real = torch.save

    def save(*arguments):
        assert may_write.wait(60)
        real(*arguments)

    monkeypatch.setattr(checkpoints_module.torch, "save", save)
    checkpoints, weight = WholeCheckpoints(), torch.ones(2)
    checkpoints.save_checkpoint({"global_step": 1, "weight": weight}, tmp_path / "best.ckpt")
    checkpoints.save_checkpoint({"global_step": 1, "weight": weight}, tmp_path / "last.ckpt")
    weight.zero_()
    assert not (tmp_path / "best.ckpt").exists()
    may_write.set()
    checkpoints.finish()
    for name in ("best", "last"):
        assert torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["weight"].tolist() == [1.0, 1.0]
    assert (tmp_path / "best.ckpt").stat().st_ino == (tmp_path / "last.ckpt").stat().st_ino


def test_what_went_wrong_is_raised_and_the_older_file_stays(tmp_path, monkeypatch):
    checkpoints = WholeCheckpoints()
    for name in ("best", "last"):
        checkpoints.save_checkpoint({"global_step": 1}, tmp_path / f"{name}.ckpt")
    checkpoints.save_checkpoint({"global_step": 2}, tmp_path / "last.ckpt")
    checkpoints.finish()

    may_write = threading.Event()

    def full(*arguments):
        assert may_write.wait(60)
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(checkpoints_module.torch, "save", full)
    checkpoints.save_checkpoint({"global_step": 3}, tmp_path / "best.ckpt")
    # The best and the last of this step are one file: where it could not be written, neither changes.
    checkpoints.save_checkpoint({"global_step": 3}, tmp_path / "last.ckpt")
    may_write.set()
    checkpoints.teardown()
    with pytest.raises(OSError, match="best.ckpt could not be written; the last one is whole"):
        checkpoints.finish()
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_what_went_wrong_is_raised_by_the_next_checkpoint(tmp_path, monkeypatch):
    def full(*arguments):
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(checkpoints_module.torch, "save", full)
    checkpoints = WholeCheckpoints()
    checkpoints.save_checkpoint({"global_step": 1}, tmp_path / "last.ckpt")
    checkpoints.teardown()  # waits for the thread that writes
    with pytest.raises(OSError, match="last.ckpt could not be written"):
        checkpoints.save_checkpoint({"global_step": 2}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_slow_disk_has_the_newest(tmp_path, monkeypatch):
    """While the first is being written, four more come: the last of them is the next."""
    started, may_write, written = threading.Event(), threading.Event(), []
    real = torch.save

    def save(checkpoint, path):
        started.set()
        assert may_write.wait(60)
        written.append(checkpoint["global_step"])
        real(checkpoint, path)

    monkeypatch.setattr(checkpoints_module.torch, "save", save)
    checkpoints, weight = WholeCheckpoints(), torch.zeros(2)
    for step in range(1, 6):
        weight.fill_(step)
        checkpoints.save_checkpoint({"global_step": step, "weight": weight}, tmp_path / "last.ckpt")
        assert started.wait(60)
    weight.zero_()
    may_write.set()
    checkpoints.finish()
    assert written == [1, 5]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["weight"].tolist() == [5.0, 5.0]
    # One that was being written, one that waited, one that was being made.
    assert len(checkpoints._spare) == 3
