"""The benchmark of networks: what it reports, on sizes that take no time. Never how fast anything is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import kronattn
from kronattn.bench.networks import BASE
from kronattn.cli import main

SMALL = ["bench", "networks", "--batch", "2", "--size", "32", "--seconds", "0.01", "--models", "kanet_kv"]


@pytest.fixture(autouse=True)
def _torchvision():
    pytest.importorskip("torchvision", reason="torchvision is not installed")


def test_json_and_file(capsys, tmp_path):
    path = tmp_path / "speed.json"
    assert main([*SMALL, "--json", "--output", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(path.read_text())
    assert {(row["candidate"], row["work"], row["how"]) for row in found["rows"]} == {
        (network, work, "eager") for network in (BASE, "kanet_kv") for work in ("inference", "training")
    }
    for row in found["rows"]:
        assert row["time_ms"] > 0
        assert row["memory_bytes"] > 0
    training, inference = (
        next(r["memory_bytes"] for r in found["rows"] if r["work"] == work and r["candidate"] == BASE)
        for work in ("training", "inference")
    )
    assert training > inference  # it keeps what the backward pass needs
    assert found["environment"]["torch"]


def test_table(capsys):
    assert main([*SMALL, "--work", "inference", "--channels-last"]) == 0
    out = capsys.readouterr().out
    assert "channels_last" in out
    assert "kanet_kv" in out


def test_a_source_tree_that_fails_leaves_the_others(capsys, tmp_path):
    """In processes: an earlier tree, this package under another path, cannot build its network."""
    tree = tmp_path / "tree"
    (tree / "src").mkdir(parents=True)
    shutil.copytree(Path(kronattn.__file__).parent, tree / "src" / "kronattn", ignore=shutil.ignore_patterns("weights"))
    (tree / "src" / "kronattn" / "models" / "kanet.py").write_text("raise RuntimeError('an old\\nerror')")
    arguments = ["--work", "inference", "--against", str(tree), "--rounds", "2", "--json"]
    assert main([*SMALL, *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["candidate"] for row in rows] == [BASE, "kanet_kv", "kanet_kv (old)"]
    assert [row.get("failed", "") for row in rows] == ["", "", "RuntimeError: an old error"]
    assert all(len(row["rounds_ms"]) == 2 and row["memory_bytes"] > 0 for row in rows[:2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "kanet_zz"], "unknown network 'kanet_zz'"),
        (["--work", "guessing"], "--work must be inference or training"),
        (["--device", "abacus"], "device must be auto, cpu, cuda or mps"),
        (["--dtype", "float8"], "dtype must be one of"),
        (["--size", "16"], "32"),
        (["--how", "graphs"], "--how graphs is for CUDA devices"),
        (["--against", "no/such/tree"], "no/such/tree holds no kronattn"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert main([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
