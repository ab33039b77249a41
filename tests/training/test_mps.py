"""NVIDIA's multi-process service, by a program that notes how it was called: no GPU is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kronattn.cli import main
from kronattn.study import run
from kronattn.training import comparison, mps
from kronattn.training.comparison import plan, run_all
from kronattn.training.mps import sharing_gpu
from kronattn.training.recipe import Recipe
from tests.cli.test_study import STUDY

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
PROGRAM = """#!/bin/sh
echo "${1:-$(cat)} $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY $CUDA_VISIBLE_DEVICES" >> "CALLS"
exit CODE
"""
WORKER = """
import json, os, sys
for line in sys.stdin:
    with open(json.loads(line)["folder"] + "/result.json", "w") as file:
        json.dump({"place": os.environ.get("CUDA_MPS_PIPE_DIRECTORY")}, file)
    print(json.dumps({"failure": ""}), flush=True)
"""
LINE = "NVIDIA's multi-process service could not be started: the processes take turns on the GPU\n"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a program on the path, which ends with ``code``; what it was called with, as far as it was."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()

    def put(code: int = 0):
        (folder / "nvidia-cuda-mps-control").write_text(PROGRAM.replace("CALLS", str(calls)).replace("CODE", str(code)))
        (folder / "nvidia-cuda-mps-control").chmod(0o755)
        return lambda: [line.split() for line in calls.read_text().splitlines()] if calls.exists() else []

    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(mps, "_USUAL_PLACE", tmp_path / "nowhere")
    monkeypatch.setattr(mps, "_TRY", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return put


def test_processes_are_told_its_place_and_it_ends_with_them(program, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("TMPDIR", "/tmp/" + "long" * 30)
    calls = program()
    with sharing_gpu([Recipe()], 2):
        place = os.environ[PIPES]
        assert Path(place).is_dir()
        assert len(f"{place}/control_privileged") < 100
        # Without CUDA_VISIBLE_DEVICES, which the processes keep.
        assert calls() == [["-d", place, place]]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert calls() == [["-d", place, place], ["quit", place, place]]
    assert PIPES not in os.environ
    assert not Path(place).exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_it_ends_with_errors_too(program, error):
    calls = program()
    with pytest.raises(error), sharing_gpu([Recipe()], 2):
        raise error
    assert [call[0] for call in calls()] == ["-d", "quit"]
    assert PIPES not in os.environ


@pytest.mark.parametrize(("code", "tried"), [(1, ""), (0, "raise SystemExit(1)"), (0, "import time; time.sleep(60)")])
def test_one_that_cannot_be_started_or_serves_nobody_is_one_line(program, monkeypatch, capfd, code, tried):
    monkeypatch.setattr(mps, "_TRY", tried)
    monkeypatch.setattr(mps, "_PATIENCE", 2)
    calls = program(code)
    with sharing_gpu([Recipe()], 2):
        assert PIPES not in os.environ
        assert [call[0] for call in calls()] == ["-d", "quit"]
        assert capfd.readouterr() == ("", LINE)
    assert len(calls()) == 2


@pytest.mark.parametrize("reason", ["one process", "cpu", "several devices", "no gpu", "theirs", "usual place", "none"])
def test_nothing_happens_where_it_is_of_no_use(program, reason, monkeypatch, capfd):
    calls, recipe = program(), Recipe(batch_size=128)
    if reason == "cpu":
        recipe = replace(recipe, accelerator="cpu")
    elif reason == "several devices":
        recipe = replace(recipe, devices=2)
    elif reason == "no gpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif reason == "theirs":
        monkeypatch.setenv(PIPES, "/theirs")
    elif reason == "usual place":
        mps._USUAL_PLACE.touch()
    elif reason == "none":
        monkeypatch.setenv("PATH", "/nowhere")
    before = dict(os.environ)
    with sharing_gpu([recipe], 1 if reason == "one process" else 2):
        assert dict(os.environ) == before
    assert calls() == []
    assert capfd.readouterr() == ("", "")


def test_it_ends_when_the_command_is_killed(program, tmp_path):
    calls = program()
    script = """
import time, torch
from kronattn.training import comparison, mps
from kronattn.training.recipe import Recipe
torch.cuda.is_available, mps._TRY = (lambda: True), ""
with mps.sharing_gpu([Recipe()], 2):
    print(flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 30
    place = Path(calls()[0][1])
    while place.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert calls()[1:] == [["quit", str(place), str(place)]]
    assert not place.exists()


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """In the interpreter's place: a process whose result is what it was told of the service."""
    script, interpreter = tmp_path / "worker.py", tmp_path / "python"
    script.write_text(WORKER)
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(comparison, "precompiling", lambda *recipes, jobs: nullcontext())


@pytest.mark.parametrize(
    ("options", "shared"), [({"jobs": 2}, True), ({"jobs": 2, "take_turns": True}, False), ({}, False)]
)
def test_a_comparison_trains_under_it(program, worker, tmp_path, options, shared):
    calls = program()
    results, failures = run_all(plan(Recipe(), ["kanet_kv"], range(2), tmp_path / "runs"), **options)
    assert not failures
    assert [call[0] for call in calls()] == (["-d", "quit"] if shared else [])
    assert [result["place"] for result in results] == [calls()[0][1] if shared else None] * 2


@pytest.mark.parametrize("options", [[], ["--take-turns"]])
def test_a_study_trains_under_it(program, tmp_path, monkeypatch, options):
    calls, told = program(), []
    (tmp_path / "small.yaml").write_text(STUDY)
    monkeypatch.setattr(run, "serve", lambda *of: told.append(os.environ.get(PIPES)))
    monkeypatch.setattr(run, "check_data", lambda *of: None)  # digits have no test
    arguments = [str(tmp_path / "small.yaml"), "--data", str(tmp_path), "--folder", str(tmp_path / "runs")]
    assert main(["study", *arguments, "--output", str(tmp_path / "small.json"), "--jobs", "2", *options]) == 0
    assert told == [None if options else calls()[0][1]]
