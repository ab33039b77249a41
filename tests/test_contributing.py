"""The examples of CONTRIBUTING.md, run as they are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kronattn.cli import main
from kronattn.tables.operators.candidates import OPERATORS, Case
from kronattn.tables.operators.table import measure_operators, operator_tables
from kronattn.tasks import TASKS

CONTRIBUTING = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"


def example(section: str) -> str:
    """The Python of one section, all blocks together."""
    text = CONTRIBUTING.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def test_an_operator_of_every_table_is_a_line(capsys):
    try:
        exec(example("How to add an operator to the tables"), {})
        assert (
            main(["bench", "operators", "--operators", "copy,mean", "--shapes", "1x8x4x4", "--seconds", "0.001"]) == 0
        )
        assert "mean" in capsys.readouterr().out
        found = measure_operators([Case((6, 6))], seconds=0.01)
        assert "mean" in [row[0].text for table in operator_tables(found) for row in table.rows]
    finally:
        del OPERATORS["mean"]


@pytest.fixture
def grading(monkeypatch):
    monkeypatch.delitem(TASKS, "grading", raising=False)  # so that the fixture takes the line away again
    names = {"TASKS": TASKS}
    exec(example("How to add a task"), names)
    yield names["Grading"]
    del TASKS["grading"]


def test_a_task_is_a_file_and_a_line(grading, tmp_path, capsys):
    small = ["task=grading", "iterations=4", "model.options.width=0.25", "accelerator=cpu"]
    run = tmp_path / "run"
    assert main(["train", "--config", "digits", *small, "--output", str(run), "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert (trained["task"], "best_kappa" in trained) == ("grading", True)
    assert "| validation kappa |" in (run / "README.md").read_text()
    assert main(["evaluate", str(run), "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kappa"] == pytest.approx(trained["best_kappa"], abs=1e-5)
    assert main(["evaluate", str(run), "--device", "cpu"]) == 0
    assert "Top-5" in capsys.readouterr().out


def test_an_unknown_task_is_one_line(capsys):
    assert main(["train", "--config", "digits", "task=grading"]) == 2
    assert (
        "unknown task 'grading': known are classification, segmentation, spectrograms, volumes"
        in capsys.readouterr().err
    )
