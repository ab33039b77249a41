"""What the page shows, without the page."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from kronattn.data.images import BadImage
from kronattn.demo import viewer as viewer_module
from kronattn.demo.cost import cost_html
from kronattn.demo.viewer import Viewer
from kronattn.explain.view import MARGIN, place_in_view
from kronattn.models.files import Description
from tests.trained import CLASSES, network, photo


@pytest.fixture(scope="module")
def viewer():
    return Viewer(network("kanet_qkv"), Description("kanet_qkv", {}, CLASSES, resize=72, size=64))


def test_views(viewer, tmp_path):
    assert (viewer.own, len(viewer.layers)) == ("qkv", 10)
    seen = viewer.look(str(photo(tmp_path / "a.png", 144, 72)))
    assert sum(seen.shares.values()) == pytest.approx(1, abs=1e-5)
    pictures = set()
    for layer in (0, 9):
        for mode in ("kv", "qkv", "regular"):
            view, text = viewer.view(seen, layer, mode, (0.99, 0.01))
            assert view.size == (MARGIN + 520, MARGIN + 260)
            assert viewer.layers[layer] in text
            assert "row 0" in text
            pictures.add(view.tobytes())
    assert len(pictures) == 6


def test_two_visitors_at_once(viewer, tmp_path):
    paths = [str(photo(tmp_path / f"{at}.png", seed=at)) for at in range(4)]
    alone = [viewer.look(path) for path in paths]
    with ThreadPoolExecutor(4) as visitors:
        together = list(visitors.map(viewer.look, paths))
    for one, other in zip(alone, together, strict=True):
        assert [call.name for call in one.comparisons] == [call.name for call in other.comparisons]
        assert one.shares == other.shares


def test_the_margins_hold_the_weights(viewer, tmp_path):
    seen = viewer.look(str(photo(tmp_path / "a.png", 90, 90)))
    view, _ = viewer.view(seen, 0, "kv", (0.5, 0.5))
    pixels = np.asarray(view)
    assert (pixels[:MARGIN, :MARGIN] == 255).all()
    assert not (pixels[: MARGIN - 4, MARGIN:] == 255).all()
    assert not (pixels[MARGIN:, : MARGIN - 4] == 255).all()


@pytest.mark.parametrize("size", [(1, 1), (3000, 2), (2, 3000)])
def test_thin_images(viewer, tmp_path, size):
    """Found by the soak: a row of the attention may be less than a pixel of what is shown."""
    path = tmp_path / "thin.png"
    Image.new("RGB", size, "red").save(path)
    view, text = viewer.view(viewer.look(str(path)), 0, "kv", (0.5, 0.5))
    assert min(view.size) > MARGIN
    assert "attends most to" in text


def test_places(viewer):
    assert place_in_view((172, 272), (MARGIN + 50, MARGIN + 100)) == (0.5, 0.5)
    assert place_in_view((172, 272), (3, 300)) == (0.0, 1.0)


def test_what_is_too_large_or_no_image(viewer, tmp_path, monkeypatch):
    monkeypatch.setattr(viewer_module, "MAX_SIDE", 80)
    with pytest.raises(BadImage, match="the image is 90×60: at most 80 on a side"):
        viewer.look(str(photo(tmp_path / "a.png", 90, 60)))
    (tmp_path / "b.png").write_text("no")
    with pytest.raises(BadImage, match="not an image"):
        viewer.look(str(tmp_path / "b.png"))


def test_a_network_without_attention_is_refused():
    with pytest.raises(ValueError, match="mobilenetv2 has no attention layer"):
        Viewer(network("mobilenetv2"), Description("mobilenetv2"))


def test_cost_leaves_out_what_takes_too_much(monkeypatch):
    from kronattn.demo import cost

    monkeypatch.setattr(cost, "_MEMORY", 10**6)
    html = cost_html(28, 8, seconds=0.01)
    assert "Attn: would need" in html
    assert "KAO_KV" in html


def test_examples_are_images(tmp_path):
    from kronattn.demo.examples import write_examples

    paths = write_examples(tmp_path)
    assert {path.parent for path in paths} == {tmp_path}
    assert all(min(Image.open(path).size) >= 360 for path in paths)


def test_a_segmenter_at_the_image_s_own_size(tmp_path):
    import kronattn
    from tests.trained import settled

    options = {"num_classes": 3, "backbone": "kanet_kv", "backbone_options": {"width": 0.25}}
    model = settled(kronattn.create_model("deeplabv2_kao_qkv", **options))
    about = Description("deeplabv2_kao_qkv", options, CLASSES, task="segmentation", resize=33, size=33)
    segmenter = Viewer(model, about)
    seen = segmenter.look(str(photo(tmp_path / "a.png", 160, 96)))
    assert seen.comparisons[-1].grid == (12, 20)
    assert sum(seen.shares.values()) == pytest.approx(1)  # parts of the area
    for mode in ("kv", "qkv", "regular"):
        view, text = segmenter.view(seen, len(segmenter.layers) - 1, mode, (0.99, 0.99))
        assert "row 11, column 19 of 12×20" in text
        assert view.width == MARGIN + 520
