"""Attention with its coefficients materialised, as wide layers do on a GPU: the same on any device as without."""

from __future__ import annotations

import copy

import pytest
import torch

from kronattn import record_coefficients
from kronattn.nn import KroneckerAttention, KroneckerSegmentationHead
from kronattn.ops.plan import override_plan
from tests.ops.cases import DTYPES, TOLERANCE, lay_out, relative_error

CHANNELS = 64
OPTIONS = {
    "maps": {"project": "qkv", "qk_channels": 48, "out_channels": 24},
    "few": {"project": "qkv", "qk_channels": 6, "scale": 0.5},  # the queries are mapped rather than the keys
    "values": {},
    "keys": {"project": "kv", "coefficient_norm": None},
    "no_norm": {"project": "qkv", "qk_channels": 16, "coefficient_norm": None, "scale": 0.1},
    "cosine": {"project": "qkv", "qk_channels": 16, "coefficient_norm": "cosine"},
    "nothing": {"project": "", "coefficient_norm": None, "scale": 0.05},
}


def materialised():
    """Have every layer inside taken for a wide one on a GPU."""
    return override_plan(spread="matrix_products")


def results(layer, inputs, added, weights):
    """Output, gradients and statistics, by name."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (*inputs, added)]
    y = layer(*leaves[:-1], residual=leaves[-1])
    return named_results(layer, leaves, y, weights.to(y.dtype))


def named_results(module, leaves, y, weights):
    gradients = torch.autograd.grad(y, [*leaves, *module.parameters()], weights)
    names = ["output", *(f"input {i}" for i in range(len(leaves))), *(name for name, _ in module.named_parameters())]
    return dict(zip(names, [y.detach(), *gradients], strict=True)) | dict(module.named_buffers())


def check(found, expected, dtype):
    assert list(found) == list(expected)
    floors = dict.fromkeys(found, 1e-3)
    if dtype in (torch.bfloat16, torch.float16):
        # Each is one number, what is left of a sum of either sign over all coefficients, perhaps next to nothing:
        # errors are measured against the largest gradient of the call, and the coefficients' spread.
        gradients = [x.abs().max().item() for name, x in expected.items() if name.endswith("map.weight")]
        floors |= {name: max([1e-3, *gradients]) for name in found if name.endswith("norm.weight")}
        for name in found:
            if name.endswith("norm.running_mean"):
                floors[name] = expected[name.replace("mean", "var")].sqrt().item()
    for name, one in found.items():
        assert relative_error(one, expected[name], floors[name]) < TOLERANCE[dtype], name


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False])
def test_equals_the_plain_layer(mode, options, dtype, layout, training):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS[options]).to(dtype).train(training)
    # Not negative and so with a large mean, as a backbone's features are.
    x = torch.randn(2, CHANNELS, 9, 7).relu().to(dtype)
    added = torch.randn(2, layer.out_channels, 9, 7).to(dtype)
    weights = torch.randn(added.shape)
    exact = copy.deepcopy(layer).double()
    with materialised():
        found = results(layer, [lay_out(x, layout)], added, weights)
    expected = results(exact, [x.double()], added.double(), weights.to(dtype).double())
    check(found, expected, dtype)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("training", [True, False])
def test_other_keys_and_values(mode, training):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS["maps"]).double().train(training)
    inputs = [torch.randn(2, CHANNELS, *grid, dtype=torch.float64) for grid in [(9, 7), (3, 4), (3, 4)]]
    added = torch.randn(2, layer.out_channels, 9, 7, dtype=torch.float64)
    plain = copy.deepcopy(layer)
    with materialised():
        found = results(layer, inputs, added, added)
    check(found, results(plain, inputs, added, added), torch.float64)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_second_derivatives(mode):
    torch.manual_seed(0)
    layer = KroneckerAttention(12, mode, project="qkv", qk_channels=3).double()
    x = torch.randn(1, 12, 2, 2, dtype=torch.float64, requires_grad=True)

    with materialised():
        assert torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_the_output_can_be_modified_in_place(mode):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS["maps"]).double()
    x = torch.randn(2, CHANNELS, 9, 7, dtype=torch.float64, requires_grad=True)
    with materialised():
        (expected,) = torch.autograd.grad((layer(x) * 2).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(layer(x).mul_(2).sum(), x)[0], expected)


def test_autocast():
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, **OPTIONS["maps"])
    x = torch.randn(2, CHANNELS, 9, 7).relu()
    expected = copy.deepcopy(layer).double()(x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16), materialised():
        found = layer(x)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, expected) < TOLERANCE[torch.bfloat16]
    found.float().sum().backward()
    assert layer.query_map.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_recorded(mode):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS["maps"]).double()
    with record_coefficients(layer) as recorded, materialised():
        output = layer(torch.randn(2, CHANNELS, 9, 7, dtype=torch.float64))
    torch.testing.assert_close(recorded[0].output(), output, rtol=1e-10, atol=1e-10)


def test_one_coefficient_has_no_variance():
    layer = KroneckerAttention(CHANNELS, **OPTIONS["maps"])
    with materialised(), pytest.raises(ValueError, match="more than one coefficient"):
        layer(torch.randn(1, CHANNELS, 1))


def test_compiles():
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, **OPTIONS["maps"])
    x = torch.randn(2, CHANNELS, 9, 7)
    with materialised():
        expected = copy.deepcopy(layer)(x)
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_segmentation_head(mode, layout, dtype, training):
    torch.manual_seed(0)
    head = KroneckerSegmentationHead(CHANNELS, 5, mode).to(dtype).train(training)
    for conv in head.classifiers():
        torch.nn.init.normal_(conv.weight, std=0.5)
    torch.nn.init.normal_(head.classifier.bias)
    exact = copy.deepcopy(head).double()
    x = torch.randn(2, CHANNELS, 9, 7).relu().to(dtype)

    def run(module):
        leaf = lay_out(x.to(module.classifier.weight.dtype), layout).requires_grad_()
        scores = module(leaf)
        assert scores.shape == (2, 5, 9, 7)
        return named_results(module, [leaf], scores, torch.ones_like(scores))

    with materialised():
        found = run(head)
    check(found, run(exact), dtype)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_several_heads_are_left_to_pytorch(mode):
    """The matrix is of one head: a layer of two must not be given one for both."""
    torch.manual_seed(0)
    layer, x = KroneckerAttention(8, mode, num_heads=2), torch.randn(2, 8, 5, 6)
    expected = copy.deepcopy(layer)(x)
    with materialised():
        torch.testing.assert_close(layer(x), expected)
