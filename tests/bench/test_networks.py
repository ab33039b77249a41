"""The benchmark of networks: what it reports, on sizes that take no time. Never how fast anything is."""

from __future__ import annotations

import json

import pytest

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
    assert {(row["network"], row["work"], row["how"]) for row in found["rows"]} == {
        (network, work, "eager") for network in (BASE, "kanet_kv") for work in ("inference", "training")
    }
    for row in found["rows"]:
        assert row["images_per_second"] > 0
        assert row["peak_bytes"] > 0
        if row["network"] == BASE:
            assert row["ratio"] == 1
    training, inference = (
        next(r["peak_bytes"] for r in found["rows"] if r["work"] == work and r["network"] == BASE)
        for work in ("training", "inference")
    )
    assert training > inference  # it keeps what the backward pass needs
    assert found["environment"]["torch"]


def test_table(capsys):
    assert main([*SMALL, "--work", "inference", "--channels-last"]) == 0
    out = capsys.readouterr().out
    assert "channels_last" in out
    assert "kanet_kv" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "kanet_zz"], "unknown network 'kanet_zz'"),
        (["--work", "guessing"], "--work must be inference or training"),
        (["--device", "abacus"], "device must be auto, cpu, cuda or mps"),
        (["--dtype", "float8"], "dtype must be one of"),
        (["--size", "16"], "32"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert main([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
