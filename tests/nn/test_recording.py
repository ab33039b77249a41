"""Recorded coefficients: they change nothing, sum to one, and give the layer's output when applied to the values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import kronattn
from kronattn import record_coefficients
from kronattn.nn import AttnSkipModule, DenseAttention, KroneckerAttention

LAYERS = {
    "kv": KroneckerAttention,
    "qkv": partial(KroneckerAttention, mode="qkv"),
    "regular": DenseAttention,
    "pooled": partial(DenseAttention, pool=2),
}


def layer_of(kind: str, channels: int = 8, **options) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[kind](channels, **options).double()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_heads": 2, "project": "qkv", "qk_channels": 4, "out_channels": 6},
        {"coefficient_norm": None, "scale": 0.3, "project": ""},
        {"coefficient_norm": "batch_per_key", "grid": (5, 7), "num_heads": 2},
    ],
    ids=["default", "heads", "plain", "per_key"],
)
@pytest.mark.parametrize("kind", LAYERS)
def test_coefficients_applied_to_values_are_the_output(kind, options, training):
    layer = layer_of(kind, **options)
    for _ in range(3):  # statistics for the coefficients' norm that are not the initial ones
        layer(torch.randn(4, 8, 5, 7, dtype=torch.float64))
    layer.train(training)
    x = torch.randn(2, 8, 5, 7, dtype=torch.float64)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with record_coefficients(layer) as recorded:
        output = layer(x)
    after = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(state)
    assert torch.equal(layer(x), output)
    assert all(torch.equal(tensor, after[name]) for name, tensor in layer.state_dict().items())

    (call,) = recorded
    assert call.mode == ("regular" if kind == "pooled" else kind)
    assert call.num_heads == options.get("num_heads", 1)
    torch.testing.assert_close(call.coefficients.sum(dim=-2), torch.ones_like(call.coefficients[:, :, 0]))
    torch.testing.assert_close(call.output(), output, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [*LAYERS, "qkv_as_printed"])
def test_a_position(kind):
    printed, kind = kind == "qkv_as_printed", kind.removesuffix("_as_printed")
    layer = layer_of(kind, num_heads=2).eval()
    x = torch.randn(2, 8, 5, 7, dtype=torch.float64)
    if printed:
        layer.mean = "each"
    with record_coefficients(layer) as recorded:
        output = layer(x)
    call = recorded[0]
    for y, column in [(0, 0), (3, 5), (-1, -1)]:
        weights = call.at(y, column)
        assert weights.total == (2 if printed else 1)
        torch.testing.assert_close(weights.rows, call.rows[..., y, column])
        torch.testing.assert_close(weights.columns, call.columns[..., y, column])
        totals = torch.full((2, 2), float(weights.total), dtype=torch.float64)
        torch.testing.assert_close(weights.map.sum(dim=(-2, -1)), totals)
        # The map is over positions, so applied to the mapped positions it gives the output at this one.
        positions = nn.functional.max_pool2d(x, 2, ceil_mode=True) if kind == "pooled" else x
        values = torch.einsum("oc,nchw->nohw", layer.value_map.weight, positions).unflatten(1, (2, 4))
        expected = torch.einsum("ndphw,ndhw->ndp", values, weights.map).flatten(1)
        torch.testing.assert_close(output[..., y, column], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["kv", "qkv", "regular"])
@pytest.mark.parametrize("grid", [(6,), (2, 3, 4), (2, 2, 3, 2)])
def test_other_numbers_of_axes(kind, grid):
    layer = layer_of(kind).eval()
    x = torch.randn(2, 8, *grid, dtype=torch.float64)
    with record_coefficients(layer) as recorded:
        output = layer(x)
    call = recorded[0]
    torch.testing.assert_close(call.output(), output, rtol=1e-10, atol=1e-10)
    weights = call.at(*(size - 1 for size in grid))
    assert [axis.shape[-1] for axis in weights.axes] == list(grid)
    torch.testing.assert_close(weights.map.flatten(2).sum(-1), torch.full((2, 1), float(weights.total)).double())
    if len(grid) == 1:
        with pytest.raises(ValueError, match="columns alone"):
            _ = weights.rows


def test_keys_of_another_grid_and_a_skip():
    layer = layer_of("kv", project="qkv").eval()
    query, key = torch.randn(2, 8, 5, 7).double(), torch.randn(2, 8, 3, 4).double()
    with record_coefficients(layer) as recorded:
        output = layer(query, key, residual=query)
    torch.testing.assert_close(recorded[0].output() + query, output, rtol=1e-10, atol=1e-10)
    assert (recorded[0].grid, recorded[0].key_grid) == ((5, 7), (3, 4))
    assert recorded[0].at(4, 6).map.shape == (2, 1, 3, 4)


def test_autocast():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 5, 7)
    layer = KroneckerAttention(8, project="qkv").eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), record_coefficients(layer) as recorded:
        output = layer(x)
    assert recorded[0].coefficients.dtype == torch.float32
    torch.testing.assert_close(recorded[0].output(), output.float(), rtol=0.02, atol=0.02)  # 8 bits of bfloat16


@pytest.mark.parametrize("name", ["kanet_kv", "kanet_qkv", "attnnet", "attnnet_pool", "mobilenetv2"])
def test_networks_give_the_same_bits(name):
    torch.manual_seed(0)
    model = kronattn.create_model(name, num_classes=5, width=0.25).eval()
    x = torch.randn(2, 3, 64, 96)
    expected = model(x)
    with record_coefficients(model) as recorded:
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)
    attending = 0 if name == "mobilenetv2" else 10
    assert len(recorded) == 2 * attending
    assert len(recorded.names) == attending
    if attending:
        assert recorded["stages.3.0.attn"] is recorded[attending]
        recorded.clear()
    assert len(recorded) == 0


def test_gradients_flow_and_hooks_go():
    module = AttnSkipModule(8, 8)
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    with record_coefficients(module) as recorded:
        module(x).sum().backward()
    assert x.grad is not None
    assert not recorded[0].coefficients.requires_grad
    assert not any(child._forward_hooks for child in module.modules())


def test_nobody_listens_to_the_norm():
    """A backend that computes a whole layer at once would step aside for it, and round differently."""
    layer = KroneckerAttention(4)
    with record_coefficients(layer):
        assert not layer.norm._forward_hooks


def test_later_changes_in_place_do_not_show():
    layer = layer_of("regular", coefficient_norm=None, project="")
    x = torch.randn(1, 8, 3, 3, dtype=torch.float64)
    with record_coefficients(layer) as recorded:
        output = layer(x)
        x.zero_()
    torch.testing.assert_close(recorded[0].output(), output)


def test_what_is_asked_wrongly_is_said():
    layer = KroneckerAttention(4).eval()
    with record_coefficients(layer) as recorded:
        layer(torch.randn(1, 4, 3, 5))
    with pytest.raises(ValueError, match=r"position \(3, 0\) is outside the grid \(3, 5\)"):
        recorded[0].at(3, 0)
    with pytest.raises(ValueError, match="has 2 axes"):
        recorded[0].at(1)
    with pytest.raises(KeyError, match="no call of a layer 'head'.*KroneckerAttention"):
        recorded["head"]
    with pytest.raises(ValueError, match="give the model that was compiled"), record_coefficients(torch.compile(layer)):
        pass
