"""``kronattn export``: what it writes and prints, 8 bits, and one line for what is wrong."""

from __future__ import annotations

import json
import sys

import pytest

from kronattn.cli import main
from kronattn.models.files import Description
from tests.trained import CLASSES, photo, small_network

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


@pytest.fixture(autouse=True)
def _few_modules(monkeypatch):
    """The command on a network of few modules: PyTorch's exporter takes a second for each."""
    import kronattn.export

    description = Description("kanet_kv", {"num_classes": 3}, CLASSES, resize=72, size=64)
    monkeypatch.setattr(kronattn.export, "find_network", lambda source: (small_network(source), description, True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for at, name in enumerate([*CLASSES, *CLASSES]):
        (folder / name).mkdir(exist_ok=True)
        photo(folder / name / f"{at}.png", seed=at)
    return folder


def test_static_quantisation_with_accuracy(folder, tmp_path, capsys):
    output = tmp_path / "new" / "k.onnx"
    folders = ["--calibrate", str(folder), "--images", "4", "--accuracy", str(folder)]
    assert main(["export", "kanet_kv", "--output", str(output), "--int8", "static", *folders, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["size"] for one in found["differences"]] == [[64, 64]]
    assert found["differences"][0]["largest"] <= 1e-4
    assert found["bytes"] == len(output.read_bytes())
    assert found["accuracy_images"] == 6
    assert set(found["accuracy"]) == {"pytorch", "int8"}
    assert all(0 <= value <= 1 for value in found["accuracy"].values())


def test_dynamic_quantisation_runs_and_is_near(tmp_path, capsys):
    import torch

    from kronattn.export.runtime import run_onnx

    output = tmp_path / "k.onnx"
    assert main(["export", "kanet_kv", "--output", str(output), "--int8", "dynamic"]) == 0
    out = capsys.readouterr().out
    assert "Largest difference from PyTorch:" in out
    assert "8 bits:" in out
    images = torch.randn(1, 3, 64, 64)
    expected, found = small_network()(images).detach(), run_onnx(str(output))(images)
    # Eight bits of the largest value in each of a few layers.
    assert (expected - found).abs().max() < 0.2 * expected.abs().max()


def test_torch_export(tmp_path, capsys):
    import torch

    output = tmp_path / "k.pt2"
    assert main(["export", "kanet_qkv", "--format", "torch-export", "--output", str(output)]) == 0
    assert f"Written: {output}" in capsys.readouterr().out
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(torch.export.load(output).module()(images), small_network("kanet_qkv")(images))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "tflite"], "--format must be onnx or torch-export, not 'tflite'"),
        (["--int8", "static"], "--int8 static needs --calibrate FOLDER"),
        (["--int8", "dynamic", "--format", "torch-export"], "--int8 is for --format onnx"),
        (["--output", "."], "is a folder; give the path of a file"),
    ],
)
def test_bad_options(options, message, capsys):
    assert main(["export", "kanet_kv", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("format", "name", "right"), [("onnx", "k.pdf", ".onnx"), ("torch-export", "k.onnx", ".pt2")])
def test_a_file_of_another_kind(format, name, right, tmp_path, capsys):
    output = tmp_path / "new" / name
    assert main(["export", "kanet_kv", "--format", format, "--output", str(output)]) == 2
    assert f"--output must end in {right} for --format {format}, got {output}" in capsys.readouterr().err
    assert not output.parent.exists()


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_names_the_extra(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["export", "kanet_kv", "--output", str(tmp_path / "new" / "k.onnx")]) == 2
    captured = capsys.readouterr()
    assert f"needs {package}: pip install 'kronattn[export]'" in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_measured_writes_nothing(folder, tmp_path, capsys):
    output = tmp_path / "k.onnx"
    assert main(["export", "kanet_kv", "--output", str(output), "--accuracy", str(folder / "cat")]) == 2
    assert "must hold a folder for each of the 3 classes, but holds 0" in capsys.readouterr().err
    assert not output.exists()
