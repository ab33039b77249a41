"""What a study's file holds of several machines."""

import json
from dataclasses import replace

import pytest

from kronattn.study.plan import Run
from kronattn.study.records import Records
from kronattn.study.stages import FINAL


def run_of(study, seed=0):
    return Run(study.parts[0], study.layers["none"], FINAL, seed, 1)


def test_costs_and_environments_of_several_files_are_kept(study, tmp_path):
    files = []
    for seed, device in enumerate(("cpu", "cuda")):
        records = Records(study, tmp_path / f"{device}.json")
        records.add(run_of(study, seed), "f", 0.1, {"top1": 0.5, "environment": {"device": device}})
        records.costs = {"sounds": {device: {"name": device}}}
        records.write()
        files.append(records.path)
    both = Records(study, tmp_path / "both.json", files)
    assert both.costs == {"sounds": {"cpu": {"name": "cpu"}, "cuda": {"name": "cuda"}}}
    devices = [both.environments[run["environment"]]["device"] for run in both.runs.values()]
    assert devices == ["cpu", "cuda"]


def test_costs_of_other_files_add_to_ones_own(study, tmp_path):
    own, other = Records(study, tmp_path / "own.json"), Records(study, tmp_path / "other.json")
    own.costs = {"sounds": {"cpu": {"name": "mine"}}}
    own.write()
    other.costs = {"sounds": {"cpu": {"name": "theirs"}, "cuda": {"name": "theirs"}}, "no part of it": {"cpu": {}}}
    other.write()
    found = Records(study, own.path, [other.path]).costs
    assert found == {"sounds": {"cpu": {"name": "mine"}, "cuda": {"name": "theirs"}}}


def test_a_run_that_came_to_its_end_counts_before_one_that_failed(study, tmp_path):
    good, bad = Records(study, tmp_path / "good.json"), Records(study, tmp_path / "bad.json")
    good.add(run_of(study), "f", 0.1, {"top1": 0.5})
    bad.add(run_of(study), "f", 0.1, None, failure="no memory")
    for order in ([good.path, bad.path], [bad.path, good.path]):
        (record,) = Records(study, tmp_path / "all.json", order).runs.values()
        assert (record["failure"], record["validation"]) == (None, 0.5)


def test_the_file_is_written_with_every_run(study, tmp_path):
    records = Records(study, tmp_path / "results.json")
    for seed in range(3):
        records.add(run_of(study, seed), "f", 0.1, {"top1": 0.5, "test": {"top1": 0.4}}, seconds=1.234)
        assert len(json.loads(records.path.read_text())["runs"]) == seed + 1
    assert records.get(run_of(study, 2))["test"] == 0.4


def test_the_file_of_another_study_is_not_written_over(study, tmp_path):
    other = Records(study, tmp_path / "other.json")
    other.write()
    before = other.path.read_text()
    message = r"other.json holds the study 'small': give another --output, or take runs over with --from .*other.json"
    with pytest.raises(ValueError, match=message):
        Records(replace(study, name="mine"), other.path)
    assert Records(replace(study, name="mine"), tmp_path / "mine.json", [other.path]).runs == {}
    assert other.path.read_text() == before


@pytest.mark.parametrize(
    "changes",
    [
        *({"runs": 5}, {"runs": ["a"]}, {"runs": [{}]}, {"environments": None}, {"environments": []}, {"costs": None}),
        *({"costs": {"sounds": 5}}, {"study": None}, {"environments": ["a"]}),
    ],
)
def test_what_is_not_whole_is_refused(study, tmp_path, changes):
    records = Records(study, tmp_path / "results.json")
    records.add(run_of(study), "f", 0.1, {"top1": 0.5})
    records.path.write_text(json.dumps(records.as_dict() | changes))
    for path, others in ((records.path, []), (tmp_path / "mine.json", [records.path])):
        with pytest.raises(ValueError, match="results.json does not hold a study's results: expected what"):
            Records(study, path, others)


@pytest.mark.parametrize(
    "changes", [{"environment": 9}, {"environment": "a"}, {"environment": -1}, {"lr": None}, {"failure": 5}]
)
def test_a_run_that_is_not_whole_is_refused(study, tmp_path, changes):
    records = Records(study, tmp_path / "results.json")
    records.add(run_of(study), "f", 0.1, {"top1": 0.5})
    whole = records.as_dict()["runs"][0]
    less = [{name: value for name, value in whole.items() if name != gone} for gone in ("key", "failure", "data")]
    for run in (whole | changes, *less):
        records.path.write_text(json.dumps(records.as_dict() | {"runs": [run]}))
        with pytest.raises(ValueError, match="results.json does not hold a study's results: expected what"):
            Records(study, records.path)


def test_of_another_study_those_runs_are_taken_that_this_one_plans(study, tmp_path):
    other = Records(study, tmp_path / "other.json")
    for seed in (0, 99):
        other.add(run_of(study, seed), "f", 0.1, {"top1": 0.5})
    assert list(Records(study, tmp_path / "mine.json", [other.path]).runs) == [run_of(study, 0).key]
    # In its own file it would be counted as if it were planned.
    with pytest.raises(ValueError, match="other.json holds 1 runs that the study does not plan now, such as .*seed99"):
        Records(study, other.path)
