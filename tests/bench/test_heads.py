"""The benchmark of segmentation heads: what it reports, on sizes that take no time. Never how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kronattn
from kronattn.cli import main

SMALL = ["bench", "heads", "--sizes", "17,33", "--channels", "16", "--classes", "3", "--seconds", "0.01"]


def test_json_file_and_figure(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path, figure = tmp_path / "heads.json", tmp_path / "heads.png"
    arguments = ["--work", "inference,training", "--batch", "2", "--json"]
    arguments += ["--output", str(path), "--figure", str(figure)]
    assert main([*SMALL, *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(path.read_text())
    names = ["aspp", "attn", "attn_fused", "kao_kv", "kao_qkv", "resize"]
    assert [(row["case"]["size"], row["work"], row["candidate"]) for row in found["rows"]] == [
        (size, work, name) for size in (17, 33) for work in ("inference", "training") for name in names
    ]
    assert {row["case"]["batch"] for row in found["rows"]} == {2}
    assert found["settings"] == {"dtype": "float32", "channels_last": False}
    assert figure.read_bytes()[1:4] == b"PNG"


def test_table(capsys):
    assert main([*SMALL, "--names", "attn,kao_kv"]) == 0
    out = capsys.readouterr().out
    for text in ("What the heads cost", "17²", "33²", "KAO_KV", "resize"):
        assert text in out
    assert "ASPP" not in out


@pytest.mark.slow
def test_this_tree_against_itself(capsys):
    """In processes: the head that materialises its coefficients is the base, and of this tree alone."""
    tree = Path(kronattn.__file__).parent.parent
    arguments = ["--names", "attn,kao_qkv", "--sizes", "17", "--work", "training", "--against", str(tree)]
    assert main([*SMALL, *arguments, "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    assert "kao_qkv (old)" in out
    assert "Left out" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--names", "psp"], "unknown head 'psp'"),
        (["--work", "guessing"], "--work must be inference or training"),
        (["--sizes", "big"], "sizes must be whole numbers from 1 up"),
        (["--dtype", "float8"], "dtype must be one of"),
        (["--memory-budget", "-1"], "--memory-budget must be positive"),
        (["--figure", "heads.pdf"], "--figure must end in .png or .svg"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert main([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
