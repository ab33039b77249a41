"""Doing a study: what waits for what, going on, failures, and time that runs out."""

import json
import math
import threading
import time
from dataclasses import replace

import pytest

from kronattn.study.plan import fingerprint, plan_runs
from kronattn.study.records import Records
from kronattn.study.run import StudyQueue, run_study
from kronattn.study.settings import load_study
from kronattn.study.stages import FINAL, SWEEP
from kronattn.study.summary import summarise_study
from kronattn.training.folder import read_result

from .conftest import STUDY, write_sounds


def run_all(study, tmp_path, name="results.json", **options):
    if options.pop("has_data", True):
        write_sounds(tmp_path)
    records = Records(study, tmp_path / name, options.pop("others", ()))
    order = []
    missing = run_study(
        study,
        tmp_path / "data",
        records,
        tmp_path / "runs",
        on_run=lambda progress: order.append(progress.run),
        **options,
    )
    return records, order, missing


def test_a_whole_study(study, tmp_path, fake_workers):
    records, order, missing = run_all(study, tmp_path, jobs=2)
    assert (len(order), missing) == (18, 0)
    finals = [run for run in records.runs.values() if run["stage"] == FINAL]
    assert {run["lr"] for run in finals} == {0.1}
    assert all(run["test"] == pytest.approx(run["validation"] - 0.2) for run in finals)
    assert all(run["test"] is None for run in records.runs.values() if run["stage"] == SWEEP)
    (part,) = summarise_study(json.loads((tmp_path / "results.json").read_text()))
    gain = next(entry for entry in part["layers"] if entry["layer"] == "global_mean")["differences"]["none"]
    assert (gain["mean"], gain["pairs"]) == (pytest.approx(0.0995), 2)


def test_data_that_is_not_there_is_said_once(study, tmp_path, fake_workers):
    with pytest.raises(FileNotFoundError, match=r"there is no .*data.sounds for data\.sounds$"):
        run_all(study, tmp_path, has_data=False)
    assert not (tmp_path / "results.json").exists()
    # To look at what is there takes no data.
    assert run_all(study, tmp_path, has_data=False, minutes=0)[1] == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("folds: [1, 2]", "folds: [1, 9]", "data.sounds: .*9"),
        ("path: sounds", "path: gone", "there is no .*gone for data.sounds"),
    ],
)
def test_a_part_that_is_not_there_is_said_before_any_run(write_study, tmp_path, fake_workers, old, new, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_all(load_study(write_study(STUDY.replace(old, new))), tmp_path)
    assert not (tmp_path / "runs").exists()


def test_a_layer_s_options_are_tried_before_any_run(write_study, tmp_path, fake_workers):
    study = load_study(write_study(STUDY.replace("{num_heads: 2}", "{num_head: 2}")))
    with pytest.raises(ValueError, match="data.sounds with layers.kao: .*unexpected keyword argument 'num_head'"):
        run_all(study, tmp_path)
    assert not (tmp_path / "results.json").exists()


def test_a_sweep_that_came_to_its_end_at_last_chooses_again(study, tmp_path, fake_workers):
    """And runs that count have what it chose: only those of its layer, and only where that is another rate."""
    records, *_ = run_all(study, tmp_path)
    for run in records.runs.values():
        if run["stage"] == SWEEP and run["lr"] == 0.1 and run["layer"] == "none":
            run["failure"] = "its process was killed"
    finals = [run for run in plan_runs(study) if run.stage == FINAL and run.layer.name == "none"]
    for run in finals:
        records.runs[run.key].update(lr=0.01, fingerprint=fingerprint(run.recipe(tmp_path / "data", 0.01)))
    # A sweep that fails as before, or chooses as before.
    for run in records.runs.values():
        if run["stage"] == SWEEP and run["lr"] == 0.01 and run["layer"] == "kao":
            run["failure"] = "its process was killed"
    before = {run.key: records.runs[run.key]["test"] for run in plan_runs(study) if run.layer.name == "kao"}
    records.write()
    records, order, missing = run_all(study, tmp_path, retry=True)
    assert [run.key for run in order if run.stage == SWEEP] == [
        run.key for run in plan_runs(study) if run.stage == SWEEP and (run.layer.name, run.rate) in SWEPT_AGAIN
    ]
    assert {records.runs[run.key]["lr"] for run in finals} == {0.1}
    assert {key: records.runs[key]["test"] for key in before} == before
    assert missing == 0
    assert run_all(study, tmp_path)[1] == []
    # As a --retry leaves it that was stopped after the sweep.
    records.runs[finals[0].key].update(lr=0.01, fingerprint=fingerprint(finals[0].recipe(tmp_path / "data", 0.01)))
    records.write()
    with pytest.raises(ValueError, match="but its sweep chooses 0.1: --retry does it again"):
        run_all(study, tmp_path)
    assert run_all(study, tmp_path, retry=True)[1] == [finals[0]]


SWEPT_AGAIN = [("none", 0.1), ("kao", 0.01)]


@pytest.mark.parametrize("changes", [{"seeds": "1"}, {"learning_rates": [0.1]}, {"folds": [1]}])
def test_a_file_with_runs_that_are_not_planned_any_more(study, tmp_path, fake_workers, changes):
    run_all(study, tmp_path)
    before = (tmp_path / "results.json").read_text()
    changed = replace(study, parts=[replace(study.parts[0], **changes)])
    with pytest.raises(
        ValueError, match=r"results.json holds \d+ runs that the study does not plan now, such as sounds"
    ):
        run_all(changed, tmp_path)
    assert (tmp_path / "results.json").read_text() == before
    run_all(changed, tmp_path, "new.json", others=[tmp_path / "results.json"])


def test_what_cannot_be_chosen_is_told(write_study, tmp_path, fake_workers):
    study = load_study(write_study(STUDY.replace("[0.01, 0.1]", "[9, 10]")))
    assert len(run_all(study, tmp_path)[1]) == 18


@pytest.mark.parametrize("score", [math.nan, None])
def test_a_score_that_is_no_number_is_a_failure(study, tmp_path, fake_workers, monkeypatch, score):
    monkeypatch.setattr("kronattn.study.run.read_result", lambda folder: read_result(folder) | {"top1": score})
    records, *_ = run_all(study, tmp_path)
    first = next(iter(records.runs.values()))
    assert first["failure"] == "its validation top1 is no number"
    assert all(run["failure"] for run in records.runs.values())
    assert Records(study, tmp_path / "results.json").runs.keys() == records.runs.keys()


def test_it_goes_on_where_it_was(study, tmp_path, fake_workers):
    records, order, _ = run_all(study, tmp_path)
    last = order[-1].key
    del records.runs[last]
    records.write()
    again, order, missing = run_all(study, tmp_path)
    assert [run.key for run in order] == [last]
    assert missing == 0
    assert again.runs.keys() == records.runs.keys() | {last}


def test_runs_of_another_file_are_taken_over(study, tmp_path, fake_workers):
    records, order, _ = run_all(study, tmp_path)
    first = order[0].key
    for key in list(records.runs):
        if key != first:
            del records.runs[key]
    records.write()
    _, order, _ = run_all(study, tmp_path, "others.json", others=[tmp_path / "results.json"])
    assert len(order) == 17
    assert first not in [run.key for run in order]


def test_results_of_other_settings_are_not_mixed_in(study, tmp_path, fake_workers):
    run_all(study, tmp_path)
    changed = replace(study, parts=[replace(study.parts[0], settings={"epochs": 5})])
    with pytest.raises(ValueError, match="results.json holds sounds/none/sweep/.* with other settings"):
        run_all(changed, tmp_path)


def test_what_failed_is_kept_and_can_be_tried_again(write_study, tmp_path, fake_workers):
    study = load_study(write_study(STUDY.replace("[0.01, 0.1]", "[0.01, 9]")))
    records, _, missing = run_all(study, tmp_path)
    assert missing == 0
    failed = [run for run in records.runs.values() if run["failure"]]
    assert [run["stage"] for run in failed] == [SWEEP] * 3
    assert failed[0]["failure"] == "the loss became NaN"
    assert {run["lr"] for run in records.runs.values() if run["stage"] == FINAL} == {0.01}
    assert run_all(study, tmp_path)[1] == []
    assert len(run_all(study, tmp_path, retry=True)[1]) == 3


def test_nothing_to_choose_from(write_study, tmp_path, fake_workers):
    study = load_study(write_study(STUDY.replace("[0.01, 0.1]", "[9, 10]")))
    records, _, missing = run_all(study, tmp_path, jobs=2)
    assert missing == 0
    finals = [run for run in records.runs.values() if run["stage"] == FINAL]
    assert len(finals) == 12
    assert all("no run came to its end with any learning rate" in run["failure"] for run in finals)


def test_no_time(study, tmp_path, fake_workers):
    records, order, missing = run_all(study, tmp_path, minutes=0)
    assert (order, missing, records.runs) == ([], 18, {})


@pytest.fixture
def queue(study, tmp_path):
    def make(runs=None, **options):
        records = Records(study, tmp_path / "queue.json")
        return StudyQueue(plan_runs(study) if runs is None else runs, records, tmp_path, tmp_path, **options)

    return make


def test_runs_that_count_wait_for_those_that_choose(study, queue):
    runs = [run for run in plan_runs(study) if run.layer.name == "none"]
    waiting = queue(runs)
    first, second = waiting.take(set()), waiting.take(set())
    assert {first.run.rate, second.run.rate} == {0.01, 0.1}
    for one, score in ((first, 0.9), (second, 0.5)):
        waiting.records.add(one.run, "", one.run.rate, {"top1": score})
    waiting.finish(first)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(waiting.take(set())))
    thread.start()
    thread.join(0.05)
    assert taken == []
    waiting.finish(second)
    thread.join(10)
    assert (taken[0].run.stage, taken[0].recipe.optimiser.lr) == (FINAL, first.run.rate)


def test_a_process_keeps_to_what_it_knows(queue):
    assert queue().take({"sounds, kao"}).run.layer.name == "kao"


def test_a_run_that_would_end_too_late_is_not_begun(queue):
    late = queue(deadline=time.monotonic() + 60)
    one = late.take(set())
    late._seconds[("sounds", one.run.layer.name)] = [100.0]
    assert late.take(set()) is None
    late.finish(one)


def test_a_layer_that_takes_long_does_not_end_the_others(queue):
    late = queue(deadline=time.monotonic() + 60)
    late._seconds.update({("sounds", "none"): [100.0], ("sounds", "kao"): [1.0]})
    assert late.take(set()).run.layer.name == "kao"


def test_a_file_that_is_no_study(study, tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="other.json does not hold a study's results"):
        Records(study, tmp_path / "other.json")
    with pytest.raises(FileNotFoundError, match="there is no file .*gone.json of a study's results"):
        Records(study, tmp_path / "new.json", [tmp_path / "gone.json"])
