"""The benchmark of runtimes: what it reports, never how fast anything is."""

from __future__ import annotations

import json

import pytest

from kronattn.bench import export
from kronattn.cli import main
from tests.trained import small_network

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

SMALL = ["bench", "export", "--size", "64", "--seconds", "0.01", "--models", "kanet_kv"]


def test_rows_and_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(export, "create_model", small_network)
    path = tmp_path / "latency.json"
    assert main([*SMALL, "--runtimes", "eager,onnxruntime", "--json", "--output", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(path.read_text())
    assert {(row["candidate"], row["how"]) for row in found["rows"]} == {
        (network, runtime) for network in ("mobilenetv2", "kanet_kv") for runtime in ("eager", "onnxruntime")
    }
    assert all(row["time_ms"] > 0 for row in found["rows"])
    assert found["base"] == export.BASE
    assert found["environment"]["onnxruntime"]


def test_table(monkeypatch, capsys):
    monkeypatch.setattr(export, "create_model", small_network)
    assert main([*SMALL, "--runtimes", "eager"]) == 0
    assert "÷ mobilenetv2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "kanet_zz"], "unknown network 'kanet_zz'"),
        (["--runtimes", "jax"], "--runtimes must be eager or compiled or onnxruntime"),
    ],
)
def test_bad_input(options, message, capsys):
    assert main([*SMALL, *options]) == 2
    assert message in capsys.readouterr().err
