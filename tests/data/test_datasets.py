"""Images kept in memory and images decoded when they are needed; bad ones in both."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from kronattn.data.classification import load_split
from kronattn.data.datasets import DecodedImages, ImageDataset, collate_good, decode_all
from kronattn.data.images import BadImage


@pytest.fixture
def images(tmp_path):
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        place = tmp_path / "val" / name
        place.mkdir(parents=True)
        for index in range(6):
            Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(place / f"{index}.png")
    return load_split("folder", str(tmp_path), "val"), tmp_path


def test_both_ways_give_the_same_pixels(images):
    source, _ = images
    decoded, bad = decode_all(source, 16)
    assert bad == []
    whole = ImageDataset(source, 16)
    one_by_one = torch.stack([whole[index][0] for index in range(12)])
    assert torch.equal(decoded["pixels"], one_by_one)
    assert decoded["labels"].tolist() == list(source.labels)


def test_a_batch_is_one_gather(images):
    decoded = DecodedImages(**decode_all(images[0], 16)[0])
    loader = DataLoader(decoded, batch_size=5, collate_fn=lambda batch: batch)
    pixels, labels = next(iter(loader))
    assert torch.equal(pixels, decoded.pixels[:5])
    assert torch.equal(labels, decoded.labels[:5])


def test_images_are_scaled(images):
    decoded, _ = decode_all(images[0], 24)
    assert decoded["pixels"].shape == (12, 3, 24, 24)


@pytest.fixture
def with_bad(images):
    source, place = images
    (place / "val" / "a" / "2.png").write_bytes(b"broken")
    (place / "val" / "b" / "0.png").write_bytes(b"")
    return source


def test_bad_images_stop_the_decoding_by_name(with_bad):
    with pytest.raises(BadImage, match=r"val/a/2.png is not an image"):
        decode_all(with_bad, 16)


def test_bad_images_are_left_out_and_named(with_bad):
    decoded, bad = decode_all(with_bad, 16, skip_bad=True)
    assert len(decoded["pixels"]) == 10
    assert decoded["labels"].tolist() == [0] * 5 + [1] * 5
    assert [name[-7:] for name in bad] == ["a/2.png", "b/0.png"]


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_images_are_left_out_of_batches_and_counted(with_bad, workers):
    dataset = ImageDataset(with_bad, 16, skip_bad=True)
    loader = DataLoader(dataset, batch_size=4, collate_fn=collate_good, num_workers=workers)
    assert [len(labels) for _, labels in loader] == [3, 3, 4]
    assert dataset.skipped.nonzero().flatten().tolist() == [2, 6]


def test_nothing_left(tmp_path):
    (tmp_path / "val" / "a").mkdir(parents=True)
    (tmp_path / "val" / "a" / "0.png").write_bytes(b"broken")
    source = load_split("folder", str(tmp_path), "val")
    with pytest.raises(BadImage, match="all 1 images are bad"):
        decode_all(source, 16, skip_bad=True)
    with pytest.raises(BadImage, match="all 2 images of a batch are bad"):
        collate_good([None, None])
