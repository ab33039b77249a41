"""Images and masks move together: scaling, cropping, padding, flipping, batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from kronattn.data.images import BadImage
from kronattn.data.joint import (
    JointSettings,
    RandomScale,
    SegmentationDataset,
    collate_padded,
    joint_evaluation_transform,
    joint_training_transform,
)
from kronattn.data.segmentation import load_segmentation
from tests.data.segmentation_folders import labels, picture, write, write_folder

tv_tensors = pytest.importorskip("torchvision.tv_tensors", reason="torchvision is not installed")

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def pair(height=40, width=60):
    """An image that says in its colours which label each of its pixels has."""
    mask = torch.arange(height * width).reshape(height, width) % 7
    image = (mask * 30).to(torch.uint8).expand(3, -1, -1)
    return tv_tensors.Image(image), tv_tensors.Mask(mask.to(torch.uint8))


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, {"train": 4, "val": 3})


def test_samples(folder):
    dataset = SegmentationDataset(load_segmentation("folder", folder, "train", classes=3))
    assert len(dataset) == 4
    image, mask = dataset[2]
    assert isinstance(image, tv_tensors.Image)
    assert isinstance(mask, tv_tensors.Mask)
    assert (image.dtype, image.shape, mask.dtype, mask.shape) == (torch.uint8, (3, 20, 30), torch.uint8, (20, 30))
    assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(picture(2)))
    assert np.array_equal(mask.numpy(), labels(2, 3))


class TestTraining:
    @pytest.mark.parametrize("size", [(40, 60), (10, 90), (17, 17), (1, 1)])
    def test_size_and_types(self, size):
        x, y = joint_training_transform(JointSettings(crop=33))(*pair(*size))
        assert (x.shape, x.dtype) == ((3, 33, 33), torch.float32)
        assert (y.shape, y.dtype) == ((33, 33), torch.int64)
        assert type(x) is type(y) is torch.Tensor

    def test_image_and_mask_stay_together(self):
        transform = joint_training_transform(JointSettings(crop=33, scale=(1, 1), **PLAIN))
        for seed in range(8):
            torch.manual_seed(seed)
            x, y = transform(*pair())
            torch.testing.assert_close(x[0], y * 30 / 255)

    def test_smaller_than_the_crop(self):
        settings = JointSettings(crop=48, scale=(1, 1), ignore_index=11)
        for seed in range(8):
            torch.manual_seed(seed)
            x, y = joint_training_transform(settings)(*pair(20, 30))
            inside = y != 11
            # Nothing of the image is lost, and padding is next to nothing once normalised (the mean, in whole bytes).
            assert inside.sum() == 20 * 30
            assert x[:, ~inside].abs().max() < 0.01

    def test_both_ways_round(self):
        transform = joint_training_transform(JointSettings(crop=20, scale=(1, 1), flip=0.5, **PLAIN))
        image, mask = pair(20, 20)
        outcomes = set()
        for seed in range(20):
            torch.manual_seed(seed)
            _, y = transform(image, mask)
            outcomes.add("flipped" if torch.equal(y, mask.flip(-1).long()) else "plain")
            assert torch.equal(y, mask.long()) or torch.equal(y, mask.flip(-1).long())
        assert outcomes == {"flipped", "plain"}

    def test_scale(self):
        scale = RandomScale(0.5, 1.5)
        sizes = []
        for seed in range(50):
            torch.manual_seed(seed)
            image, mask = scale(*pair(40, 60))
            assert image.shape[1:] == mask.shape
            assert mask.max() < 7  # no label between two labels
            sizes.append(mask.shape[0])
        assert min(sizes) >= 20
        assert max(sizes) <= 60
        assert len(set(sizes)) > 15

    def test_seed_decides(self):
        transform = joint_training_transform(JointSettings(crop=33))
        results = []
        for _ in range(2):
            torch.manual_seed(3)
            results.append(transform(*pair()))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_evaluation_keeps_every_pixel():
    settings = JointSettings()
    image, mask = pair()
    x, y = joint_evaluation_transform(settings)(image, mask)
    assert torch.equal(y, mask.long())
    expected = (image.float() / 255 - torch.tensor(settings.mean)[:, None, None]) / torch.tensor(settings.std)[
        :, None, None
    ]
    torch.testing.assert_close(x, torch.Tensor(expected))


class TestBatches:
    def test_of_any_sizes(self, folder):
        write(folder / "val" / "images" / "wide.png", picture(9, (12, 50)))
        write(folder / "val" / "masks" / "wide.png", Image.fromarray(labels(9, 3, size=(12, 50))))
        images = load_segmentation("folder", folder, "val", classes=3)
        dataset = SegmentationDataset(images, joint_evaluation_transform(JointSettings()))
        (batch,) = DataLoader(dataset, batch_size=4, collate_fn=collate_padded)
        assert batch[0].shape == (4, 3, 20, 50)
        assert batch[1].shape == (4, 20, 50)
        assert (batch[1][3, 12:] == 255).all()
        assert (batch[0][3, :, 12:] == 0).all()
        assert torch.equal(batch[1][0, :, :30], dataset[0][1])

    def test_bad_samples(self, folder):
        write(folder / "train" / "masks" / "001.png", Image.fromarray(labels(1, 9)))
        images = load_segmentation("folder", folder, "train", classes=3)
        transform = joint_training_transform(JointSettings(crop=17))
        with pytest.raises(BadImage, match="001.png: label"):
            SegmentationDataset(images, transform)[1]
        dataset = SegmentationDataset(images, transform, skip_bad=True)
        (batch,) = DataLoader(dataset, batch_size=4, collate_fn=collate_padded)
        assert batch[0].shape == (3, 3, 17, 17)
        assert dataset.skipped.tolist() == [False, True, False, False]
        with pytest.raises(BadImage, match="all 2 images of a batch are bad"):
            collate_padded([None, None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": 0}, "crop must be at least 1"),
        ({"scale": (1.5, 0.5)}, "scale must be two factors, the smaller first"),
        ({"flip": 2}, "flip must lie between 0 and 1"),
        ({"ignore_index": -1}, "ignore_index must lie between 0 and 255"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        JointSettings(**options)
