"""The guide: its examples run, its figures and pages are all there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kronattn.cli import main
from kronattn.data.prepare import prepare_image
from kronattn.models.files import Description

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def test_pages_with_code_have_examples():
    """Which pytest runs itself, as doctests of the pages."""
    assert sum(">>>" in (DOCS / page).read_text() for page in PAGES) >= 5


@pytest.mark.parametrize("page", PAGES)
def test_every_command_has_help(page, capsys):
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    plain = "\n".join(block for language, block in blocks if not language)
    for command in re.findall(r"^kronattn ([a-z]+)", plain, re.MULTILINE):
        assert main([command, "--help"]) == 0
        assert "Example" in capsys.readouterr().out


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    assert set(re.findall(r"(\w+\.md)", navigation)) == set(PAGES)


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_attention_in_a_timm_resnet():
    pytest.importorskip("timm", reason="timm is not installed")
    plain, attending = (example("timm_resnet").resnet(attention).eval() for attention in (False, True))
    x = torch.randn(1, 3, 64, 96)
    assert attending(x).shape == plain(x).shape == (1, 1000)
    # Weights trained without the attention fit, and what is new is the attention alone.
    missing, unexpected = attending.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert missing
    assert all(".se." in name for name in missing)
    assert torch.equal(attending(x), plain(x)), "and it leaves the network as it was"


@pytest.mark.parametrize("keep_aspect", [False, True])
def test_images_for_onnxruntime_are_prepared_as_for_pytorch(keep_aspect, tmp_path, monkeypatch):
    """The guide's lines, which people copy to where kronattn is not, against what kronattn does."""
    (snippet,) = re.findall(
        r"^image = Image.open.*?^batch = [^\n]*", (DOCS / "use.md").read_text(), re.DOTALL | re.MULTILINE
    )
    seen = Description("kanet_kv", resize=208, size=192, keep_aspect=keep_aspect)
    noise = np.random.default_rng(0).integers(0, 256, (12, 24, 3), np.uint8)
    picture = Image.fromarray(noise).resize((600, 300), Image.Resampling.BILINEAR)
    picture.save(tmp_path / "church.jpg", quality=95)
    monkeypatch.chdir(tmp_path)
    names = {"Image": Image, "np": np, "about": seen.to_dict()}
    exec(snippet, names)
    expected = prepare_image(Image.open("church.jpg").convert("RGB"), seen)
    # Pillow rounds what it scales to whole numbers.
    torch.testing.assert_close(torch.from_numpy(names["batch"][0]), expected, rtol=0, atol=2 / 255 / min(seen.std))


@pytest.mark.parametrize(
    ("name", "block", "arguments", "shape", "channels"),
    [
        ("unet_block", "UNetBlock", (8, 6), (2, 8, 10, 14), 6),
        ("video_block", "VideoBlock", (8,), (2, 8, 3, 6, 5), 8),
    ],
)
def test_blocks(name, block, arguments, shape, channels):
    layer = getattr(example(name), block)(*arguments)
    x = torch.randn(shape, requires_grad=True)
    attention, layer.attention = layer.attention, None
    plain = layer.eval()(x)
    layer.attention = attention
    assert torch.equal(layer(x), plain), "a new layer leaves the network as it was"
    torch.nn.init.ones_(attention.layer_scale.gain)
    y = layer.train()(x)
    assert y.shape == (shape[0], channels, *shape[2:])
    y.square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    # A change at one position reaches every other through the attention.
    layer.eval()
    moved = x.detach().clone()
    moved[(0, slice(None), *[0] * (x.dim() - 2))] += 5
    difference = (layer(moved) - layer(x)).abs().sum(dim=1)[0]
    assert (difference > 0).all()
