"""torch.fx: functions, layers, heads and networks can be traced, and compute the same afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import kronattn
from kronattn.nn import DenseAttention, KroneckerAttention


@pytest.mark.parametrize(
    "function",
    [
        lambda x: kronattn.kronecker_attention(x, mode="qkv", num_heads=2),
        lambda x: kronattn.kronecker_attention(query=x),
        lambda x: kronattn.attention(x, pool=2),
        lambda x: kronattn.outer_sum(kronattn.axis_averages(x), (5, 6)),
    ],
)
def test_functions(function):
    traced, x = fx.symbolic_trace(function), torch.randn(2, 4, 5, 6)
    assert torch.equal(traced(x), function(x))
    assert torch.equal(traced(x[:1]), function(x[:1]))


class ByKeyword(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(query=x, residual=x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "build",
    [
        lambda: KroneckerAttention(4),
        lambda: KroneckerAttention(4, "qkv", num_heads=2, project="qkv"),
        lambda: KroneckerAttention(4, project="qkv", qk_channels=2),
        lambda: DenseAttention(4, pool=2, project="qkv"),
    ],
)
def test_layers(build, training):
    """By themselves, inside another module, by position and by keyword."""
    x = torch.randn(2, 4, 5, 6)
    for wrap in (lambda layer: layer, ByKeyword, nn.Sequential):
        torch.manual_seed(0)
        module = wrap(build()).train(training)
        traced = fx.symbolic_trace(module)
        torch.testing.assert_close(traced(x), module(x))
        names = {node.target for node in traced.graph.nodes if node.op == "call_module"}
        assert any("value_map" in name for name in names), "the maps are modules of the graph"
        assert dict(traced.named_parameters()).keys() == dict(module.named_parameters()).keys()


def test_layers_with_other_keys():
    layer = KroneckerAttention(4).eval()
    traced = fx.symbolic_trace(layer, concrete_args={"residual": None, "map_values": None})
    q, k = torch.randn(2, 4, 5, 6), torch.randn(2, 4, 3, 4)
    torch.testing.assert_close(traced(q, k, k), layer(q, k, k))


@pytest.mark.parametrize("name", kronattn.list_models("classification"))
def test_networks(name):
    torch.manual_seed(0)
    model = kronattn.create_model(name, num_classes=3, width=0.25).eval()
    traced, x = fx.symbolic_trace(model), torch.randn(2, 3, 64, 48)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize("name", ["deeplabv2_aspp", "deeplabv2_attn", "deeplabv2_kao_kv", "deeplabv2_kao_qkv"])
def test_segmenters(name):
    torch.manual_seed(0)
    model = kronattn.create_model(name, num_classes=3, backbone="kanet_kv", backbone_options={"width": 0.25}).eval()
    traced = fx.symbolic_trace(model)
    for size in ((64, 48), (65, 90)):
        x = torch.randn(1, 3, *size)
        torch.testing.assert_close(traced(x), model(x))
