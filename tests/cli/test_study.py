"""``kronattn study`` as a command: what it writes, and what it refuses in one line."""

import json

import pytest

from kronattn.cli import main

STUDY = """
title: Digits
rules: [All alike.]
layers: {none: , global_mean: }
data: {digits: {recipe: digits, path: "", seeds: 0-1, learning_rates: [0.1]}}
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(STUDY)
    return [str(path), "--data", str(tmp_path), "--output", str(tmp_path / "small.json"), "--minutes", "0"]


def test_a_page_of_what_is_there(study, tmp_path, capsys):
    assert main(["study", *study, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["missing"], found["summary"][0]["planned"]) == (4, 4)
    assert json.loads((tmp_path / "small.json").read_text())["runs"] == []
    assert "Not measured yet." in (tmp_path / "small.html").read_text()
    assert main(["study", *study]) == 0
    assert "4 runs are still to be done" in capsys.readouterr().out


def test_costs_on_this_machine(study, tmp_path, capsys):
    assert main(["study", *study, "--cost", "--json"]) == 0
    costs = json.loads((tmp_path / "small.json").read_text())["costs"]["digits"]
    (measured,) = costs.values()
    assert set(measured["layers"]) == {"none", "global_mean"}
    assert all(cost["seconds"] > 0 and cost["peak_bytes"] > 0 for cost in measured["layers"].values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--only", "digit"], "--only digit: did you mean 'digits'"),
        (["--data", "nowhere"], "--data nowhere is not a folder"),
        (["--from", "gone.json"], "there is no file gone.json of a study's results"),
        (["--figure", "gains.txt"], "--figure must end in"),
    ],
)
def test_bad_input(study, change, message, capsys):
    assert main(["study", *study, *change]) == 2
    assert message in capsys.readouterr().err


def test_a_study_that_is_not_there(study, capsys):
    assert main(["study", "contexts", *study[1:]]) == 2
    assert "there is no study contexts: did you mean" in capsys.readouterr().err
