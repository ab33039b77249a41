"""A study's file: what it says, what it takes from another, and what is said of mistakes in it."""

import pytest
import torch

from kronattn.models.files import build_model
from kronattn.study.settings import load_study
from kronattn.training.recipe import shipped

from .conftest import STUDY


def test_what_a_file_says(study):
    assert (study.title, list(study.layers), study.references) == (
        "Small",
        ["none", "global_mean", "kao"],
        ["none", "global_mean"],
    )
    assert study.layers["kao"].context == "kao_qkv"
    assert study.layers["kao"].options == {"num_heads": 2}
    (part,) = study.parts
    assert (part.score, part.task.label, part.label) == ("top1", "top-1", "sounds")
    assert part.base.optimiser.lr == 0.001


def test_another_study_is_extended(write_study, tmp_path):
    write_study()
    short = tmp_path / "short.yaml"
    short.write_text("extends: small.yaml\ntitle: Short\ndata: {sounds: {seeds: '7', settings: {epochs: 3}}}")
    found = load_study(short)
    assert (found.title, found.rules) == ("Short", ["All alike."])
    assert found.parts[0].seeds_for("none") == [7]
    assert found.parts[0].base.epochs == 3
    assert found.parts[0].folds == [1, 2]


def test_a_key_twice(write_study):
    with pytest.raises(ValueError, match="small.yaml is not YAML: key 'title' is there twice, again in line"):
        load_study(write_study(STUDY + "title: Again\n"))


def test_settings_name_their_data_set(write_study):
    (part,) = load_study(write_study(STUDY.replace("seeds: 0-1", "settings: {epochs: 0}"))).parts
    with pytest.raises(ValueError, match="data.sounds, its recipe and settings: epochs must be at least 1"):
        part.base  # noqa: B018


@pytest.mark.parametrize("here", [".", "./"])
def test_data_may_be_the_folder_itself(write_study, tmp_path, here):
    (part,) = load_study(write_study(STUDY.replace("path: sounds", f"path: {here}"))).parts
    assert part.sources(tmp_path) == [tmp_path]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rules: [All alike.]", "", "rules is missing: a study says its rules, its layers and its data"),
        ("title:", "titel:", "unknown key 'titel': did you mean 'title'"),
        ("path: sounds", "paht: sounds", "unknown key 'data.sounds.paht': did you mean 'path'"),
        ("path: sounds", "", "data.sounds.path is missing"),
        ("context: kao_qkv", "context: kao_qvk", "unknown context 'kao_qvk': did you mean 'kao_qkv'"),
        ("references: [none", "references: [nune", "references: 'nune' is not among layers: did you mean 'none'"),
        ("seeds: 0-1", "seeds: 0-200", "sweep_seeds: 100 is among its seeds: runs that choose cannot count"),
        ("seeds: 0-1", "layers: [non]", "data.sounds.layers: 'non' is not among layers: did you mean 'none'"),
        ("seeds: 0-1", "seeds_of: {kau: 0-9}", "seeds_of: kau is not among its layers: none, global_mean, kao"),
        ("title: Small", "title: 2026", "small.yaml: title must be text, not 2026$"),
        (
            "rules: [All alike.]",
            "rules: Alike",
            "small.yaml: rules must be a list of sentences, one at least, not 'Alike'",
        ),
        (
            "[All alike.]",
            "[All, alike: yes]",
            "small.yaml: rules, number 2, must be text, in quotes where it holds ': ', ",
        ),
        (
            "layers: {none:",
            "extends: small.yaml\nlayers: {none:",
            "extends must be another study's file, not small.yaml",
        ),
        ("layers: {none:", "layers: {5: , none:", "small.yaml: a name in layers must be text, not empty, not 5"),
        ("num_heads: 2}", "num_heads: 2}, size: 3", "small.yaml: layers.kao must be empty, or a context"),
        ("{num_heads: 2}", "two", "small.yaml: layers.kao must be empty, or a context"),
        ("context: kao_qkv,", "context: 5,", "small.yaml: layers.kao must be empty, or a context"),
        ("[none, global_mean]", "[]", "small.yaml: references must be a list of layers' names, one at least"),
        ("[none, global_mean]", "none", "small.yaml: references must be a list of layers' names, .* not 'none'"),
        ("[none, global_mean]", "", "small.yaml: references must be a list of layers' names, .* not null"),
        ("  sounds:\n", "  sounds: [5]\n  more:\n", r"small.yaml: data.sounds must be keys and values, not \[5\]"),
    ],
)
def test_mistakes(write_study, old, new, message):
    assert old in STUDY
    with pytest.raises(ValueError, match=message):
        load_study(write_study(STUDY.replace(old, new)))


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("recipe", ["5", "''", "", "[a]"]),
        ("path", ["5", "", "/abs", "[a]"]),
        ("layers", ["[]", "none", "5", "", "[none, none]", "{none: 1}", "[5]"]),
        ("title", ["5", "", "[a]"]),
        ("settings", ["5", "", "[a]", "epochs=1"]),
        ("seeds", ["0-", "-1", "3-1", "''", "x", "1.5", "true", "'0,0'", "[0, 1]", ""]),
        ("seeds_of", ["5", "", "none", "[none]", "{none: }", "{none: 0-}", "{none: [1]}"]),
        ("folds", ["5", "'12'", "", "[1, 1]", "['1']", "[1.5]", "[true]", "[-1]", "{1: 2}"]),
        ("learning_rates", ["0.1", "", "[.nan]", "[.inf]", "[-1.0]", "[0]", "[fast]", "[0.1, 1.0e-1]", "[true]"]),
        ("sweep_seeds", ["x", "1.5", "", "-5", "true", "[100]", "7,7"]),
        ("sweep_folds", ["5", "last", "", "[each]"]),
        ("prepared", ["5", "[1]", "[0, 0]", "[1.5, 2]", "[true, true]", "'12'", ""]),
        ("caveat", ["5", "", "[a]"]),
    ],
)
def test_a_value_of_another_kind_is_named_with_its_file_and_key(write_study, key, values):
    lines = [line for line in STUDY.splitlines() if not line.startswith(f"    {key}:")]
    for value in values:
        with pytest.raises(ValueError, match=rf"small.yaml: data.sounds.{key} must be .*, not "):
            load_study(write_study("\n".join([*lines, f"    {key}: {value}"])))


def test_what_a_data_set_may_say(write_study):
    more = "\n    prepared: []\n    sweep_seeds: 0,7-8\n    seeds_of: {kao: 6}\n"
    (part,) = load_study(write_study(STUDY.replace("[0.01, 0.1]", "[1e-3, 1]").replace("0-1", "5") + more)).parts
    assert (list(part.learning_rates), part.seeds_for("none"), part.seeds_for("kao")) == ([0.001, 1.0], [5], [6])
    assert part.seeds_that_choose == [0, 7, 8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: 5", "extends must be the path of another study's file, not 5"),
        ("extends: ", "extends must be the path of another study's file, not null"),
        ("extends: short.yaml", "extends must be another study's file, not short.yaml, which extends this one"),
        ("extends: small.yaml\ndata: [sounds]", r"data must be names, .*, not \['sounds'\]"),
        ("extends: small.yaml\ndata: ", "data must be names, .*, not null"),
        ("extends: small.yaml\ndata: {more: }", "data.more.recipe is missing"),
        ("extends: small.yaml\ndata: {sounds: abc}", "data.sounds must be keys and values, not 'abc'"),
        ("extends: bare.yaml\nrules: [a]\nlayers: {none: }", "data is missing"),
        ("extends: bare.yaml\nrules: [a]\nlayers: {none: }\ndata: {sounds: }", "data.sounds.recipe is missing"),
    ],
)
def test_mistakes_in_a_study_that_extends_another(write_study, tmp_path, text, message):
    write_study()
    (tmp_path / "bare.yaml").write_text("title: Bare")
    (tmp_path / "short.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"short.yaml: {message}"):
        load_study(tmp_path / "short.yaml")


def test_runs_have_one_device_each(write_study):
    study = load_study(write_study(STUDY + "    settings: {devices: 2}\n"))
    with pytest.raises(
        ValueError, match="data.sounds: runs of a study have one device each, not devices 2 and nodes 1"
    ):
        assert study.parts[0].base


def test_unknown_names(study):
    with pytest.raises(FileNotFoundError, match="there is no study contxt: did you mean 'context'"):
        load_study("contxt")
    with pytest.raises(ValueError, match="--only sound: did you mean 'sounds'"):
        study.chosen(["sound"])


@pytest.mark.parametrize("name", ["context", "context-short", "context-options", "options-short", "controls-short"])
def test_ours(name):
    """Every recipe is there, every layer builds in every network, and the rules of the issue are kept."""
    found = load_study(name)
    for part in found.parts:
        assert part.base.validate_every == part.base.epochs, "no epoch is to be picked"
        assert len(part.learning_rates) == 3
        if name == "context-short":
            continue  # the same networks
        for layer in part.layers:
            options = {"num_classes": 3, "context": found.layers[layer].context, **part.base.model.options}
            if found.layers[layer].options:
                options["context_options"] = found.layers[layer].options
            with torch.device("meta"):
                build_model(part.base.model.name, options)


def test_all_files_are_read():
    names = list(shipped("studies"))
    assert names
    for name in names:
        assert load_study(name).parts
