"""Gains of a layer's output: at zero, an inserted layer leaves a network exactly as it was, and learns from there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kronattn
from kronattn.nn import KroneckerAttention


class Inserted(nn.Module):
    """Any module, and a new attention layer with a residual after it."""

    def __init__(self, module: nn.Module, channels: int, **options) -> None:
        super().__init__()
        self.module = module
        self.attention = KroneckerAttention(channels, layer_scale=0.0, **options)

    def forward(self, x):
        y = self.module(x)
        return self.attention(y, residual=y)


def check(model, insert, x):
    """Bit-equal before and after, in evaluation and in training, and the gain has a gradient."""
    model.eval()
    expected = output_of(model(x)).detach()
    layer = insert(model).attention
    model.eval()
    found = output_of(model(x))
    assert torch.equal(found, expected)
    found.square().sum().backward()
    assert layer.layer_scale.gain.grad.abs().max() > 0


def output_of(y):
    return y["out"] if isinstance(y, dict) else y


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_pretrained_kanet(mode):
    def insert(model):
        model.stages[4] = Inserted(model.stages[4], 64, mode=mode)
        return model.stages[4]

    pytest.importorskip("safetensors", reason="safetensors is not installed")
    check(kronattn.create_model("kanet_kv", pretrained=True), insert, torch.randn(2, 3, 96, 96))


def test_timm_resnet():
    timm = pytest.importorskip("timm", reason="timm is not installed")

    def insert(model):
        model.layer2 = Inserted(model.layer2, 128)
        return model.layer2

    check(timm.create_model("resnet18"), insert, torch.randn(2, 3, 96, 96))


def test_torchvision_deeplab():
    models = pytest.importorskip("torchvision", reason="torchvision is not installed").models.segmentation

    def insert(model):
        model.backbone.layer2 = Inserted(model.backbone.layer2, 512, mode="qkv")
        return model.backbone.layer2

    check(models.deeplabv3_resnet50(weights=None, weights_backbone=None), insert, torch.randn(1, 3, 65, 65))


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("heads", [1, 2])
def test_it_is_a_gain_of_the_output(mode, heads):
    torch.manual_seed(0)
    layer = KroneckerAttention(8, mode, num_heads=heads, layer_scale=1.0).double().eval()
    nn.init.normal_(layer.layer_scale.gain)
    x = torch.randn(2, 8, 5, 6, dtype=torch.float64)
    found, gain = layer(x), layer.layer_scale.gain.view(-1, 1, 1)
    layer.layer_scale = None
    torch.testing.assert_close(found, layer(x) * gain)


def test_no_number():
    with pytest.raises(TypeError, match="layer_scale must be a number that the gains start at, or None, not 'small'"):
        KroneckerAttention(8, layer_scale="small")
