"""A linear map of the output, applied to the values: the same as applying it to the output."""

from __future__ import annotations

import pytest
import torch

from kronattn import record_coefficients
from kronattn.nn import KroneckerAttention
from tests.ops.cases import lay_out

CHANNELS = 8
OPTIONS = {
    "values": {},
    "maps": {"project": "qkv", "qk_channels": 4, "out_channels": 6},
    "no_map": {"project": "", "coefficient_norm": None, "scale": 0.3},
    "per_key": {"coefficient_norm": "batch_per_key", "grid": (5, 7)},
}


def layer_and_map(mode, options, outputs):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS[options]).double()
    return layer, torch.nn.Linear(layer.out_channels, outputs, bias=False).double()


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("outputs", [3, 11])  # fewer than the output's channels, and more
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False])
def test_equals_the_map_of_the_output(mode, options, outputs, layout, training):
    layer, linear = layer_and_map(mode, options, outputs)
    layer.train(training)
    x = lay_out(torch.randn(2, CHANNELS, 5, 7, dtype=torch.float64), layout).requires_grad_()
    residual = torch.randn(2, outputs, 5, 7, dtype=torch.float64, requires_grad=True)
    sources = [x, residual, linear.weight, *layer.parameters()]
    expected = linear(layer(x).movedim(1, -1)).movedim(-1, 1) + residual
    found = layer(x, residual=residual, map_values=linear)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for gradient, wanted in zip(
        torch.autograd.grad(found, sources, weights), torch.autograd.grad(expected, sources, weights), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_the_output_has_no_more_channels_than_asked_for(mode, monkeypatch):
    layer, linear = layer_and_map(mode, "maps", 3)
    seen = []
    from kronattn.ops import attend

    real = attend._forward
    monkeypatch.setattr(attend, "_forward", lambda q, k, v, b: seen.append(v.shape[-2]) or real(q, k, v, b))
    with torch.no_grad():
        layer.eval()(torch.randn(2, CHANNELS, 5, 7, dtype=torch.float64), map_values=linear)
    assert seen == [3]


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_recorded(mode):
    layer, linear = layer_and_map(mode, "maps", 3)
    x = torch.randn(2, CHANNELS, 5, 7, dtype=torch.float64)
    with record_coefficients(layer) as recorded:
        output = layer(x, map_values=linear)
    torch.testing.assert_close(recorded[0].output(), output, rtol=1e-10, atol=1e-10)
