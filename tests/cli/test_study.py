"""``kronattn study`` as a command: what it writes, and what it refuses in one line."""

import json

import pytest

from kronattn.cli import main
from kronattn.training import workers
from tests.training.test_workers import fake_worker

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


def test_no_figure_of_nothing(study, tmp_path, capsys):
    assert main(["study", *study, "--figure", str(tmp_path / "gains.png")]) == 0
    assert "there is nothing yet to compare with none" in capsys.readouterr().err
    assert not (tmp_path / "gains.png").exists()


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_run_that_failed_is_told_and_is_the_exit_code(study, tmp_path, capsys, monkeypatch, quiet):
    script = """
import json, sys
for line in sys.stdin:
    folder = json.loads(line)["folder"]
    json.dump({"top1": 0.5, "test": {"top1": 0.5}}, open(folder + "/result.json", "w"))
    print(json.dumps({"failure": "out of paper" if "mean-final-seed1" in folder else ""}), flush=True)
"""
    monkeypatch.setattr(workers._Worker, "_start", fake_worker(script))
    monkeypatch.setattr("kronattn.study.run.check_data", lambda recipe, splits: None)  # digits have no test
    arguments = ["study", *study[:-2], "--folder", str(tmp_path / "runs"), *quiet]
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert "digits/global_mean/final/seed1 lr 0.1: out of paper" in told
    assert ("digits/none/final/seed1" in told) == (not quiet)
    assert "out of paper" in (tmp_path / "small.html").read_text()
    # What failed in another command is told by the tables alone.
    assert main(arguments) == 0


def test_what_was_prepared_as_json(tmp_path, capsys):
    (tmp_path / "data" / "sounds").mkdir(parents=True)
    (tmp_path / "data" / "sounds" / "a.txt").write_text("a")
    (tmp_path / "small.yaml").write_text(STUDY.replace('path: ""', "path: sounds"))
    arguments = ["study", str(tmp_path / "small.yaml"), "--data", str(tmp_path / "data")]
    assert main([*arguments, "--prepare", str(tmp_path / "small"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": [str(tmp_path / "small" / "sounds")]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--only", "digit"], "--only digit: did you mean 'digits'"),
        (["--data", "nowhere"], "--data nowhere is not a folder"),
        (["--from", "gone.json"], "there is no file gone.json of a study's results"),
        (["--figure", "gains.txt"], "--figure must end in"),
        (["-o", "small.html"], "--output must end in .json, got small.html"),
        (["-o", "same.json", "--page", "./same.json"], "--page same.json is where --output goes: give another file"),
        (["--page", "a.svg", "--figure", "a.svg"], "--figure a.svg is where --page goes: give another file"),
    ],
)
def test_bad_input(study, change, message, capsys):
    assert main(["study", *study, *change]) == 2
    assert message in capsys.readouterr().err


def test_a_study_that_is_not_there(study, capsys):
    assert main(["study", "contexts", *study[1:]]) == 2
    assert "there is no study contexts: did you mean" in capsys.readouterr().err
