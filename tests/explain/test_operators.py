"""The three operators on one layer: the network's own is untouched, the others see the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from PIL import Image

from kronattn import record_coefficients
from kronattn.explain import MODES, choose_layers, compare_operators, draw_layers, grid_position, operators, parse_place
from kronattn.explain.heat import overlaid
from kronattn.nn import DenseAttention, KroneckerAttention, KroneckerSegmentationHead
from tests.trained import network


@pytest.mark.parametrize(("name", "own"), [("kanet_kv", "kv"), ("kanet_qkv", "qkv"), ("attnnet", "regular")])
def test_own_operator_is_what_the_network_computes(name, own):
    model = network(name)
    x = torch.randn(1, 3, 64, 96)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    comparisons = compare_operators(model, x)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    # As the comparison runs: where gradients are wanted, convolutions may round differently.
    with record_coefficients(model) as recorded, torch.no_grad():
        model(x)
    assert [one.name for one in comparisons] == recorded.names
    for one in comparisons:
        assert one.own == own
        assert torch.equal(one.calls[own].coefficients, recorded[one.name].coefficients)
        for mode, call in one.calls.items():
            assert call.mode == mode
            torch.testing.assert_close(call.coefficients.sum(dim=-2), torch.ones_like(call.coefficients[:, :, 0]))


def test_others_share_the_maps():
    layer = KroneckerAttention(8, num_heads=2, project="qkv", coefficient_norm="batch_per_key", grid=(4, 6)).eval()
    x = torch.randn(1, 8, 4, 6)
    (one,) = compare_operators(layer, x)
    expected = DenseAttention(8, num_heads=2, project="qkv")
    expected.query_map, expected.key_map, expected.value_map = layer.query_map, layer.key_map, layer.value_map
    torch.testing.assert_close(one.calls["regular"].output(), expected.train()(x))


def test_places_and_layers():
    assert grid_position(parse_place("89,0", 90, 60), (4, 6)) == (0, 5)
    for text in ("90,0", "-1,3", "0,60"):
        with pytest.raises(ValueError, match="outside the image, which is 90×60"):
            parse_place(text, 90, 60)
    for text in ("1", "a,b", "1,2,3"):
        with pytest.raises(ValueError, match="--at must be two numbers"):
            parse_place(text, 90, 60)
    comparisons = compare_operators(network(), torch.randn(1, 3, 64, 64))
    chosen = choose_layers(comparisons, "0,-1,stages.5.0.attn")
    assert [one.name for one in chosen] == ["stages.3.0.attn", "stages.9.0.attn", "stages.5.0.attn"]
    with pytest.raises(ValueError, match="--layer '10' is not there: give all, 0 to 9"):
        choose_layers(comparisons, "10")
    with pytest.raises(ValueError, match="no attention layer"):
        choose_layers(compare_operators(network("mobilenetv2"), torch.randn(1, 3, 64, 64)), None)


def test_large_grids_do_without_the_regular_operator(monkeypatch):
    monkeypatch.setattr(operators, "MOST_POSITIONS", 20)
    (small,) = compare_operators(KroneckerAttention(8).eval(), torch.randn(1, 8, 4, 5))
    (large,) = compare_operators(KroneckerAttention(8).eval(), torch.randn(1, 8, 4, 6))
    (own,) = compare_operators(DenseAttention(8).eval(), torch.randn(1, 8, 4, 6))
    assert [set(one.calls) for one in (small, large, own)] == [{"kv", "qkv", "regular"}, {"kv", "qkv"}, set(MODES)]
    (single,) = compare_operators(KroneckerAttention(8).eval(), torch.randn(1, 8, 1, 1))
    assert set(single.calls) == {"kv", "qkv"}
    figure = draw_layers(Image.new("RGB", (60, 40)), [large, single], (0.5, 0.5))
    assert "left out" in " ".join(text.get_text() for text in figure.findobj(Text))


def test_dark_photographs_stay_visible():
    """What was dimmed to black: an underexposed photograph where little attention goes."""
    values = np.random.default_rng(0).integers(0, 20, (40, 60, 3), dtype=np.uint8)
    weights = np.zeros((4, 6))
    weights[0, 0] = 1
    shown = np.asarray(overlaid(Image.fromarray(values), weights).convert("L"), dtype=float)
    assert shown[20:].mean() > 60
    assert shown[20:].std() > 15  # and what is on it can be told apart


def test_the_picture_says_what_was_predicted_and_what_colours_mean():
    comparisons = compare_operators(network(), torch.randn(1, 3, 64, 64))
    figure = draw_layers(Image.new("RGB", (64, 64)), comparisons[:1], (0.5, 0.5), caption="Predicted: cat")
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert "Predicted: cat" in texts
    assert sum("share of the attention" in text for text in texts) == 3


def test_a_segmentation_head_which_reads_classes_off_the_values():
    torch.manual_seed(0)
    head = KroneckerSegmentationHead(16, 3, "qkv").eval()
    (found,) = compare_operators(head, torch.randn(1, 16, 5, 6))
    assert found.own == "qkv"
    for call in found.calls.values():
        # The layer's own output, whatever the head makes of it.
        assert call.output().shape == (1, 4, 5, 6)
