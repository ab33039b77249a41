"""Predictions: those of the network itself, whatever the batches; and segmentation by task."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from kronattn.data.images import read_image
from kronattn.data.prepare import prepare_image
from kronattn.models.files import Description
from kronattn.predict.inputs import list_images
from kronattn.predict.run import predict_files
from tests.trained import CLASSES, network, photo


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("no image")
    return [photo(tmp_path / name, 60 + 10 * at, 70, seed=at) for at, name in enumerate(["a.png", "b/c.png", "d.jpg"])]


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_classes_are_the_networks(photos, batch):
    model, description = network(), Description("kanet_kv", {}, CLASSES, resize=72, size=64)
    results = list(predict_files(photos, model, description, batch=batch))
    assert [one.path for one in results] == photos
    for one in results:
        with torch.no_grad():
            expected = model(prepare_image(read_image(one.path), description)[None])[0].softmax(dim=0)
        assert sum(found.share for found in one.classes) == pytest.approx(1, abs=1e-5)
        for found in one.classes:
            # Float32 on batches of other sizes.
            assert found.share == pytest.approx(float(expected[CLASSES.index(found.name)]), abs=1e-5)


def test_a_bad_file_stops_nobody(photos, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_text("hello")
    model, description = network(), Description("kanet_kv", {}, CLASSES, resize=72, size=64)
    results = list(predict_files([photos[0], bad, photos[1]], model, description, batch=2))
    assert [bool(one.classes) for one in results] == [True, False, True]
    assert results[1].error == f"{bad} is not an image that Pillow can read"


class _NotTiny(nn.Module):
    """A classifier that needs some pixels to see anything."""

    def forward(self, x):
        if min(x.shape[2:]) < 8:
            raise ValueError(f"the input must be at least 8×8, but is {x.shape[2]}×{x.shape[3]}")
        return x.mean(dim=(2, 3))


def test_an_image_that_the_network_refuses_stops_nobody(photos, tmp_path):
    tiny = tmp_path / "tiny.png"
    Image.new("RGB", (1, 1)).save(tiny)
    description = Description("any", {}, CLASSES, task="spectrograms", shape=[3, 64, 64])
    results = list(predict_files([photos[0], tiny, photos[1]], _NotTiny(), description))
    assert [bool(one.classes) for one in results] == [True, False, True]
    assert results[1].error == f"{tiny}: the input must be at least 8×8, but is 1×1"


def test_a_network_for_volumes(photos):
    with pytest.raises(ValueError, match="unet3d is for volumes, not for images: kronattn evaluate takes volumes"):
        next(predict_files(photos, nn.Identity(), Description("unet3d", task="volumes")))


class _Stripes(nn.Module):
    """A segmenter at a quarter of the resolution: class 1 on the left, class 2 on the right."""

    def forward(self, x):
        height, width = x.shape[2] // 4, x.shape[3] // 4
        scores = torch.zeros(x.shape[0], 4, height, width)
        scores[:, 1, :, : width // 2] = 1
        scores[:, 2, :, width // 2 :] = 1
        return scores


def test_segmentation(tmp_path):
    paths = [photo(tmp_path / "a.png", 120, 60), photo(tmp_path / "b.png", 64, 64), photo(tmp_path / "c.png", 64, 64)]
    description = Description("stripes", {}, ["sky", "left"], size=64, task="segmentation")
    results = list(predict_files(paths, _Stripes(), description))
    for path, one in zip(paths, results, strict=True):
        assert [(found.name, round(found.share, 2)) for found in one.classes] == [("left", 0.5), ("class 2", 0.5)]
        assert one.picture is not None
        assert one.picture.size == Image.open(path).size
    left, right = np.asarray(results[1].picture)[:, 5].mean(axis=0), np.asarray(results[1].picture)[:, -5].mean(axis=0)
    assert np.abs(left - right).max() > 30


def test_inputs(photos, tmp_path):
    assert list_images([tmp_path, photos[0]]) == sorted(photos)
    assert list_images([tmp_path / "b" / "notes.txt"]) == [tmp_path / "b" / "notes.txt"]
    with pytest.raises(FileNotFoundError, match="there is no file nowhere"):
        list_images([tmp_path.__class__("nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no images"):
        list_images([tmp_path / "empty"])


def test_a_task_nobody_knows():
    with pytest.raises(ValueError, match="unknown task 'poetry': known are classification, segmentation"):
        next(predict_files([], network(), Description("kanet_kv", task="poetry")))
