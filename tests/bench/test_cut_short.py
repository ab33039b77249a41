"""Benchmarks that are cut short leave what they have, and what they leave says so."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from kronattn.bench import latency
from kronattn.cli import main
from kronattn.measure import compare, processes, read_comparison

SMALL = ["--seconds", "0.001"]
OPERATORS = ["bench", "operators", "--operators", "copy,kao_kv_torch", "--shapes", "1x8x4x4,1x8x4x5", "--device", "cpu"]
HEADS = ["bench", "heads", "--names", "attn,kao_kv", "--sizes", "17,33", "--channels", "16", "--classes", "3"]
NETWORKS = ["bench", "networks", "--models", "kanet_kv", "--batch", "2", "--size", "32"]
LATENCY = ["bench", "latency", "--ways", "operators", "--repeats", "2", "--rounds", "2", "--turn-seconds", "0"]
NOTE = "Not complete: the run ended before everything was measured."


def second_interrupted(function):
    """The same function, until it is called a second time."""
    calls = []

    def call(*of, **options):
        calls.append(of)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return function(*of, **options)

    return call


@pytest.fixture
def interrupted(monkeypatch):
    """What times a way, or has processes prepare, is interrupted the second time."""
    module = sys.modules[compare.__module__]
    monkeypatch.setattr(module, "time_calls", second_interrupted(module.time_calls))
    monkeypatch.setattr(processes, "_prepare", second_interrupted(processes._prepare))
    monkeypatch.setattr(latency, "_OPERATOR_CASE", {"batch": 1, "channels": 2, "grid": [5, 6]})


def shown(path, capsys) -> str:
    assert main(["bench", "show", str(path)]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("command", "rows"),
    [([*OPERATORS, *SMALL], 2), ([*HEADS, *SMALL], 3), ([*NETWORKS, *SMALL], 2), (LATENCY, 3)],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_what_was_measured_is_in_the_file(command, rows, interrupted, tmp_path, capsys):
    if command[1] == "networks":
        pytest.importorskip("torchvision", reason="torchvision is not installed")
    path = tmp_path / "found.json"
    assert main([*command, "--output", str(path)]) == 130
    assert list(tmp_path.iterdir()) == [path]
    found = read_comparison(path)
    assert (found.unfinished, len(found.measured)) == (True, rows)
    capsys.readouterr()
    assert shown(path, capsys).count(NOTE) == 1


def test_what_came_to_its_end_is_as_ever(tmp_path, capsys):
    path = tmp_path / "found.json"
    assert main([*OPERATORS, *SMALL, "--json", "--output", str(path)]) == 0
    found = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert list(found) == ["schema", "kind", "base", "rows", "settings", "environment", "command"]
    assert NOTE not in shown(path, capsys)


def test_a_run_that_is_killed_leaves_a_whole_file(tmp_path, capsys):
    path = tmp_path / "found.json"
    script = f"""
import os, signal, sys
from kronattn.cli import main
from kronattn.measure import compare
module, calls = sys.modules[compare.__module__], []
timed = module.time_calls

def time_calls(*of, **options):
    calls.append(of)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return timed(*of, **options)

module.time_calls = time_calls
main({[*OPERATORS, *SMALL, "--output", str(path)]!r})
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    found = read_comparison(path)
    assert found.unfinished
    assert {(row.work, *row.case["grid"]) for row in found.rows} == {("inference", 4, 4), ("training", 4, 4)}
    assert NOTE in shown(path, capsys)
