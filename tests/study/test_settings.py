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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rules: [All alike.]", "", "rules is missing: a study says its rules, its layers and its data"),
        ("title:", "titel:", "unknown key 'titel': did you mean 'title'"),
        ("path: sounds", "paht: sounds", "unknown key 'data.sounds.paht': did you mean 'path'"),
        ("path: sounds", "", "data.sounds.path is missing"),
        ("context: kao_qkv", "context: kao_qvk", "unknown context 'kao_qvk': did you mean 'kao_qkv'"),
        ("references: [none", "references: [nune", "references: 'nune' is not among layers: did you mean 'none'"),
        ("seeds: 0-1", "seeds: 0-200", "sweep_seed 100 is among its seeds: runs that choose cannot count"),
        ("seeds: 0-1", "layers: [non]", "data.sounds.layers: 'non' is not among layers: did you mean 'none'"),
        ("seeds: 0-1", "seeds_of: {kau: 0-9}", "seeds_of: kau is not among its layers: none, global_mean, kao"),
        ("[0.01, 0.1]", "[fast]", r"learning_rates must be numbers, not \['fast'\]"),
        ("[0.01, 0.1]", "[-1.0]", "learning_rates must be above 0"),
        ("sweep_folds: first", "sweep_folds: last", "sweep_folds must be 'each' or 'first', not 'last'"),
    ],
)
def test_mistakes(write_study, old, new, message):
    assert old in STUDY
    with pytest.raises(ValueError, match=message):
        load_study(write_study(STUDY.replace(old, new)))


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
