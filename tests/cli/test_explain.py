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
    arguments = ["explain", image, "--weights", weights, "--layer", "0,-1", "--at", "80,10", "--output", str(output)]
    assert main([*arguments, "--json"]) == 0
    assert Image.open(io.BytesIO(output.read_bytes())).format == "PNG"
    found = json.loads(capsys.readouterr().out)
    first = found["layers"][0]
    assert (first["layer"], first["own"], first["grid"], first["position"]) == ("stages.3.0.attn", "kv", [9, 9], [1, 8])
    for mode, weight in first["operators"].items():
        assert len(weight["rows"][0]) == len(weight["columns"][0]) == 9
        # Of the regular operator these are the map's two sums, each of which is one.
        parts = 2 if mode == "regular" else 1
        total = sum(weight["rows"][0]) + sum(weight["columns"][0])
        assert total == pytest.approx(weight["total"] * parts, abs=1e-5)


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
        (["--layer", "head"], "--layer 'head' is not there"),
        (["--output", "e.jpg"], "--output must end in .png, .svg or .html"),
        (["--weights", "nowhere.safetensors"], "there is no file nowhere.safetensors"),
        (["--device", "abacus"], "device must be cpu or cuda"),
    ],
)
def test_bad_options(given, options, message, capsys):
    image, weights, folder = given
    assert main(["explain", image, "--weights", weights, "--output", str(folder / "x.png"), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_weights_that_are_none(given, capsys):
    image, _, folder = given
    (folder / "text.safetensors").write_text("hello")
    assert main(["explain", image, "--weights", str(folder / "text.safetensors")]) == 2
    assert "text.safetensors is not a safetensors file" in capsys.readouterr().err
    assert main(["explain", str(folder / "text.safetensors"), "--weights", str(folder / "text.safetensors")]) == 2
    assert "is not an image that Pillow can read" in capsys.readouterr().err
