"""Masks of every kind become labels, or one line that names the file."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from kronattn.data.images import BadImage
from kronattn.data.masks import Labels, decode_mask, voc_palette
from kronattn.data.segmentation import CAMVID, VOC
from tests.data.segmentation_folders import encoded, labels, palette_image

THREE = Labels(("a", "b", "c"))
COLOURED = Labels(("a", "b"), 255, ((10, 20, 30), (0, 0, 200)), ignore_colour=(255, 255, 255))


@pytest.fixture
def values():
    return labels(0)


class TestKinds:
    def test_grey_and_palette(self, values):
        for image in (Image.fromarray(values), palette_image(values)):
            assert np.array_equal(decode_mask(encoded(image), "mask.png", VOC), values)

    def test_colours_of_voc(self, values):
        colours = np.zeros((256, 3), dtype=np.uint8)
        colours[: VOC.num_classes] = VOC.palette
        coloured = Image.fromarray(colours[values])
        for image in (coloured, coloured.convert("RGBA"), palette_image(values).convert("RGB")):
            pixels = np.array(image.convert("RGB"))
            pixels[:2] = VOC.ignore_colour  # the palette's own entry 255 is another one
            found = decode_mask(encoded(Image.fromarray(pixels)), "mask.png", VOC)
            assert np.array_equal(found, values)

    def test_sixteen_and_one_bits(self):
        deep = Image.fromarray(np.array([[0, 2], [1, 255]], dtype=np.uint16))
        assert decode_mask(encoded(deep), "deep.png", THREE).tolist() == [[0, 2], [1, 255]]
        flat = Image.fromarray(np.array([[0, 255], [255, 0]], dtype=np.uint8)).convert("1")
        assert decode_mask(encoded(flat), "flat.png", THREE).tolist() == [[0, 1], [1, 0]]

    def test_sbd(self, values):
        scipy_io = pytest.importorskip("scipy.io", reason="scipy is not installed")
        inner = np.zeros((1,), dtype=[("Segmentation", object)])
        inner["Segmentation"][0] = values
        stream = io.BytesIO()
        scipy_io.savemat(stream, {"GTcls": inner.reshape(1, 1)})
        found = decode_mask(stream.getvalue(), "a.mat", VOC)
        assert found.dtype == np.uint8
        assert np.array_equal(found, values)

    def test_a_palette_of_one_s_own(self):
        pixels = np.array([[(10, 20, 30), (0, 0, 200), (255, 255, 255)]], dtype=np.uint8)
        assert decode_mask(encoded(Image.fromarray(pixels)), "m.png", COLOURED).tolist() == [[0, 1, 255]]


@pytest.mark.parametrize(
    ("data", "name", "message"),
    [
        (b"", "m.png", "m.png is empty"),
        (b"hello", "m.png", "m.png is not an image that Pillow can read"),
        (encoded(Image.fromarray(labels(0)))[:60], "m.png", "m.png is (broken|not an image)"),
        (encoded(Image.fromarray(labels(0)), "JPEG"), "m.jpg", "m.jpg is a JPEG, which does not keep labels"),
        (encoded(Image.new("RGB", (2, 2))), "m.png", "m.png holds RGB colours, and there is no palette"),
        (encoded(Image.new("LA", (2, 2))), "m.png", "m.png is a mask of mode LA"),
        (encoded(Image.fromarray(np.array([[0, 1], [2, 7]], dtype=np.uint8))), "m.png", "label 7 at row 1, column 1"),
        (encoded(Image.fromarray(np.array([[0, 900]], dtype=np.uint16))), "m.png", "label 900 at row 0, column 1"),
        (b"no matlab", "m.mat", "m.mat is not one of SBD's MATLAB files"),
    ],
)
def test_bad_masks(data, name, message):
    if name.endswith(".mat"):
        pytest.importorskip("scipy", reason="scipy is not installed")
    with pytest.raises(BadImage, match=message) as caught:
        decode_mask(data, name, THREE)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_the_range_is_named():
    with pytest.raises(BadImage, match="label 3 at row 0, column 0; labels are 0 to 2, and 255 where ignored"):
        decode_mask(encoded(Image.new("L", (2, 2), 3)), "m.png", THREE)


def test_unknown_colour():
    with pytest.raises(BadImage, match=r"m.png: the colour \(1, 2, 3\) at row 0, column 0 is not in the palette"):
        decode_mask(encoded(Image.new("RGB", (2, 2), (1, 2, 3))), "m.png", COLOURED)


class TestLabels:
    def test_voc_s_palette(self):
        known = {0: (0, 0, 0), 1: (128, 0, 0), 15: (192, 128, 128), 20: (0, 64, 128), 255: (224, 224, 192)}
        palette = voc_palette(256)
        for label, colour in known.items():
            assert palette[label] == colour
        assert VOC.num_classes == 21
        assert len(set(VOC.palette)) == 21

    def test_camvid(self):
        assert (CAMVID.num_classes, CAMVID.ignore_index, CAMVID.classes[3]) == (11, 11, "road")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (((),), "from 1 to 255 classes, not 0"),
            ((("a", "b"), 1), "ignore_index 1 is also the label of b"),
            ((("a",), 256), "ignore_index must lie between 0 and 255"),
            ((("a",), 255, ((0, 0, 0), (1, 1, 1))), "the palette has 2 colours for 1 classes"),
        ],
    )
    def test_bad_labels(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            Labels(*arguments)
