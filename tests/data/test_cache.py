"""Decoded data on disk: made once, read by all, whole or not at all."""

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kronattn.data import cache as cache_module
from kronattn.data.archives import list_files
from kronattn.data.cache import cached, fingerprint


def never():
    raise AssertionError("decoded twice")


def test_the_second_reads_what_the_first_wrote(tmp_path):
    pixels = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    first, bad = cached(tmp_path, "k", lambda: ({"pixels": pixels, "labels": torch.arange(3)}, ["a/b.png"]))
    second, bad_again = cached(tmp_path, "k", never)
    assert bad == bad_again == ["a/b.png"]
    for tensors in (first, second):
        assert torch.equal(tensors["pixels"], pixels)
        assert tensors["labels"].tolist() == [0, 1, 2]
    second["pixels"].zero_()
    assert torch.equal(cached(tmp_path, "k", never)[0]["pixels"], pixels)


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_module.np, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, "k", lambda: ({"x": torch.zeros(1)}, []))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["k.lock"]
    assert cached(tmp_path, "k", lambda: ({"x": torch.ones(1)}, []))[0]["x"].item() == 1


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.np, "save", full)
    with pytest.raises(OSError, match=r"could not be written to the cache .*No space left on device\): make room"):
        cached(tmp_path, "k", lambda: ({"x": torch.zeros(1)}, []))


def test_files_that_change_have_another_name(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    file = tmp_path / "train" / "a" / "0.png"
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(file)
    before = fingerprint(list_files(tmp_path), 32)
    assert fingerprint(list_files(tmp_path), 32) == before
    assert fingerprint(list_files(tmp_path), 64) != before
    Image.fromarray(np.zeros((5, 4, 3), np.uint8)).save(file)
    assert fingerprint(list_files(tmp_path), 32) != before


def _decode_slowly(folder: str, queue) -> None:
    def make():
        queue.put("decoded")
        time.sleep(0.5)
        return {"x": torch.arange(3)}, []

    queue.put(cached(Path(folder), "k", make)[0]["x"].tolist())


def test_processes_at_the_same_time_decode_once(tmp_path):
    pytest.importorskip("fcntl")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_decode_slowly, args=(str(tmp_path), queue)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in range(4)]
    for process in processes:
        process.join(60)
    assert found.count("decoded") == 1
    assert found.count([0, 1, 2]) == 3
