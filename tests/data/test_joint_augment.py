"""Images and masks in batches on the device: as torchvision does it for one pair at a time."""

import pytest
import torch
import torch.nn.functional as F

from kronattn.data.joint import JointSettings
from kronattn.data.joint_augment import _Axis, _crop_axis, _weights, random_scaled_crop
from kronattn.data.pairs import DecodedPairs, stack_pairs

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def pairs(count=4, height=40, width=60):
    """Images that say in their colours which label each pixel has; labels change slowly, from left to right."""
    masks = (torch.arange(width) // 10).expand(count, height, width).to(torch.uint8)
    pixels = (masks * 30)[:, None].expand(-1, 3, -1, -1).contiguous()
    return pixels, masks, torch.tensor([[height, width]]).expand(count, 2)


def whole(size: int, scaled: int) -> _Axis:
    """An axis without a crop: all of the image, scaled."""
    axis = _crop_axis(torch.tensor([size]), torch.tensor([scaled / size]), scaled)
    assert axis.inside.all()
    return axis


@pytest.mark.parametrize("scaled", [20, 23, 31, 40, 47, 60])
def test_scaling_is_torchvisions(scaled):
    """The weights are those of PyTorch's bilinear interpolation with antialiasing, up and down."""
    torch.manual_seed(0)
    image = torch.rand(1, 1, 40, 40)
    weights = _weights(whole(40, scaled), torch.tensor([40]), 40)
    found = weights[:, None] @ image @ weights[:, None].transpose(-1, -2)
    expected = F.interpolate(image, size=(scaled, scaled), mode="bilinear", antialias=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_images_and_masks_stay_together():
    pixels, masks, sizes = pairs()
    settings = JointSettings(crop=33, scale=(1, 1), **PLAIN)
    for seed in range(8):
        torch.manual_seed(seed)
        x, y = random_scaled_crop(pixels, masks, sizes, settings)
        inside = y != 255
        torch.testing.assert_close(x[:, 0][inside], y[inside] * 30 / 255)


def test_scaled_they_still_agree():
    """Away from the borders between labels, which interpolation blurs, colours are those of the labels."""
    pixels, masks, sizes = pairs(16)
    torch.manual_seed(0)
    x, y = random_scaled_crop(pixels, masks, sizes, JointSettings(crop=33, scale=(0.5, 1.5), **PLAIN))
    inside = y != 255
    off = (x[:, 0][inside] * 255 / 30 - y[inside]).abs()
    assert (off < 0.01).float().mean() > 0.6
    assert off.max() <= 0.8


def test_smaller_than_the_crop():
    pixels, masks, sizes = pairs(8, 20, 30)
    torch.manual_seed(0)
    x, y = random_scaled_crop(pixels, masks, sizes, JointSettings(crop=48, scale=(1, 1), ignore_index=11))
    inside = y != 11
    # Nothing of the images is lost, padding is the mean colour, and it is not always at the same side.
    assert inside.sum((1, 2)).tolist() == [20 * 30] * 8
    assert x.movedim(1, -1)[~inside].abs().max() == 0
    assert len({tuple(place.nonzero()[0].tolist()) for place in inside}) > 1


def test_larger_than_the_crop_every_place_is_drawn():
    starts = set()
    for seed in range(60):
        torch.manual_seed(seed)
        axis = _crop_axis(torch.tensor([12]), torch.tensor([1.0]), 8)
        assert axis.inside.all()
        starts.add(int(axis.nearest[0, 0]))
    assert starts == {0, 1, 2, 3, 4}


def test_both_ways_round():
    pixels, masks, sizes = pairs(64, 20, 20)
    _, y = random_scaled_crop(pixels, masks, sizes, JointSettings(crop=20, scale=(1, 1), flip=0.5, **PLAIN))
    plain = (y == masks.long()).flatten(1).all(1)
    flipped = (y == masks.flip(-1).long()).flatten(1).all(1)
    assert (plain ^ flipped).all()
    assert 10 < int(plain.sum()) < 54


def test_images_of_different_sizes():
    """What lies beyond an image in the batch's tensor reaches neither the picture nor the mask."""
    small = (torch.full((3, 10, 14), 90, dtype=torch.uint8), torch.full((10, 14), 3, dtype=torch.uint8))
    large = (torch.full((3, 30, 25), 60, dtype=torch.uint8), torch.full((30, 25), 2, dtype=torch.uint8))
    dataset = DecodedPairs(**stack_pairs([small, large]))
    assert not dataset.same_size
    for seed in range(6):
        torch.manual_seed(seed)
        x, y = random_scaled_crop(*dataset.gather(torch.tensor([0, 1])), JointSettings(crop=24, **PLAIN))
        for index, (label, colour) in enumerate(((3, 90), (2, 60))):
            inside = y[index] != 255
            assert y[index][inside].unique().tolist() == [label]
            torch.testing.assert_close(x[index][:, inside], torch.full_like(x[index][:, inside], colour / 255))


def test_every_pair_has_draws_of_its_own():
    pixels, masks, sizes = pairs(6)
    torch.manual_seed(0)
    x, _ = random_scaled_crop(pixels, masks, sizes, JointSettings(crop=33))
    assert len({image.sum().item() for image in x}) == 6
