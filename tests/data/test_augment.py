"""Augmentation of batches: each image with draws of its own, and the same pixels as one image at a time."""

import pytest
import torch

from kronattn.data import augment
from kronattn.data.transforms import ImageSettings


@pytest.fixture
def places():
    """(64, 3, 20, 24) whose first channel is the row and whose second is the column."""
    row, column = torch.meshgrid(torch.arange(20), torch.arange(24), indexing="ij")
    return torch.stack((row, column, row * 0)).to(torch.uint8).expand(64, 3, 20, 24).contiguous()


def test_random_crops_are_windows(places):
    torch.manual_seed(0)
    cut = augment.random_crop(places, 8)
    top, left = cut[:, 0, 0, 0].long(), cut[:, 1, 0, 0].long()
    inside = torch.arange(8)
    assert torch.equal(cut[:, 0, :, 3].long(), top[:, None] + inside)
    assert torch.equal(cut[:, 1, 5, :].long(), left[:, None] + inside)
    assert set(top.tolist()) == set(range(13))
    assert set(left.tolist()) == set(range(17))


def test_resized_crops_cover_the_asked_for_area(places):
    torch.manual_seed(0)
    cut = augment.random_resized_crop(places, 10, scale=(0.3, 0.6))
    # Ten samples in a window of a share s: their steps are s · 20 / 10 rows and s · 24 / 10 columns.
    height = (cut[:, 0, 6, 5] - cut[:, 0, 4, 5]) / 2 * 10 / 20
    width = (cut[:, 1, 5, 6] - cut[:, 1, 5, 4]) / 2 * 10 / 24
    area = height * width
    assert 0.29 < area.min() < 0.36
    assert 0.53 < area.max() < 0.61
    assert ((width / height > 0.74) & (width / height < 1.34)).all()


def test_resized_crop_of_everything_is_the_image(places):
    cut = augment.random_resized_crop(places[:, :, :, :20], 20, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    assert torch.allclose(cut, places[:, :, :, :20].float(), atol=1e-4)


def test_some_images_are_mirrored(places):
    torch.manual_seed(0)
    mirrored = augment.flip(places, 0.5)
    which = mirrored[:, 1, 0, 0] == 23
    assert 15 < which.sum() < 49
    assert torch.equal(mirrored[which], places[which].flip(-1))
    assert torch.equal(mirrored[~which], places[~which])
    assert torch.equal(augment.flip(places, 0.0), places)


def test_centre_crop_is_torchvisions():
    images = torch.randint(256, (3, 3, 40, 40), dtype=torch.uint8)
    v2 = pytest.importorskip("torchvision.transforms.v2", reason="torchvision is not installed")
    ours = augment.center_crop(images, 32, 27)
    theirs = v2.Compose([v2.Resize((32, 32), antialias=True), v2.CenterCrop(27)])(images)
    assert ours.shape == theirs.shape
    assert (ours - theirs.float()).abs().max() < 1.01


def test_jitter_keeps_the_range_and_differs_between_images():
    images = torch.full((8, 3, 4, 4), 100.0)
    images[:, 0] = 200
    torch.manual_seed(0)
    varied = augment.jitter(images, 0.4)
    assert varied.min() >= 0
    assert varied.max() <= 255
    assert len({round(float(image.mean()), 3) for image in varied}) == 8
    assert augment.jitter(images, 0.0) is images


def test_erasing_blanks_a_rectangle():
    torch.manual_seed(0)
    erased = augment.random_erase(torch.ones(200, 3, 32, 32), 1.0) == 0
    assert (erased[:, 0] == erased[:, 2]).all()
    share = erased[:, 0].float().mean((1, 2))
    assert share.min() > 0.005
    assert 0.2 < share.max() < 0.4
    rows, columns = erased[:, 0].any(2).sum(1), erased[:, 0].any(1).sum(1)
    assert torch.equal(rows * columns, erased[:, 0].sum((1, 2)))
    assert (augment.random_erase(torch.ones(2, 3, 8, 8), 0.0) == 1).all()


def test_normalise():
    settings = ImageSettings(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 2, 2)
    assert torch.allclose(augment.normalise(images, settings)[:, 0, 0, 0], torch.tensor([-2.0, 2.0]))


def test_colours_of_an_evaluation_serve_training_too():
    settings = ImageSettings(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    images = torch.rand(1, 3, 2, 2) * 255
    with torch.inference_mode():
        augment.normalise(images, settings)
    augment.normalise(images.requires_grad_(), settings).square().sum().backward()
    assert images.grad is not None


class TestMixing:
    """Images that are their class's number everywhere: what is left of each can be read off."""

    images = torch.arange(4.0)[:, None, None, None].expand(4, 3, 16, 16)

    @pytest.mark.parametrize("ways", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}])
    def test_labels_are_the_shares_of_the_pixels(self, ways):
        shares = []
        for seed in range(20):
            torch.manual_seed(seed)
            images, labels = augment.mix(self.images, torch.arange(4), 4, **ways)
            assert images.dtype == torch.float32
            torch.testing.assert_close(labels.sum(1), torch.ones(4))
            torch.testing.assert_close(images.mean((1, 2, 3)), labels @ torch.arange(4.0), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(labels.diagonal(), labels[0, 0].expand(4))
            shares.append(labels[0, 0].item())
        assert len(set(shares)) > 10
        assert min(shares) >= 0
        assert max(shares) <= 1

    def test_cutmix_leaves_pixels_as_they_are(self):
        torch.manual_seed(0)
        images, _ = augment.mix(self.images, torch.arange(4), 4, cutmix=1.0)
        assert set(images.unique().tolist()) <= {0.0, 1.0, 2.0, 3.0}
        covered = images[1, 0] == 0
        rows, columns = covered.any(1), covered.any(0)
        assert torch.equal(covered, rows[:, None] & columns)
        assert covered.any()

    def test_both_take_turns(self):
        pasted = 0
        for seed in range(30):
            torch.manual_seed(seed)
            images, _ = augment.mix(self.images, torch.arange(4), 4, mixup=1.0, cutmix=1.0)
            pasted += set(images.unique().tolist()) <= {0.0, 1.0, 2.0, 3.0}
        assert 5 < pasted < 25

    def test_neither(self):
        images, labels = augment.mix(self.images, torch.tensor([0, 2, 1, 3]), 4)
        assert torch.equal(images, self.images)
        assert labels.argmax(1).tolist() == [0, 2, 1, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_waits_for_the_gpu():
    settings = ImageSettings()
    images = torch.randint(256, (4, 3, 40, 40), dtype=torch.uint8, device="cuda")
    augment.normalise(images, settings)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cut = augment.flip(augment.random_resized_crop(images, 32, (0.3, 1.0)), 0.5)
        augment.random_erase(augment.normalise(augment.jitter(cut, 0.3), settings), 0.5)
        small = augment.normalise(augment.random_crop(images, 32), settings)
        augment.mix(small, torch.zeros(4, dtype=torch.int64, device="cuda"), 3, mixup=0.2, cutmix=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
