"""``kronattn predict``: table, CSV and JSON; every bad file is one line."""

from __future__ import annotations

import csv
import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from kronattn.cli import main
from tests.trained import CLASSES, photo, weights_file


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return str(weights_file(tmp_path_factory.mktemp("weights")))


def bomb() -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_folder_to_json_and_csv(weights, tmp_path, capsys):
    for at in range(3):
        photo(tmp_path / f"{at}.png", seed=at)
    table = tmp_path / "new" / "found.csv"
    arguments = ["predict", str(tmp_path), "--weights", weights, "--top", "2", "--batch", "2", "--device", "cpu"]
    assert main([*arguments, "--output", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["task"]) == ("kanet_kv", "classification")
    assert [len(one["classes"]) for one in found["images"]] == [2, 2, 2]
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 6
    assert rows[0]["class"] == found["images"][0]["classes"][0]["name"]
    assert {row["class"] for row in rows} <= set(CLASSES)


def test_kinds_of_images_that_are_fine(weights, tmp_path, capsys):
    values = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    image = Image.fromarray(values)
    image.convert("CMYK").save(tmp_path / "cmyk.jpg")
    image.convert("RGBA").save(tmp_path / "alpha.png")
    Image.fromarray(values[..., 0].astype(np.uint16) * 257).save(tmp_path / "deep.png")
    image.save(tmp_path / "moving.gif", save_all=True, append_images=[Image.new("RGB", image.size)])
    assert main(["predict", str(tmp_path), "--weights", weights, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["images"]
    assert len(found) == 4
    assert all(one["classes"] for one in found)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("text.png", b"hello", "text.png is not an image that Pillow can read"),
        ("half.png", None, "half.png is broken"),
        ("bomb.png", bomb(), "bomb.png has more than 89,478,485 pixels"),
        ("empty.png", b"", "empty.png is empty"),
    ],
    ids=["text", "half", "bomb", "empty"],
)
def test_bad_files(weights, tmp_path, capsys, name, data, message):
    path = tmp_path / name
    if data is None:
        data = photo(tmp_path / "whole.png", 300, 300).read_bytes()
        (tmp_path / "whole.png").unlink()
        data = data[: len(data) // 2]
    path.write_bytes(data)
    assert main(["predict", str(path), "--weights", weights]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kronattn: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out

    photo(tmp_path / "fine.png")
    assert main(["predict", str(tmp_path), "--weights", weights, "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("kronattn: skipped: ")
    entries = {entry["image"]: entry for entry in json.loads(captured.out)["images"]}
    assert entries[str(tmp_path / "fine.png")]["classes"]
    assert message in entries[str(path)]["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.png"], "there is no file nowhere.png"),
        (["--output", "x.txt"], "--output must end in .csv or .json"),
        (["--weights", "nowhere.safetensors"], "there is no file nowhere.safetensors"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["--top", "0"], "top"),
    ],
)
def test_bad_options(weights, tmp_path, options, message, capsys):
    arguments = ["predict", str(photo(tmp_path / "a.png")), "--weights", weights, *options]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_weights_of_another_model(weights, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    state = load_file(weights)
    state.pop("classifier.bias")
    metadata = {"kronattn": json.dumps({"model": "kanet_kv", "options": {"num_classes": 3, "width": 0.25}})}
    save_file(state, tmp_path / "other.safetensors", metadata=metadata)
    assert main(["predict", str(photo(tmp_path / "a.png")), "--weights", str(tmp_path / "other.safetensors")]) == 2
    captured = capsys.readouterr()
    assert "the weights do not fit KANet: missing classifier.bias" in captured.err
    assert captured.err.count("\n") == 1


def test_segmentation_writes_overlays_masks_and_a_legend(monkeypatch, tmp_path, capsys):
    from kronattn.models import files
    from tests.predict.test_run import _Stripes

    description = files.Description("stripes", {}, ["sky", "left", "right", "road"], size=64, task="segmentation")
    monkeypatch.setattr(files, "load_model", lambda source: (_Stripes(), description))
    image = photo(tmp_path / "a.png", 120, 60)
    overlays, masks = tmp_path / "overlays", tmp_path / "masks"
    folders = ["--overlays", str(overlays), "--masks", str(masks)]
    assert main(["predict", str(image), "--weights", "any", *folders]) == 0
    assert sorted(path.name for path in overlays.iterdir()) == ["0000-a.png", "legend.png"]
    assert Image.open(overlays / "0000-a.png").size == (120, 60)
    out = capsys.readouterr().out
    assert "left 50.0%" in out
    assert "■ sky  ■ left  ■ right  ■ road" in out

    mask = Image.open(masks / "0000-a.png")
    assert (mask.mode, mask.size) == ("P", (120, 60))
    labels = np.asarray(mask)
    assert (set(labels[:, :50].flat), set(labels[:, 70:].flat)) == ({1}, {2})
    # The colours are those of the legend, and training could read the folder's classes.
    names = [line.rsplit(" ", 3) for line in (masks / "classes.txt").read_text().splitlines()]
    assert [name for name, *_ in names] == description.classes
    assert list(mask.convert("RGB").getpixel((5, 5))) == [int(value) for value in names[1][1:]]

    assert main(["predict", str(image), "--weights", "any", *folders, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"][0]["mask"] == str(masks / "0000-a.png")
    assert found["legend"][1] == {"name": "left", "label": 1, "colour": [int(value) for value in names[1][1:]]}


@pytest.mark.parametrize("option", ["--overlays", "--masks"])
def test_a_folder_that_cannot_be_made(monkeypatch, tmp_path, capsys, option):
    from kronattn.models import files
    from tests.predict.test_run import _Stripes

    description = files.Description("stripes", {}, ["a", "b", "c", "d"], size=64, task="segmentation")
    monkeypatch.setattr(files, "load_model", lambda source: (_Stripes(), description))
    monkeypatch.chdir(tmp_path)
    image = photo(tmp_path / "a.png", 120, 60)
    assert main(["predict", str(image), "--weights", "any", option, "/dev/null/x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kronattn: error: {option} /dev/null/x")
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("*-a.png"))


def test_overlays_and_masks_in_one_folder(monkeypatch, tmp_path, capsys):
    from kronattn.models import files
    from tests.predict.test_run import _Stripes

    description = files.Description("stripes", {}, ["a", "b", "c", "d"], size=64, task="segmentation")
    monkeypatch.setattr(files, "load_model", lambda source: (_Stripes(), description))
    folders = ["--overlays", str(tmp_path / "both"), "--masks", str(tmp_path / "x" / ".." / "both")]
    assert main(["predict", str(photo(tmp_path / "a.png", 120, 60)), "--weights", "any", *folders]) == 2
    assert "--overlays and --masks are both " in capsys.readouterr().err
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_a_network_for_volumes_is_told_apart_before_the_file_is_read(monkeypatch, tmp_path, capsys, command):
    from kronattn.models import files

    (tmp_path / "a.nii.gz").write_bytes(b"a volume")
    monkeypatch.setattr(files, "load_model", lambda source: (None, files.Description("unet3d", task="volumes")))
    assert main([command, str(tmp_path / "a.nii.gz"), "--weights", "any"]) == 2
    assert "unet3d is for volumes, not for images: kronattn evaluate takes volumes" in capsys.readouterr().err


def test_a_classifier_writes_no_masks(weights, tmp_path, capsys):
    image = photo(tmp_path / "a.png")
    assert main(["predict", str(image), "--weights", weights, "--masks", str(tmp_path / "masks"), "--json"]) == 0
    assert not (tmp_path / "masks").exists()
    assert "legend" not in json.loads(capsys.readouterr().out)
