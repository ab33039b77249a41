"""Which runs a study has, in which order, and what each trains."""

from dataclasses import replace
from pathlib import Path

import pytest

from kronattn.study.plan import CannotChoose, Run, choose_rate, fingerprint, plan_runs
from kronattn.study.stages import FINAL, SWEEP


def test_all_runs(study):
    runs = plan_runs(study)
    sweep = [run.key for run in runs if run.stage == SWEEP]
    assert sweep == [
        f"sounds/{layer}/sweep/lr{rate}/fold1/seed100"
        for layer in ("none", "global_mean", "kao")
        for rate in ("0.01", "0.1")
    ]
    finals = [run.key for run in runs if run.stage == FINAL]
    assert len(runs) == len(sweep) + 3 * 2 * 2
    # Stopped after a seed, all layers have it.
    assert finals[:3] == [f"sounds/{layer}/final/fold1/seed0" for layer in ("none", "global_mean", "kao")]


def test_several_seeds_may_choose(study):
    part = replace(study.parts[0], sweep_seeds="100-101")
    sweep = [run for run in plan_runs(replace(study, parts=[part])) if run.stage == SWEEP]
    assert [run.seed for run in sweep] == [100] * 6 + [101] * 6
    assert len({run.key for run in sweep}) == 12


def test_each_fold_chooses_for_itself(study):
    part = replace(study.parts[0], sweep_folds="each")
    runs = plan_runs(replace(study, parts=[part]))
    assert {run.fold for run in runs if run.stage == SWEEP} == {1, 2}
    final = next(run for run in runs if run.stage == FINAL and run.fold == 2)
    assert {run.fold for run in runs if run.stage == SWEEP and run.place == final.place} == {2}


def test_one_learning_rate_needs_no_sweep(study):
    part = replace(study.parts[0], learning_rates=[0.3])
    runs = plan_runs(replace(study, parts=[part]))
    assert {run.stage for run in runs} == {FINAL}
    assert choose_rate(runs[0], {}) == 0.3
    assert choose_rate(replace(runs[0], part=replace(part, learning_rates=[])), {}) is None


def test_some_layers_have_more_seeds(study):
    part = replace(study.parts[0], seeds_of={"kao": "0-3"})
    runs = [run for run in plan_runs(replace(study, parts=[part])) if run.stage == FINAL]
    assert sorted({run.seed for run in runs if run.layer.name == "kao"}) == [0, 1, 2, 3]
    assert sorted({run.seed for run in runs if run.layer.name == "none"}) == [0, 1]


def test_the_best_learning_rate_of_those_that_came_to_their_end(study):
    run = Run(study.parts[0], study.layers["none"], FINAL, 0, 1)
    assert choose_rate(run, {0.01: [0.5, 0.7], 0.1: [0.55]}) == 0.01
    assert choose_rate(run, {0.01: [], 0.1: [0.2]}) == 0.1
    # One of its runs failed: it is not to be trusted, however well the other did.
    assert choose_rate(run, {0.01: [0.5, 0.7], 0.1: [0.9]}) == 0.01
    assert choose_rate(run, {0.01: [0.5], 0.1: [0.9]}) == 0.1
    with pytest.raises(CannotChoose, match="no run came to its end with any learning rate of 0.01, 0.1"):
        choose_rate(run, {0.01: [], 0.1: []})


def test_what_is_trained(study):
    run = Run(study.parts[0], study.layers["kao"], FINAL, 3, 2)
    recipe = run.recipe(Path("data"), 0.1)
    assert (recipe.seed, recipe.optimiser.lr, recipe.data.images.fold) == (3, 0.1, 2)
    assert recipe.data.path == str(Path("data") / "sounds")
    assert recipe.model.all_options["context"] == "kao_qkv"
    assert recipe.model.all_options["context_options"] == {"num_heads": 2}
    assert run.options == {"figures_only": True, "test": "test"}
    assert Run(study.parts[0], study.layers["kao"], SWEEP, 100, 1, 0.1).options["test"] is None


def test_results_are_known_by_what_was_trained_not_by_where(study):
    run = Run(study.parts[0], study.layers["kao"], FINAL, 3, 2)
    here, there = (fingerprint(run.recipe(Path(place), 0.1)) for place in ("here", "there"))
    assert here == there
    assert here != fingerprint(run.recipe(Path("here"), 0.2))
