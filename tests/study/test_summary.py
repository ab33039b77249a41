"""From runs to what they say, in figures, words, tables and a page."""

import copy

import pytest

from kronattn.study.figures import draw_costs, draw_gains, draw_worth
from kronattn.study.page import study_page
from kronattn.study.summary import summarise_study
from kronattn.study.tables import cost_table, overview_table, part_table, sweep_table
from kronattn.study.words import advice, findings

SCORES = {
    "none": [0.50, 0.51, 0.49, 0.50, 0.52],
    "global_mean": [0.60, 0.61, 0.59, 0.60, 0.625],
    "kao_kv": [0.601, 0.60, 0.60, 0.59, 0.62],
}


def record(layer, seed, test, stage="final", **more):
    return {
        "key": f"fronts/{layer}/{stage}/seed{seed}",
        "data": "fronts",
        "layer": layer,
        "stage": stage,
        "seed": seed,
        "fold": None,
        "lr": 0.1,
        "validation": test + 0.01,
        "test": test if stage == "final" else None,
        "parameters": 10,
        "madd": 2000,
        "peak_bytes": None,
        "seconds": 3.0,
        "failure": None,
        "environment": 0,
        **more,
    }


def study(scores=SCORES, folds=()):
    return {
        "study": {
            "title": "Fronts <and> backs",
            "rules": ["All alike."],
            "references": ["none", "global_mean"],
            "data": [
                {
                    "name": "fronts",
                    "title": "House fronts",
                    "caveat": "",
                    "layers": list(scores),
                    "score": "mean_iou",
                    "score_label": "mean IoU",
                    "folds": list(folds),
                    "planned": 15,
                }
            ],
        },
        "runs": [record(layer, seed, x) for layer, values in scores.items() for seed, x in enumerate(values)],
        "costs": {},
        "environments": [{"device": "paper"}],
    }


def layer_of(found, name):
    return next(entry for entry in summarise_study(found)[0]["layers"] if entry["layer"] == name)


def test_differences_are_paired_and_corrected():
    (part,) = summarise_study(study())
    assert part["comparisons"] == 3  # of three layers, each pair once
    gain = layer_of(study(), "global_mean")["differences"]["none"]
    assert gain["mean"] == pytest.approx(0.101)
    assert gain["verdict"] == "better"
    assert gain["p"] < gain["p_holm"] <= 3 * gain["p"]
    assert layer_of(study(), "kao_kv")["differences"]["global_mean"]["verdict"] == "no difference shown"
    assert layer_of(study(), "none")["differences"]["global_mean"]["verdict"] == "worse"


def test_an_interval_that_does_not_survive_the_correction_is_a_maybe():
    scores = {"none": [0.5, 0.5, 0.5, 0.5], "kao_kv": [0.51, 0.53, 0.54, 0.54]}
    scores |= {f"other{n}": [0.5, 0.51, 0.49, 0.5] for n in range(4)}
    gain = layer_of(study(scores), "kao_kv")["differences"]["none"]
    assert (gain["p"] < 0.05 < gain["p_holm"], gain["verdict"]) == (True, "maybe better")


def test_seeds_of_one_fold_are_one_pair():
    found = study({"none": [0.5, 0.5, 0.6, 0.6], "kao_kv": [0.6, 0.7, 0.7, 0.8]}, folds=[1, 2])
    for run in found["runs"]:
        run["fold"], run["seed"] = run["seed"] // 2 + 1, run["seed"] % 2
    gain = layer_of(found, "kao_kv")["differences"]["none"]
    assert (gain["pairs"], gain["mean"]) == (2, pytest.approx(0.15))
    assert summarise_study(found)[0]["paired_by"] == "fold"


def test_failures_are_in_the_table_and_not_in_the_means():
    found = study()
    found["runs"][0] |= {"failure": "the loss became NaN", "test": None, "validation": None}
    entry = layer_of(found, "none")
    assert (entry["runs"], len(entry["failures"])) == (4, 1)
    assert layer_of(found, "kao_kv")["differences"]["none"]["pairs"] == 4
    table = part_table(summarise_study(found)[0])
    assert table.groups[0].rows[0][1].text == "4 (1 failed)"
    assert any("the loss became NaN" in note for note in table.notes)


def test_all_data_sets_in_one_table():
    (part,) = summarise_study(study())
    rows = overview_table([part, {**part, "layers": part["layers"][:2]}]).groups[0].rows
    assert [row[0].text for row in rows] == [entry["layer"] for entry in part["layers"] if entry["layer"] != "none"]
    assert rows[0][1].text == part_table(part).groups[0].rows[1][3].text.split(" (")[0]
    assert [cell.text == "–" for cell in rows[-1][1:]] == [False, True]


def test_what_layers_cost():
    (part,) = summarise_study(study())
    # The lowest learning rate and the count of study(), the times of COSTS.
    table = cost_table(part, COSTS)
    assert [cell.text for cell in table.rows[1]] == ["global_mean", "0.1", "0.0m", "20"]
    assert table.notes[0] == "paper, 2 threads: one image."
    assert [column.title for column in cost_table(part, {}).columns] == ["Layer", "Learning rate", "MAdd"]


def test_a_data_set_without_any_that_others_are_compared_with():
    found = study()
    found["study"]["references"] = ["identity"]
    (part,) = summarise_study(found)
    assert "nothing can be said of them" in advice(part)
    # Beside one that has such layers.
    other = study()["study"]["data"][0] | {"layers": ["kao_kv"], "name": "more"}
    found = study()
    found["study"]["data"].append(other)
    found["runs"] += [run | {"data": "more"} for run in found["runs"] if run["layer"] == "kao_kv"]
    assert "nothing can be said of them" in study_page(found)


def test_an_interval_stays_in_one_piece():
    (part,) = summarise_study(study())
    gain, interval = part_table(part).rows[1][3].text.split(" ")
    assert gain == "+10.10‡"
    assert interval.replace("\N{NO-BREAK SPACE}", " ").startswith("(+9.8")


def test_missing_runs_are_said():
    found = study()
    found["runs"].pop()
    assert "1 of 15 planned runs are missing." in part_table(summarise_study(found)[0]).notes


def test_words():
    (part,) = summarise_study(study())
    assert advice(part) == "A mean is enough here: it helps, and nothing was shown to be better than it."
    over_none, over_mean = findings(part)
    assert over_none.startswith("Over none: global_mean and kao_kv are better")
    assert "no difference was shown" in over_mean
    better = copy.deepcopy(SCORES) | {"kao_kv": [x + 0.2 for x in SCORES["none"]]}
    assert (
        advice(summarise_study(study(better))[0]) == "kao_kv is worth it: better than nothing and better than a mean."
    )
    regular = copy.deepcopy(SCORES) | {"attention": [x + 0.2 for x in SCORES["none"]]}
    said = "global_mean, kao_kv and attention help. Only attention was shown to be better than a mean."
    assert advice(summarise_study(study(regular))[0]) == said
    regular["kao_kv"] = SCORES["none"]
    assert advice(summarise_study(study(regular))[0]).startswith("Regular attention is worth its price here")
    nothing = dict.fromkeys(SCORES, SCORES["none"])
    assert advice(summarise_study(study(nothing))[0]).startswith("No context layer was shown to help here")
    assert advice(summarise_study(study() | {"runs": []})[0]) == "Not measured yet."
    assert advice({**part, "caveat": "Not decided."}) == "Not decided."


def test_the_sweep():
    found = study()
    assert sweep_table(summarise_study(found)[0]) is None
    found["runs"] += [
        record("none", 100, 0.4, "sweep", lr=0.01),
        record("none", 100, 0.3, "sweep", lr=0.1, failure="the loss became NaN"),
    ]
    table = sweep_table(summarise_study(found)[0])
    assert [cell.text for cell in table.groups[0].rows[0]] == ["none", "41.00", "failed"]
    assert table.notes == []
    found["runs"] += [
        record("none", 101, 0.6, "sweep", lr=0.01),
        record("none", 101, 0.3, "sweep", lr=0.1),
    ]
    table = sweep_table(summarise_study(found)[0])
    assert [cell.text for cell in table.groups[0].rows[0]] == ["none", "51.00", "31.00, 1 failed"]
    assert table.notes == ["The mean over 2 runs."]


COSTS = {
    "fronts": {
        "cpu": {
            "name": "paper, 2 threads",
            "how": "one image",
            "layers": {name: {"seconds": 0.01 * (at + 1), "peak_bytes": 100 + at} for at, name in enumerate(SCORES)},
        }
    }
}


def test_figures():
    summary = summarise_study(study())
    gains = draw_gains(summary, ["none", "global_mean"])
    assert [axis.get_title() for axis in gains.axes] == [
        "House fronts\nover none",
        "House fronts\nover global_mean",
    ]
    assert [text.get_text() for text in gains.legends[0].texts] == [
        "better", "maybe better", "no difference shown", "worse", "maybe worse",
    ]  # fmt: skip
    single = draw_gains(summary, ["none"])
    single.draw_without_rendering()
    box = single.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= single.bbox.x1
    assert draw_costs(summary, {}, "none") is None
    costs = draw_costs(summary, COSTS, "none")
    assert {text.get_text() for text in costs.legends[0].texts} == {"global_mean", "kao_kv"}


PRICE = "network's, divided by that with none"


def test_what_layers_are_worth():
    (part,) = summarise_study(study())
    figure = draw_worth([(part, COSTS), (part | {"title": "Backs"}, {})], "global_mean", "none")
    sides = ["left", "right", "right"] * 2
    titles = [axis.get_title(side) for axis, side in zip(figure.axes, sides, strict=True)]
    assert titles == [
        "House fronts: over none", "over global_mean", "price", "Backs: over none", "over global_mean", "price",
    ]  # fmt: skip
    assert [axis.get_xlabel() for axis in figure.axes] == ["", "", "", *2 * ["test score, points"], PRICE]
    (line, memory), names = figure.axes[2].lines[:2], [entry["layer"] for entry in part["layers"]]
    # The first layer is at the top, and stands for nothing: its price is one.
    assert list(line.get_xdata()) == [len(names) - at for at in range(len(names))]
    assert memory.get_xdata()[-1] == 1
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == names[::-1]
    some = draw_worth([(part, COSTS)], "global_mean", "none", {"kao_kv"})
    assert [text.get_text() for text in some.axes[0].get_yticklabels()] == ["kao_kv"]
    assert list(some.axes[2].lines[0].get_xdata()) == [line.get_xdata()[0]]
    assert some.get_figheight() < figure.get_figheight() / 2


def test_the_page():
    page = study_page(study() | {"costs": COSTS})
    assert "Fronts &lt;and&gt; backs" in page
    assert page.count("<img ") == 2
    assert "paper, 2 threads" in page
    assert "http" not in page
    assert "Not measured yet." in study_page(study() | {"runs": []})


def test_runs_of_layers_that_a_study_does_not_have_are_not_counted():
    found = study()
    found["runs"].append({**found["runs"][0], "layer": "another"})
    assert summarise_study(found)[0]["runs"] == summarise_study(study())[0]["runs"]


def test_advice_and_overview_go_by_the_first_reference():
    found = study() | {"study": {**study()["study"], "references": ["kao_kv", "none"]}}
    (part,) = summarise_study(found)
    assert advice(part) == "Nothing was shown to be better than kao_kv here."
    better = copy.deepcopy(SCORES) | {"global_mean": [x + 0.2 for x in SCORES["kao_kv"]]}
    found = study(better) | {"study": {**study()["study"], "references": ["kao_kv", "none"]}}
    assert advice(summarise_study(found)[0]) == "global_mean is better than kao_kv here."
    assert overview_table([part]).notes[0].startswith("Points over kao_kv.")
    both = overview_table([part, summarise_study(study())[0]])
    assert [column.title for column in both.columns[1:]] == ["House fronts: over kao_kv", "House fronts: over none"]
