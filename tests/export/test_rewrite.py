"""Networks rewritten for onnxruntime: other operators, the same output."""

from __future__ import annotations

import pytest
import torch

from kronattn.export.rewrite import rewritten
from kronattn.models.kanet import VARIANTS
from kronattn.nn import AttnModule, AttnSkipModule, BaseSkipModule, KroneckerAttention
from tests.trained import network, settled


@pytest.mark.parametrize("name", VARIANTS)
def test_networks(name):
    model = network(name)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    x = torch.randn(2, 3, 70, 97)
    with torch.no_grad():
        expected, found = model(x), rewritten(model)(x)
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "block",
    [
        BaseSkipModule(3, 6),
        BaseSkipModule(3, 3, stride=2, expansion=1),
        AttnSkipModule(3, 3),
        AttnModule(3, 6, stride=2),
        AttnModule(3, 6, stride=2, expansion=1),
        AttnSkipModule(3, 3, attn_layer=lambda c: KroneckerAttention(c, "qkv", project="qkv")),
        AttnSkipModule(3, 3, attn_layer=lambda c: KroneckerAttention(c, "qkv", num_heads=3, scale=0.3)),
        AttnSkipModule(3, 3, attn_layer=lambda c: KroneckerAttention(c, coefficient_norm=None, project="", scale=2.0)),
        AttnSkipModule(3, 3, norm_layer=lambda c: torch.nn.GroupNorm(1, c)),
    ],
    ids=lambda block: type(block).__name__,
)
def test_modules_of_every_kind(block):
    block = settled(block, size=9)
    x = torch.randn(2, 3, 7, 10)
    with torch.no_grad():
        torch.testing.assert_close(rewritten(block)(x), block(x), rtol=1e-4, atol=1e-5)


def test_dilated_convolutions_stay_dilated():
    """A segmenter's backbone has its strides replaced by dilation."""
    block = BaseSkipModule(3, 6, stride=2)
    block.depthwise.conv.stride, block.depthwise.conv.dilation = (1, 1), (2, 2)
    block.depthwise.conv.padding = (2, 2)
    block = settled(block, size=9)
    x = torch.randn(2, 3, 7, 10)
    with torch.no_grad():
        assert block(x).shape == (2, 6, 7, 10)
        torch.testing.assert_close(rewritten(block)(x), block(x), rtol=1e-4, atol=1e-5)
