"""What every sub-command has in common: short options, quiet, JSON, devices, names."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import kronattn
from kronattn.cli import main
from kronattn.models.registry import packaged_names
from tests.trained import photo, weights_file

COMMANDS = [
    *(
        ["train"],
        ["evaluate"],
        ["compare"],
        ["study"],
        ["predict"],
        ["explain"],
        ["export"],
        ["demo"],
        ["report"],
        ["theorem"],
    ),
    *(["tables", "operators"], ["tables", "networks"], ["tables", "segmentation"]),
    *(["bench", "operators"], ["bench", "networks"], ["bench", "heads"], ["bench", "loader"], ["bench", "export"]),
    *(["bench", "insert"], ["bench", "training"], ["bench", "show"]),
    *(["list", "models"], ["list", "recipes"], ["list", "weights"]),
]
LONG = [one for one in COMMANDS if one[0] not in ("demo", "explain", "list") and one[-1] != "show"]
ON_A_DEVICE = [
    *(
        ["train"],
        ["compare"],
        ["evaluate"],
        ["predict"],
        ["explain"],
        ["report"],
        ["tables", "operators"],
        ["tables", "segmentation"],
    ),
    *(["bench", "operators"], ["bench", "networks"], ["bench", "heads"]),
]


def help_of(command, capsys) -> str:
    assert main([*command, "-h"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_with_an_example(command, capsys):
    assert "Example: kronattn " + " ".join(command) in " ".join(help_of(command, capsys).split())


@pytest.mark.parametrize("command", LONG, ids=" ".join)
def test_what_takes_long_can_be_quiet(command, capsys):
    assert "--quiet" in help_of(command, capsys)


@pytest.mark.parametrize("command", ON_A_DEVICE, ids=" ".join)
def test_devices_have_the_same_names(command, capsys):
    text = " ".join(help_of(command, capsys).replace("│", " ").split())
    assert "--device" in text
    assert "auto, cpu, cuda" in text


@pytest.mark.parametrize("command", [["predict"], ["explain"], ["evaluate"], ["export"], ["demo"]], ids=" ".join)
def test_the_network_is_given_the_same_way(command, capsys):
    assert "--weights" in help_of(command, capsys)


def test_version_in_short(capsys):
    assert main(["-V"]) == 0
    assert capsys.readouterr().out == f"kronattn {kronattn.__version__}\n"


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "kronattn", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"kronattn {kronattn.__version__}\n")


def test_completion():
    asked = {"_KRONATTN_COMPLETE": "complete_bash", "COMP_WORDS": "kronattn li", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kronattn"], env={**os.environ, **asked}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["list"], done.stderr
    assert "--show-completion" in subprocess.run(
        [sys.executable, "-m", "kronattn", "-h"], capture_output=True, text=True
    ).stdout  # fmt: skip


def test_list_models(capsys):
    assert main(["list", "models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["models"]
    assert [one["name"] for one in found] == kronattn.list_models()
    assert {"name": "kanet_kv", "task": "classification", "weights": True} in found
    assert main(["list", "models", "--task", "segmentation"]) == 0
    out = capsys.readouterr().out
    assert "deeplabv2_kao_kv" in out
    assert "kanet_qkv" not in out


def test_list_recipes(capsys):
    from kronattn.training.recipe import load_recipe

    assert main(["list", "recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"]
    assert {"digits", "imagenette/kanet_kv", "camvid/deeplabv2_kao_kv"} <= {one["name"] for one in found}
    for one in found:
        assert load_recipe(one["name"])
        assert len(one["about"]) > 10, one["name"]


def test_list_weights(capsys):
    assert main(["list", "weights", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["weights"]
    assert [one["name"] for one in found] == packaged_names()
    assert found[0]["name"] == "kanet_kv"
    assert "church" in found[0]["classes"]
    assert main(["list", "weights"]) == 0
    assert "church" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--config", "digit"], "there is no recipe digit: did you mean 'digits'?"),
        (["train", "--config", "digits", "--model", "kanet_kvv"], "did you mean 'kanet_kv' or 'kanet_qkv'"),
        (["evaluate", "kanet_kw"], "kanet_kw is neither a file nor a network that comes with weights: did you mean"),
        (["evaluate"], "--weights is missing"),
        (["evaluate", "kanet_kv", "--weights", "kanet_qkv"], "give the network once"),
        (["evaluate", "kanet_kv", "--device", "abacus"], "device must be auto, cpu, cuda or mps, not 'abacus'"),
        (["export", "-w", "kanet_kv", "-o", "."], "is a folder; give the path of a file"),
        (["list", "modles"], "No such command 'modles'"),
        (["list", "models", "--task", "driving"], "task must be classification, segmentation, volumes, not 'driving'"),
        (["bench", "export", "--models", ","], "--models must name one at least, with commas between, not ','"),
        (["compare", "--config", "digits", "--models", ","], "--models must name one at least, with commas between"),
        (["compare", "--config", "digits", "--models", "kanet_kv", "--seeds", "0-"], "seeds are numbers and ranges"),
        (["compare", "--config", "digits", "--models", "kanet_kv", "devices=2"], "not devices 2 and nodes 1"),
        (
            ["compare", "--config", "imagenette/kanet_kv", "--models", "kanet_kv", "--data", "/nowhere"],
            "there is no folder or .tar archive '/nowhere'",
        ),
        (["bench", "operators", "--device", "tpu"], "device must be auto, cpu, cuda or mps"),
    ],
)
def test_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_train_into_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["train", "--config", "digits", "-o", str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err
    assert f"--output {tmp_path / 'file'} is a file; give the run's folder" in err
    assert err.count("\n") == 1


def test_a_run_s_folder_stands_for_its_weights(tmp_path, capsys):
    weights_file(tmp_path).rename(tmp_path / "weights.safetensors")
    image = photo(tmp_path / "a.png")
    assert main(["predict", str(image), "-w", str(tmp_path), "--device", "auto", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "kanet_kv"


def test_bench_operators_runs_on_what_is_there(capsys):
    assert main(["bench", "operators", "--seconds", "0.001", "--no-training", "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len({tuple(row["case"]["grid"]) for row in found["rows"]}) >= 2


def test_quiet_shows_no_bar(capsys, monkeypatch):
    from rich.console import Console

    from kronattn.cli import output

    monkeypatch.setattr(output, "_progress_console", Console(stderr=True, force_terminal=True))
    assert main(["tables", "networks", "--json"]) == 0
    assert "Counting" in capsys.readouterr().err
    assert main(["tables", "networks", "--json", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["table 2", "operators", "networks", "heads", "latency", "insert"])
def test_a_file_without_what_its_table_is_made_of(kind, tmp_path, capsys):
    found = {"kind": kind, "base": "copy", "settings": {}, "environment": {}, "command": ""}
    rows = [{"candidate": "with", "case": {"example": "z"}}]
    path = tmp_path / "cut.json"
    path.write_text(json.dumps({"schema": "kronattn.comparison/1", **found, "rows": rows}))
    assert main(["bench", "show", str(path)]) == 2
    assert f"{path} is not whole: " in capsys.readouterr().err
