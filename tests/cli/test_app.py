"""The command itself: its help, its version, and what happens to errors."""

from __future__ import annotations

import pytest

import kronattn
from kronattn.cli import main


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kronattn {kronattn.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["tables"], ["bench"]])
def test_without_a_sub_command_it_prints_help(arguments, capsys):
    main(arguments)
    captured = capsys.readouterr()
    assert "Usage: kronattn" in captured.out + captured.err
    assert "error" not in captured.err


def test_ctrl_c_is_one_line(capsys, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("kronattn.study.settings.load_study", interrupted)
    assert main(["study", "context", "--data", "."]) == 130
    assert capsys.readouterr().err == "kronattn: error: interrupted\n"


@pytest.mark.parametrize("arguments", [["tabels"], ["tables", "operatrs"], ["theorem", "--hieght", "3"]])
def test_misspelt(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kronattn: error: No such ")
    assert captured.err.count("\n") == 1
