"""Batch norm and activation at once against PyTorch's own in float64: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from kronattn.nn import AttnSkipModule, BaseSkipModule, batch_norm_act, blocks
from kronattn.nn.batch_norm_act import batch_norm_unsupported_reason
from kronattn.nn.blocks import ConvNormAct, ReLU6
from kronattn.ops.triton.availability import interpreted
from tests.ops.cases import poison_empty, relative_error

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# What half precision leaves of a gradient that is a difference of larger ones.
TOLERANCE = 2e-2

if not ON_GPU and not interpreted():
    pytest.skip("neither a GPU nor Triton's interpreter", allow_module_level=True)

SHAPES = [(2, 8, 3, 5), (1, 24, 4, 4), (3, 16, 1, 7), (2, 72, 5, 3), (5, 8, 4, 1), (6, 8, 1, 1)]
LARGE = [(8, 32, 56, 56), (16, 144, 28, 28), (64, 960, 7, 7), (3, 1280, 7, 7), (2, 40, 111, 63)]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Whatever the launchers allocate comes full of NaN."""
    poison_empty(monkeypatch)


kernels = batch_norm_act._on_kernels


def maps(*shape, seed=0, offset=0.0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3 + offset
    return x.to(DEVICE, torch.bfloat16).contiguous(memory_format=torch.channels_last)


def norm_of(channels):
    norm = nn.BatchNorm2d(channels).to(DEVICE)
    generator = torch.Generator().manual_seed(5)
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean):
        tensor.copy_(torch.randn(channels, generator=generator))
    norm.running_var.copy_(torch.rand(channels, generator=generator) + 0.5)
    return norm


def expected(x, norm, act, concat):
    y = act(norm(x))
    return y if concat is None else torch.cat([y, concat], dim=1)


@pytest.mark.parametrize("act", [ReLU6, nn.ReLU, nn.Identity])
@pytest.mark.parametrize("concatenates", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *(LARGE if ON_GPU else [])], ids=str)
def test_training(shape, concatenates, act):
    x = maps(*shape, offset=2.0)
    concat = maps(shape[0], 8, *shape[2:], seed=1) if concatenates else None
    results = []
    for dtype, call in ((torch.bfloat16, kernels), (torch.float64, expected)):
        norm = norm_of(shape[1]) if dtype == torch.bfloat16 else norm_of(shape[1]).double()
        leaves = [y.detach().to(dtype).requires_grad_() for y in (x, concat) if y is not None]
        y = call(leaves[0], norm, act(), leaves[1] if concatenates else None)
        assert y.is_contiguous(memory_format=torch.channels_last)
        weights = maps(*y.shape, seed=2).to(dtype)
        gradients = torch.autograd.grad(y, [*leaves, norm.weight, norm.bias], weights)
        results.append([y, *gradients, norm.running_mean, norm.running_var])
        assert norm.num_batches_tracked == 1
    for actual, exact in zip(*results, strict=True):
        assert relative_error(actual, exact, floor=0.1) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *(LARGE if ON_GPU else [])], ids=str)
def test_evaluation(shape, dtype):
    x, concat = maps(*shape), maps(shape[0], 16, *shape[2:], seed=1)
    norm = norm_of(shape[1]).eval().to(dtype)
    with torch.no_grad():
        y = kernels(x, norm, ReLU6(), concat)
        exact = expected(x.double(), copy.deepcopy(norm).double(), ReLU6(), concat.double())
    assert relative_error(y, exact) < TOLERANCE


def test_gradients_from_slices():
    """The gradient that a concatenation hands back is a slice of a wider one: no copy, the right rows."""
    x = maps(2, 8, 3, 5).requires_grad_()
    y = kernels(x, norm_of(8), ReLU6(), None)
    (gradient,) = torch.autograd.grad(y, x, maps(2, 24, 3, 5, seed=3)[:, 8:16])
    z = x.detach().double().requires_grad_()
    exact = torch.autograd.grad(ReLU6()(norm_of(8).double()(z)), z, maps(2, 24, 3, 5, seed=3)[:, 8:16].double())[0]
    assert relative_error(gradient, exact, floor=0.1) < TOLERANCE


def test_same_input_same_bits():
    x = maps(4, 40, 9, 7)
    runs = []
    for _ in range(2):
        leaf, norm = x.detach().requires_grad_(), norm_of(40)
        y = kernels(leaf, norm, ReLU6(), None)
        runs.append([y, *torch.autograd.grad(y, [leaf, norm.weight, norm.bias], x)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_gradients_of_gradients():
    x = maps(2, 8, 3, 5).requires_grad_()
    y = kernels(x, norm_of(8), nn.Identity(), None)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    assert torch.isfinite(torch.autograd.grad(gradient.float().square().sum(), x)[0]).all()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_what_is_left_to_pytorch():
    x = maps(2, 8, 3, 5)
    hooked = norm_of(8)
    hooked.register_forward_hook(lambda *_: None)
    cases = [
        (x, norm_of(8), ReLU6(), None),
        (x, hooked, ReLU6(), "no plain nn.BatchNorm2d"),
        (x, norm_of(8), nn.Hardswish(), "Hardswish is no clamp"),
        (x.contiguous(), norm_of(8), ReLU6(), "must be channels last"),
        (x, nn.BatchNorm2d(8, affine=False).to(DEVICE), ReLU6(), "must have weight, bias"),
        (x, norm_of(8).eval(), ReLU6(), "no gradient"),
        (x, norm_of(8).bfloat16(), ReLU6(), "in float32"),
        (x, norm_of(8).half().eval().requires_grad_(False), ReLU6(), "in float32"),
        (x, norm_of(8).bfloat16().eval().requires_grad_(False), ReLU6(), None),
        (maps(1, 8, 1, 1), norm_of(8), ReLU6(), "more than one value"),
        (x.float(), norm_of(8), ReLU6(), "half precision"),
    ]
    for given, norm, act, reason in cases:
        found = batch_norm_unsupported_reason(given, norm, act)
        assert found == reason if reason is None else reason in found


def test_listeners_are_heard():
    """A module with a hook is called, whatever the path."""
    layer = ConvNormAct(8, 16).to(DEVICE, memory_format=torch.channels_last)
    heard = []
    for module in (layer.conv, layer.norm, layer.act):
        module.register_forward_hook(lambda module, *_: heard.append(module))
    for training in (True, False):
        with torch.autocast(DEVICE, dtype=torch.bfloat16), torch.set_grad_enabled(training):
            layer.train(training)(maps(2, 8, 3, 5))
    assert heard == [layer.conv, layer.norm, layer.act] * 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("block", [BaseSkipModule, AttnSkipModule])
def test_modules(block, training, monkeypatch):
    """A module of the networks is as close to float64 with the kernels as without."""
    torch.manual_seed(0)
    module = block(8, 8, expansion=3).to(DEVICE, torch.float32, memory_format=torch.channels_last).train(training)
    x = maps(2, 8, 6, 5)
    results = []
    for case in ("kernels", "plain", "exact"):
        reason = None if case == "kernels" else "a test"
        for place in (batch_norm_act, blocks):
            monkeypatch.setattr(place, "batch_norm_unsupported_reason", lambda *_, reason=reason: reason)
        copied = copy.deepcopy(module).double() if case == "exact" else copy.deepcopy(module)
        leaf = (x.double() if case == "exact" else x).detach().requires_grad_()
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=case != "exact"), torch.set_grad_enabled(training):
            y = copied(leaf)
        results.append([y])
        if training:
            y.backward(maps(*y.shape, seed=4).to(y.dtype))
            results[-1] += [leaf.grad, *(p.grad for p in copied.parameters())]
        results[-1] += list(copied.buffers())
    for actual, plain, exact in zip(*results, strict=True):
        usual = relative_error(plain, exact.double(), floor=0.3)
        assert relative_error(actual, exact.double(), floor=0.3) < max(2 * usual, 2e-2)


def test_a_compiler_sees_what_pytorch_does():
    """A graph that is being captured holds PyTorch's own norm, which compilers fuse by themselves."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph

    layer = ConvNormAct(8, 16).to(DEVICE, torch.bfloat16, memory_format=torch.channels_last)
    torch.compile(layer, fullgraph=True, backend=backend)(maps(2, 8, 3, 5), concat=maps(2, 8, 3, 5))
    assert "batch_norm" in graphs[0]


def test_conv_norm_act_concatenates():
    layer = ConvNormAct(3, 5).to(DEVICE)
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    assert layer(x, concat=x).shape == (2, 8, 4, 4)
    torch.testing.assert_close(layer(x, concat=x)[:, 5:], x)
