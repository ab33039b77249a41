"""Processes that train one run after another: who trains what, and what becomes of those that die."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kronattn.training import workers
from kronattn.training.comparison import plan
from kronattn.training.recipe import Recipe
from kronattn.training.workers import Queue, run_in_processes


def names(plans) -> list[str]:
    return [one.name for one in plans]


class TestQueue:
    def plans(self, networks: str, seeds: int):
        return plan(Recipe(), list(networks), range(seeds), Path("runs"))

    def test_as_many_processes_as_networks_each_keep_to_one(self):
        queue = Queue(self.plans("ab", 3), 2)
        first, second = set(), set()
        taken = [(queue.take(first), queue.take(second)) for _ in range(3)]
        assert [(one.name, other.name) for one, other in taken] == [(f"a, seed {n}", f"b, seed {n}") for n in range(3)]
        assert (first, second) == ({"a"}, {"b"})

    def test_one_that_is_done_helps_the_others(self):
        queue = Queue(self.plans("ab", 2), 2)
        first, second = set(), set()
        queue.take(second)
        taken = [queue.take(first) for _ in range(3)]
        assert names(taken) == ["b, seed 0", "b, seed 1", "a, seed 1"]
        assert queue.take(second) is None

    def test_fewer_processes_than_networks_compare_all_networks_first(self):
        queue = Queue(self.plans("abc", 2), 1)
        known = set()
        order = [queue.take(known).name for _ in range(6)]
        assert order[:3] == [f"{name}, seed 0" for name in "abc"]


def fake_worker(script: str):
    def start(self):
        command = [sys.executable, "-c", script]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    return start


ANSWERS = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"failure": "out of paper" if "seed1" in json.loads(line)["folder"] else ""}), flush=True)
"""
DIES = """
import os, signal, sys
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
FALLS_OVER = """
import json, sys
folder = json.loads(sys.stdin.readline())["folder"]
open(folder + "/log.txt", "w").write("Traceback\\nMemoryError: too much")
sys.exit(3)
"""


@pytest.fixture
def plans(tmp_path):
    return plan(Recipe(), ["kanet_kv", "mobilenetv2"], range(2), tmp_path)


def test_a_failure_does_not_stop_the_others(plans, monkeypatch):
    monkeypatch.setattr(workers._Worker, "_start", fake_worker(ANSWERS))
    found = {}
    run_in_processes(plans, 2, lambda one, failure: found.update({one.name: failure}))
    assert found == {one.name: "out of paper" if one.recipe.seed == 1 else "" for one in plans}


@pytest.mark.parametrize(
    ("script", "message"), [(DIES, "its process was killed (SIGKILL)"), (FALLS_OVER, "MemoryError")]
)
def test_a_process_that_ends_is_one_line_and_another_takes_over(plans, monkeypatch, script, message):
    monkeypatch.setattr(workers._Worker, "_start", fake_worker(script))
    found = {}
    run_in_processes(plans, 2, lambda one, failure: found.update({one.name: failure}))
    assert len(found) == 4
    assert all(message in failure and "\n" not in failure for failure in found.values())


def test_an_error_of_ours_ends_the_processes(plans, monkeypatch):
    monkeypatch.setattr(workers._Worker, "_start", fake_worker(ANSWERS))

    def done(one, failure):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        run_in_processes(plans, 1, done)


def test_seeds_share_a_process(recipe, tmp_path, monkeypatch):
    """One worker, two seeds: images are decoded once, and each run has its log and its result."""
    started = []
    real = workers._Worker._start
    monkeypatch.setattr(workers._Worker, "_start", lambda self: started.append(1) or real(self))
    plans = plan(replace(recipe, epochs=1), ["kanet_kv"], range(2), tmp_path)
    found = {}
    run_in_processes(plans, 1, lambda one, failure: found.update({one.name: failure}))
    assert found == {"kanet_kv, seed 0": "", "kanet_kv, seed 1": ""}
    assert len(started) == 1
    for one in plans:
        assert json.loads((one.folder / "result.json").read_text())["seed"] == one.recipe.seed
        assert "epoch 1 of 1: loss" in (one.folder / "log.txt").read_text()
