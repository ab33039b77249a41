"""``kronattn tables operators``."""

from __future__ import annotations

import json
import os

import pytest
import torch

from kronattn.cli import main


def test_tables_and_figure(capsys, tmp_path):
    target = tmp_path / "new" / "operators.svg"
    assert main(["tables", "operators", "--quick", "--output", str(target)]) == 0
    out = capsys.readouterr().out
    for text in (
        "Table 2",
        "8×28²×8",
        "8×4×8×8×8",
        "KAO_QKV",
        "14,336",
        "97.71%",
        "40.9×",
        f"torch {torch.__version__}",
    ):
        assert text in out
    assert b"<svg" in target.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["operators.svg"]


def test_json_is_all_there_is_on_standard_output(capsys, tmp_path):
    assert main(["tables", "operators", "--quick", "--json", "--output", str(tmp_path / "figure.png")]) == 0
    payload = json.loads(capsys.readouterr().out)
    operators = ["attn", "attn_pool", "attn_fused", "kao_kv", "kao_qkv", "kao_qkv_as_printed"]
    assert [row["candidate"] for row in payload["rows"]] == operators * 3
    assert payload["rows"][3]["madd"] == 89_600
    assert payload["environment"]["dtype"] == "float32"


def test_dtype_reaches_the_measurement(capsys):
    assert main(["tables", "operators", "--quick", "--json", "--dtype", "float64"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["environment"]["dtype"] == "float64"
    assert payload["rows"][0]["memory_bytes"] == 2 * 8 * 196 * 196 * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "abacus"], "device must be auto, cpu, cuda or mps, not 'abacus'"),
        (["--device", "cuda:77"], "'cuda:77' is not there"),
        (["--dtype", "int8"], "dtype must be one of float32, float16, bfloat16, float64, not 'int8'"),
        (["--memory-budget", "-1"], "--memory-budget must be positive"),
        (["--memory-budget", "nan"], "--memory-budget must be positive"),
        (["--output", "figure.pdf"], "--output must end in .png or .svg"),
        (["--frobnicate"], "frobnicate"),
    ],
)
def test_bad_input_is_one_line_before_any_work(arguments, message, capsys, monkeypatch):
    from kronattn.tables.operators import table

    monkeypatch.setattr(table, "compare", lambda *_, **__: pytest.fail("work was started"))
    assert main(["tables", "operators", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_output_in_a_file_instead_of_a_folder(capsys, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    assert main(["tables", "operators", "--quick", "--output", str(blocked / "figure.png")]) == 2
    assert str(blocked) in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder(capsys, tmp_path):
    tmp_path.chmod(0o500)
    assert main(["tables", "operators", "--quick", "--output", str(tmp_path / "figure.png")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_help_has_an_example(capsys):
    assert main(["tables", "operators", "--help"]) == 0
    assert "kronattn tables operators --output" in capsys.readouterr().out
