"""Processes that train one run after another: who trains what, and what becomes of those that die."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
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


# Catches what it is sent, and ends with its input, or not even then.
STUBBORN = """
import json, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(json.loads(sys.stdin.readline())["folder"] + "/begun", "w").close()
sys.stdin.read() if ENDS else time.sleep(600)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ends", [True, False])
def test_a_signal_ends_the_processes_and_what_they_were_at_is_not_told_of(plans, monkeypatch, sent, ends):
    started = []
    start = fake_worker(STUBBORN.replace("ENDS", str(ends)))
    monkeypatch.setattr(workers._Worker, "_start", lambda self: started.append(start(self)) or started[-1])
    monkeypatch.setattr(workers, "_PATIENCE", 60.0 if ends else 0.1)

    def send():
        while sum((one.folder / "begun").exists() for one in plans) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), sent)

    handler, told = signal.getsignal(signal.SIGTERM), []
    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        run_in_processes(plans, 2, lambda one, failure: told.append(one))
    sender.join()
    assert told == []
    assert [process.returncode for process in started] == [0 if ends else -signal.SIGKILL] * 2
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_process_that_starts_while_all_are_stopped_ends_too(plans, monkeypatch):
    monkeypatch.setattr(workers._Worker, "_start", fake_worker(ANSWERS))
    stopping = threading.Event()
    stopping.set()
    worker = workers._Worker(None, stopping)
    assert worker.train(plans[0]) == "interrupted"
    assert worker._process is None


def test_a_process_leaves_ctrl_c_to_the_one_that_started_it():
    lines = (
        "import signal; from kronattn.training.worker import main; main(); print(signal.getsignal(2) == signal.SIG_IGN)"
    )
    done = subprocess.run([sys.executable, "-c", lines], input="", capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


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
