"""``kronattn explain``: a picture, a page, JSON, and one line for what is wrong."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image

from kronattn.cli import main
from tests.trained import photo, weights_file


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explain")
    return str(photo(folder / "a.png")), str(weights_file(folder)), folder


def test_picture_and_json(given, capsys):
    image, weights, folder = given
    output = folder / "new" / "e.png"
    arguments = ["explain", image, "--weights", weights, "--layer", "0,-1", "--at", "84,6", "--output", str(output)]
    assert main([*arguments, "--json"]) == 0
    assert Image.open(io.BytesIO(output.read_bytes())).format == "PNG"
    found = json.loads(capsys.readouterr().out)
    first = found["layers"][0]
    assert (first["layer"], first["own"], first["grid"], first["position"]) == ("stages.3.0.attn", "kv", [8, 8], [0, 7])
    for mode, weight in first["operators"].items():
        assert len(weight["rows"][0]) == len(weight["columns"][0]) == 8
        # Of the regular operator these are the map's two sums, each of which is one.
        parts = 2 if mode == "regular" else 1
        total = sum(weight["rows"][0]) + sum(weight["columns"][0])
        assert total == pytest.approx(weight["total"] * parts, abs=1e-5)


def test_the_prediction_is_that_of_predict(given, capsys):
    """The same pass: the class that predict names, with the same probability."""
    image, weights, folder = given
    assert main(["predict", image, "--weights", weights, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["images"][0]["classes"][0]
    assert main(["explain", image, "--weights", weights, "--output", str(folder / "p.png"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prediction"].startswith(f"Predicted: {best['name']}, {best['share']:.1%} confident")
    assert found["seen"] == [64, 64]
    assert [one["layer"] for one in found["layers"]] == ["stages.3.0.attn", "stages.6.0.attn", "stages.9.0.attn"]


def test_a_segmenter_is_explained_in_the_pass_of_predict(tmp_path, capsys):
    """At the image's own size, not squashed to the crop."""
    import kronattn
    from kronattn.models.files import Description, save_model
    from tests.trained import settled

    options = {"num_classes": 3, "backbone": "kanet_kv", "backbone_options": {"width": 0.25}}
    model = settled(kronattn.create_model("deeplabv2_kao_kv", **options))
    about = Description("deeplabv2_kao_kv", options, ["a", "b", "c"], task="segmentation", resize=33, size=33)
    save_model(tmp_path / "s.safetensors", model, about)
    image = str(photo(tmp_path / "a.png", 160, 96))
    arguments = ["explain", image, "--weights", str(tmp_path / "s.safetensors"), "--layer", "all", "--json"]
    assert main([*arguments, "--output", str(tmp_path / "e.png"), "--at", "159,95"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seen"] == [96, 160]
    assert found["layers"][-1]["grid"] == [12, 20]
    assert found["layers"][-1]["position"] == [11, 19]
    assert found["prediction"].startswith("Predicted at the marked position: ")


def test_page_is_self_contained(given, capsys):
    image, weights, folder = given
    output = folder / "e.html"
    assert main(["explain", image, "--weights", weights, "--layer", "0,3", "--output", str(output)]) == 0
    page = output.read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page
    assert "Explanation:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--at", "900,3"], "--at 900,3 is outside the image, which is 90×60"),
        (
            ["--at", "0,0"],
            "--at is outside the centre that the network sees, 89% of the image's width and 90% of its height",
        ),
        (["--layer", "head"], "--layer 'head' is not there"),
        (["--output", "e.jpg"], "--output must end in .png, .svg or .html"),
        (["--weights", "nowhere.safetensors"], "there is no file nowhere.safetensors"),
        (["--device", "abacus"], "device must be auto, cpu, cuda or mps"),
    ],
)
def test_bad_options(given, options, message, capsys):
    image, weights, folder = given
    assert main(["explain", image, "--weights", weights, "--output", str(folder / "x.png"), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_weights_that_are_none(given, capsys):
    image, weights, folder = given
    (folder / "text.safetensors").write_text("hello")
    assert main(["explain", image, "--weights", str(folder / "text.safetensors")]) == 2
    assert "text.safetensors is not a safetensors file" in capsys.readouterr().err
    assert main(["explain", str(folder / "text.safetensors"), "--weights", weights]) == 2
    assert "is not an image that Pillow can read" in capsys.readouterr().err
