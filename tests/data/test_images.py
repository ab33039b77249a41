"""Image files of every kind become RGB, or one line that names the file."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from kronattn.data.images import BadImage, decode_image, is_image_name, read_image


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.fixture
def photo() -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"])
def test_common_formats(photo, kind):
    image = decode_image(encoded(photo, kind), "photo")
    assert (image.mode, image.size) == ("RGB", (30, 20))


def test_png_keeps_every_value(photo):
    assert np.array_equal(np.asarray(decode_image(encoded(photo, "PNG"), "photo")), np.asarray(photo))


def test_grey_and_cmyk(photo):
    grey = np.asarray(decode_image(encoded(photo.convert("L"), "PNG"), "grey"))
    assert (grey[..., 0] == grey[..., 1]).all()
    assert decode_image(encoded(photo.convert("CMYK"), "JPEG"), "cmyk").mode == "RGB"


def test_sixteen_bits_lose_the_lower_eight():
    values = np.array([[0, 257, 65535]], dtype=np.uint16)
    image = decode_image(encoded(Image.fromarray(values), "PNG"), "deep")
    assert np.asarray(image)[0, :, 0].tolist() == [0, 1, 255]


def test_transparency_is_white(photo):
    image = photo.convert("RGBA")
    image.putalpha(0)
    assert (np.asarray(decode_image(encoded(image, "PNG"), "clear")) == 255).all()


def test_transparent_palette():
    image = Image.new("P", (2, 1), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.putpixel((1, 0), 1)
    pixels = np.asarray(decode_image(encoded(image, "PNG", transparency=0), "palette"))
    assert pixels.tolist() == [[[255, 255, 255], [255, 0, 0]]]


def test_animation_gives_its_first_frame(photo):
    other = Image.new("RGB", photo.size, "red")
    first = decode_image(encoded(photo, "WEBP", save_all=True, append_images=[other], lossless=True), "moving")
    assert np.array_equal(np.asarray(first), np.asarray(photo))


def test_exif_turns_the_image(photo):
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(encoded(photo, "JPEG", exif=exif), "turned").size == (20, 30)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "x.png is empty"), (b"hello", "x.png is not an image that Pillow can read")],
)
def test_no_image(data, message):
    with pytest.raises(BadImage, match=message):
        decode_image(data, "x.png")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_truncated(photo, kind):
    data = encoded(photo.resize((200, 200)), kind)
    with pytest.raises(BadImage, match="half.img is (broken|not an image)"):
        decode_image(data[: len(data) // 2], "half.img")


def test_decompression_bomb():
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(BadImage, match="bomb.png has more than 89,478,485 pixels"):
        decode_image(png, "bomb.png")


def test_files(tmp_path, photo):
    photo.save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").size == (30, 20)
    with pytest.raises(FileNotFoundError, match="there is no file .*b.png"):
        read_image(tmp_path / "b.png")
    with pytest.raises(BadImage, match="is a folder, not an image"):
        read_image(tmp_path)


def test_names():
    assert [is_image_name(n) for n in ("a.webp", "b/C.JPEG", ".DS_Store", "a.txt")] == [True, True, False, False]
