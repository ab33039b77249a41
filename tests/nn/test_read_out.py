"""A linear map of the output, applied to the values where it can be: the same as applying it to the output."""

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
    "heads": {"num_heads": 2, "project": "qkv", "out_channels": 4},
}


def layer_and_map(mode, options, outputs):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS[options]).double()
    return layer, torch.randn(outputs, layer.out_channels, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("outputs", [3, 11])  # fewer than the output's channels, and more
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False])
def test_equals_the_map_of_the_output(mode, options, outputs, layout, training):
    layer, read_out = layer_and_map(mode, options, outputs)
    layer.train(training)
    x = lay_out(torch.randn(2, CHANNELS, 5, 7, dtype=torch.float64), layout).requires_grad_()
    added = torch.randn(2, outputs, 5, 7, dtype=torch.float64, requires_grad=True)
    sources = [x, added, read_out, *layer.parameters()]
    expected = torch.einsum("kp,nphw->nkhw", read_out, layer(x)) + added
    found = layer(x, added=added, read_out=read_out)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for gradient, wanted in zip(
        torch.autograd.grad(found, sources, weights), torch.autograd.grad(expected, sources, weights), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_the_output_has_no_more_channels_than_asked_for(mode, monkeypatch):
    layer, read_out = layer_and_map(mode, "maps", 3)
    seen = []
    from kronattn.ops import attend

    real = attend._forward
    monkeypatch.setattr(attend, "_forward", lambda q, k, v, b: seen.append(v.shape[-2]) or real(q, k, v, b))
    layer.eval()(torch.randn(2, CHANNELS, 5, 7, dtype=torch.float64), read_out=read_out)
    assert seen == [3]


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("options", ["maps", "heads"])
def test_recorded(mode, options):
    layer, read_out = layer_and_map(mode, options, 3)
    x = torch.randn(2, CHANNELS, 5, 7, dtype=torch.float64)
    with record_coefficients(layer) as recorded:
        output = layer(x, read_out=read_out)
    torch.testing.assert_close(recorded[0].output(), output, rtol=1e-10, atol=1e-10)
    assert recorded[0].values.shape[1] == layer.out_channels


@pytest.mark.parametrize("shape", [(3, 7), (3,), (3, 6, 1)])
def test_another_shape(shape):
    layer, _ = layer_and_map("kv", "maps", 3)
    with pytest.raises(ValueError, match=r"read_out must be \(K, 6\), a map of the output, not of shape"):
        layer(torch.randn(2, CHANNELS, 5, 7, dtype=torch.float64), read_out=torch.randn(shape))


@pytest.mark.parametrize("shape", [(3, 7), (4, 8), (3,), (3, 8, 3, 3)])
def test_another_shape_of_the_skip(shape):
    layer, read_out = layer_and_map("kv", "maps", 3)
    expected = r"skip's weight must be \(3, 8\), a map of the input to as many channels as the result has, not of shape"
    with pytest.raises(ValueError, match=expected):
        layer(torch.randn(2, CHANNELS, 5, 4), read_out=read_out, skip=(torch.randn(shape), None))


def test_another_shape_of_the_skip_bias():
    layer, read_out = layer_and_map("kv", "maps", 3)
    skip = torch.randn(3, CHANNELS), torch.randn(4)
    with pytest.raises(ValueError, match=r"skip's bias must be \(3,\), not of shape \(4,\)"):
        layer(torch.randn(2, CHANNELS, 5, 4), read_out=read_out, skip=skip)
