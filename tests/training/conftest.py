"""A folder of images that a small network can learn in seconds, and a recipe for it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from kronattn.measure import count_madd
from kronattn.training import run
from kronattn.training.recipe import Recipe, load_recipe

SMALL = """
model: {name: kanet_kv, options: {width: 0.25, drop_rate: 0.2}}
data:
  name: folder
  images: {resize: 40, size: 32, crop: random}
optimiser: {lr: 0.02}
epochs: 3
batch_size: 8
ema: 0.9
accelerator: cpu
"""


@pytest.fixture(autouse=True)
def one_thread():
    """Bits depend on how sums are shared out among threads, and other tests may have changed their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def with_curves() -> bool:
    """For tests that look at the curves of a run, which otherwise are an empty picture: drawing takes as long as
    training such small networks."""
    return True


_COUNTED: dict[tuple[str, ...], int] = {}


@pytest.fixture(autouse=True)
def _counted_once(monkeypatch, request):
    """Multiply-adds of each network are counted once in a session: that takes as long as training it."""

    def count(network, image):
        key = repr(network), str(image.shape)
        if key not in _COUNTED:
            _COUNTED[key] = count_madd(network, image)
        return _COUNTED[key]

    monkeypatch.setattr(run, "count_madd", count)
    if "with_curves" not in request.fixturenames:
        monkeypatch.setattr(run, "draw_curves", lambda *arguments, **options: Figure(figsize=(1, 1)))


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """In ImageNet's layout: red images and blue ones, of various sizes."""
    place = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for split, count in (("train", 9), ("val", 3)):
        for name, channel in (("n01440764", 0), ("n02102040", 2)):
            (place / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 120, (50 + index, 48, 3), dtype=np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(place / split / name / f"{index}.JPEG")
    return place


@pytest.fixture
def recipe_file(tmp_path, folder) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.replace("name: folder", f"name: folder\n  path: {folder}"))
    return path


@pytest.fixture
def recipe(recipe_file) -> Recipe:
    return load_recipe(recipe_file)
