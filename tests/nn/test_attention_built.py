"""Attention with its coefficients built, as wide layers do on a GPU: the same on any device as without.

Here in plain PyTorch; on the kernels in test_built_on_kernels.py.
"""

from __future__ import annotations

import copy

import pytest
import torch

from kronattn import record_coefficients
from kronattn.nn import KroneckerAttention, KroneckerSegmentationHead
from kronattn.ops import built, gpu
from tests.ops.cases import DTYPES, TOLERANCE, lay_out, relative_error

CHANNELS = 64
OPTIONS = {
    "maps": {"project": "qkv", "qk_channels": 48, "out_channels": 24},
    "few": {"project": "qkv", "qk_channels": 6, "scale": 0.5},  # the queries are mapped rather than the keys
    "values": {},
    "keys": {"project": "kv", "coefficient_norm": None},
    "no_norm": {"project": "qkv", "qk_channels": 16, "coefficient_norm": None, "scale": 0.1},
    "nothing": {"project": "", "coefficient_norm": None, "scale": 0.05},
}


@pytest.fixture
def calls(monkeypatch):
    """Have everything taken for a wide layer on a GPU; how often coefficients were built."""
    seen = []
    real = built.coefficients
    monkeypatch.setattr(built, "coefficients", lambda *a: seen.append(a) or real(*a))
    monkeypatch.setattr(gpu, "_WIDEST_FUSED", 0)
    monkeypatch.setattr(gpu, "on_gpu", lambda x: True)
    return seen


def results(layer, inputs, added, weights):
    """Output, gradients and statistics, by name."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (*inputs, added)]
    y = layer(*leaves[:-1], added=leaves[-1])
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
        floors |= {name: max([1e-3, *gradients]) for name in found if name.endswith("norm.bn.weight")}
        for name in found:
            if name.endswith("norm.bn.running_mean"):
                floors[name] = expected[name.replace("mean", "var")].sqrt().item()
    for name, one in found.items():
        assert relative_error(one, expected[name], floors[name]) < TOLERANCE[dtype], name


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False])
def test_equals_the_plain_layer(mode, options, dtype, layout, training, calls, monkeypatch):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS[options]).to(dtype).train(training)
    # Not negative and so with a large mean, as a backbone's features are.
    x = torch.randn(2, CHANNELS, 9, 7).relu().to(dtype)
    added = torch.randn(2, layer.out_channels, 9, 7).to(dtype)
    weights = torch.randn(added.shape)
    exact = copy.deepcopy(layer).double()
    found = results(layer, [lay_out(x, layout)], added, weights)
    assert len(calls) == 1
    monkeypatch.setattr(gpu, "on_gpu", lambda x: False)
    expected = results(exact, [x.double()], added.double(), weights.to(dtype).double())
    assert len(calls) == 1
    check(found, expected, dtype)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("training", [True, False])
def test_other_keys_and_values(mode, training, calls, monkeypatch):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS["maps"]).double().train(training)
    inputs = [torch.randn(2, CHANNELS, *grid, dtype=torch.float64) for grid in [(9, 7), (3, 4), (3, 4)]]
    added = torch.randn(2, layer.out_channels, 9, 7, dtype=torch.float64)
    plain = copy.deepcopy(layer)
    found = results(layer, inputs, added, added)
    assert len(calls) == 1
    monkeypatch.setattr(gpu, "on_gpu", lambda x: False)
    check(found, results(plain, inputs, added, added), torch.float64)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_second_derivatives(mode, calls):
    torch.manual_seed(0)
    layer = KroneckerAttention(12, mode, project="qkv", qk_channels=3).double()
    x = torch.randn(1, 12, 2, 2, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradgradcheck(layer, (x,))
    assert calls


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("frozen", ["x", "weights"])
def test_only_what_is_wanted(mode, frozen, calls):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS["maps"]).double()
    x = torch.randn(2, CHANNELS, 9, 7, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, layer.out_channels, 9, 7, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x), [x, layer.key_map.weight], weights)
    wanted, index = (layer.key_map.weight, 1) if frozen == "x" else (x, 0)
    (x if frozen == "x" else layer).requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(layer(x), [wanted], weights)[0], expected[index])
    assert len(calls) == 2


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_functional_transforms(mode, calls):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS["maps"], coefficient_norm=None).double()
    x = torch.randn(2, CHANNELS, 9, 7, dtype=torch.float64)
    found = torch.func.grad(lambda w: torch.func.functional_call(layer, w, (x,)).square().sum())(
        dict(layer.named_parameters())
    )
    layer(x).square().sum().backward()
    assert len(calls) == 2
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_the_output_can_be_modified_in_place(mode, calls):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS["maps"]).double()
    x = torch.randn(2, CHANNELS, 9, 7, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad((layer(x) * 2).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(layer(x).mul_(2).sum(), x)[0], expected)
    assert len(calls) == 2


def test_autocast(calls):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, **OPTIONS["maps"])
    x = torch.randn(2, CHANNELS, 9, 7).relu()
    expected = copy.deepcopy(layer).double()(x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, expected) < TOLERANCE[torch.bfloat16]
    found.float().sum().backward()
    assert layer.query_map.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_recorded(mode, calls):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS["maps"]).double()
    with record_coefficients(layer) as recorded:
        output = layer(torch.randn(2, CHANNELS, 9, 7, dtype=torch.float64))
    assert len(calls) == 1
    torch.testing.assert_close(recorded[0].output(), output, rtol=1e-10, atol=1e-10)


def test_one_coefficient_has_no_variance(calls):
    layer = KroneckerAttention(CHANNELS, **OPTIONS["maps"])
    x = torch.randn(1, CHANNELS, 1)
    with pytest.raises(ValueError, match="more than one coefficient"):
        layer(x)


class TestWhere:
    def built(self, calls, shape=(2, CHANNELS, 9, 7), **options):
        before = len(calls)
        KroneckerAttention(shape[1], **options)(torch.randn(shape))
        return len(calls) > before

    def test_not_on_the_cpu(self, calls, monkeypatch):
        assert self.built(calls)
        monkeypatch.setattr(gpu, "on_gpu", lambda x: x.is_cuda)
        assert not self.built(calls)

    def test_not_with_channels_that_fused_attention_is_fast_for(self, calls, monkeypatch):
        monkeypatch.setattr(gpu, "_WIDEST_FUSED", CHANNELS)
        assert not self.built(calls)

    def test_not_where_the_matrix_is_more_than_half_of_the_features(self, calls):
        assert self.built(calls, (2, CHANNELS, 16, 16))
        assert not self.built(calls, (2, CHANNELS, 16, 17))
        assert self.built(calls, (2, CHANNELS, 16, 17), mode="qkv")

    def test_not_for_heads_or_a_norm_for_each_key(self, calls):
        assert not self.built(calls, num_heads=2)
        assert not self.built(calls, coefficient_norm="batch_per_key", grid=(9, 7))

    def test_not_for_an_empty_batch(self, calls):
        assert not self.built(calls, (0, CHANNELS, 9, 7))

    def test_not_in_a_captured_graph(self, calls):
        layer = KroneckerAttention(CHANNELS).eval()
        program = torch.export.export(layer, (torch.randn(2, CHANNELS, 9, 7),))
        assert not calls
        assert any("scaled_dot_product_attention" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_segmentation_head(mode, layout, dtype, training, calls, monkeypatch):
    """Classes in eights inside, and as many as there are outside."""
    torch.manual_seed(0)
    head = KroneckerSegmentationHead(CHANNELS, 5, mode).to(dtype).train(training)
    for conv in head.classifiers():
        torch.nn.init.normal_(conv.weight, std=0.5)
    torch.nn.init.normal_(head.classifier.bias)
    exact = copy.deepcopy(head).double()
    x = torch.randn(2, CHANNELS, 9, 7).relu().to(dtype)
    found = []
    for module, on_gpu in ((head, True), (exact, False)):
        monkeypatch.setattr(gpu, "on_gpu", lambda x, on_gpu=on_gpu: on_gpu)
        leaf = lay_out(x.to(module.classifier.weight.dtype), layout).requires_grad_()
        scores = module(leaf)
        assert scores.shape == (2, 5, 9, 7)
        assert scores.is_contiguous() or scores.is_contiguous(memory_format=torch.channels_last)
        found.append(named_results(module, [leaf], scores, torch.ones_like(scores)))
    assert len(calls) == 1
    check(*found, dtype)
