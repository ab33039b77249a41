"""``tools/package_weights.py``: from a run's folder to the package's files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from kronattn.models.files import load_model, read_weights
from kronattn.training.recipe import load_recipe, recipe_yaml
from tests.trained import weights_file

TOOL = Path(__file__).resolve().parent.parent / "tools" / "package_weights.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("package_weights", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    weights_file(folder, "kanet_qkv").rename(folder / "weights.safetensors")
    (folder / "config.yaml").write_text(recipe_yaml(load_recipe("imagenette/kanet_qkv")))
    result = {"top1": 0.9, "parameters": 3, "size": 64, "madd": 5, "epochs": 60, "best_epoch": 55, "seed": 0}
    (folder / "result.json").write_text(json.dumps(result | {"environment": {"torch": "2.15.0"}}))
    return folder


@pytest.fixture
def package(tmp_path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    for name in ("kanet_qkv_as_printed.safetensors", "kanet_qkv_as_printed.md"):
        (folder / name).write_text("old")
    return folder


def test_weights_in_half_precision_and_a_card(tool, run, package, capsys):
    assert tool.main([str(run), "--into", str(package), "--instead-of", "kanet_qkv_as_printed"]) == 0
    assert sorted(file.name for file in package.iterdir()) == ["kanet_qkv.md", "kanet_qkv.safetensors"]
    state, _ = read_weights(package / "kanet_qkv.safetensors")
    assert {tensor.dtype for tensor in state.values() if tensor.dim() > 1} == {torch.float16}
    x = torch.randn(1, 3, 64, 64)
    ours, theirs = (load_model(file)[0](x) for file in (package / "kanet_qkv.safetensors", run / "weights.safetensors"))
    # Half precision keeps eleven bits of each weight, over some fifty layers.
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    card = (package / "kanet_qkv.md").read_text()
    for text in (
        "# kanet_qkv on",
        "90.00%",
        "after epoch 55 of 60",
        'mean="once"',
        "replace weights",
        "half precision",
    ):
        assert text in card
    assert "weights-last" not in card
    assert "kanet_qkv.safetensors: " in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["weights.safetensors", "result.json", "config.yaml"])
def test_a_folder_that_is_no_run(tool, run, package, missing):
    (run / missing).unlink()
    with pytest.raises(SystemExit, match=f"run is no folder of a training run: there is no {missing} in it"):
        tool.main([str(run), "--into", str(package)])
    assert len(list(package.iterdir())) == 2


def test_what_is_to_be_replaced_is_not_there(tool, run, package):
    with pytest.raises(SystemExit, match="there are no weights of attnnet in"):
        tool.main([str(run), "--into", str(package), "--instead-of", "attnnet"])
    assert len(list(package.iterdir())) == 2
