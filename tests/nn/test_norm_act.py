"""Batch norm and activation at once against PyTorch's own in float64: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from kronattn.nn import AttnSkipModule, BaseSkipModule, norm_act
from kronattn.nn.blocks import ConvNormAct, ReLU6
from kronattn.ops.triton import rules
from tests.ops.cases import poison_empty, relative_error

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# What half precision leaves of a gradient that is a difference of larger ones.
TOLERANCE = 2e-2

if not ON_GPU and not rules.interpreted():
    pytest.skip("neither a GPU nor Triton's interpreter", allow_module_level=True)

SHAPES = [(2, 8, 3, 5), (1, 24, 4, 4), (3, 16, 1, 7), (2, 72, 5, 3), (5, 8, 4, 1), (6, 8, 1, 1)]
LARGE = [(8, 32, 56, 56), (16, 144, 28, 28), (64, 960, 7, 7), (3, 1280, 7, 7), (2, 40, 111, 63)]


@pytest.fixture(autouse=True)
def _served(monkeypatch):
    """CPU tensors are taken too, and whatever the launchers allocate comes full of NaN."""
    if not ON_GPU:
        monkeypatch.setattr(
            norm_act,
            "norm_refused",
            lambda x: x.dtype != torch.bfloat16 or x.dim() != 4 or torch.compiler.is_compiling(),
        )
    poison_empty(monkeypatch)


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


def expected(x, norm, act, beside):
    y = act(norm(x))
    return y if beside is None else torch.cat([y, beside], dim=1)


@pytest.mark.parametrize("act", [ReLU6, nn.ReLU, nn.Identity])
@pytest.mark.parametrize("with_beside", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *(LARGE if ON_GPU else [])], ids=str)
def test_training(shape, with_beside, act):
    x = maps(*shape, offset=2.0)
    beside = maps(shape[0], 8, *shape[2:], seed=1) if with_beside else None
    results = []
    for dtype, call in ((torch.bfloat16, norm_act.norm_act_at_once), (torch.float64, expected)):
        norm = norm_of(shape[1]) if dtype == torch.bfloat16 else norm_of(shape[1]).double()
        leaves = [y.detach().to(dtype).requires_grad_() for y in (x, beside) if y is not None]
        y = call(leaves[0], norm, act(), leaves[1] if with_beside else None)
        assert y.is_contiguous(memory_format=torch.channels_last)
        weights = maps(*y.shape, seed=2).to(dtype)
        gradients = torch.autograd.grad(y, [*leaves, norm.weight, norm.bias], weights)
        results.append([y, *gradients, norm.running_mean, norm.running_var])
        assert norm.num_batches_tracked == 1
    for actual, exact in zip(*results, strict=True):
        assert relative_error(actual, exact, floor=0.1) < TOLERANCE


@pytest.mark.parametrize("shape", [*SHAPES, *(LARGE if ON_GPU else [])], ids=str)
def test_evaluation(shape):
    x, beside = maps(*shape), maps(shape[0], 16, *shape[2:], seed=1)
    norm = norm_of(shape[1]).eval()
    with torch.no_grad():
        y = norm_act.norm_act_at_once(x, norm, ReLU6(), beside)
        exact = expected(x.double(), copy.deepcopy(norm).double(), ReLU6(), beside.double())
    assert relative_error(y, exact) < TOLERANCE


def test_gradients_from_slices():
    """The gradient that a concatenation hands back is a slice of a wider one: no copy, the right rows."""
    x = maps(2, 8, 3, 5).requires_grad_()
    y = norm_act.norm_act_at_once(x, norm_of(8), ReLU6())
    (gradient,) = torch.autograd.grad(y, x, maps(2, 24, 3, 5, seed=3)[:, 8:16])
    z = x.detach().double().requires_grad_()
    exact = torch.autograd.grad(ReLU6()(norm_of(8).double()(z)), z, maps(2, 24, 3, 5, seed=3)[:, 8:16].double())[0]
    assert relative_error(gradient, exact, floor=0.1) < TOLERANCE


def test_same_input_same_bits():
    x = maps(4, 40, 9, 7)
    runs = []
    for _ in range(2):
        leaf, norm = x.detach().requires_grad_(), norm_of(40)
        y = norm_act.norm_act_at_once(leaf, norm, ReLU6())
        runs.append([y, *torch.autograd.grad(y, [leaf, norm.weight, norm.bias], x)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_gradients_of_gradients():
    x = maps(2, 8, 3, 5).requires_grad_()
    y = norm_act.norm_act_at_once(x, norm_of(8), nn.Identity())
    (gradient,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    assert torch.isfinite(torch.autograd.grad(gradient.float().square().sum(), x)[0]).all()


def test_what_is_left_to_pytorch():
    x = maps(2, 8, 3, 5)
    hooked = norm_of(8)
    hooked.register_forward_hook(lambda *_: None)
    assert norm_act.norm_act_at_once(x, hooked, ReLU6()) is None
    assert norm_act.norm_act_at_once(x, norm_of(8), nn.Hardswish()) is None
    assert norm_act.norm_act_at_once(x.contiguous(), norm_of(8), ReLU6()) is None
    assert norm_act.norm_act_at_once(x, nn.BatchNorm2d(8, affine=False).to(DEVICE), ReLU6()) is None
    assert norm_act.norm_act_at_once(x, norm_of(8).eval(), ReLU6()) is None, "evaluation with a gradient to come"
    assert norm_act.norm_act_at_once(maps(1, 8, 1, 1), norm_of(8), ReLU6()) is None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("block", [BaseSkipModule, AttnSkipModule])
def test_modules(block, training, monkeypatch):
    """A module of the networks is as close to float64 with the kernels as without."""
    torch.manual_seed(0)
    module = block(8, 8, expansion=3).to(DEVICE, torch.float32, memory_format=torch.channels_last).train(training)
    x = maps(2, 8, 6, 5)
    results = []
    for case in ("kernels", "plain", "exact"):
        if case == "plain":
            monkeypatch.setattr(norm_act, "norm_refused", lambda x: True)
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
    torch.compile(layer, fullgraph=True, backend=backend)(maps(2, 8, 3, 5), beside=maps(2, 8, 3, 5))
    assert "batch_norm" in graphs[0]


def test_conv_norm_act_puts_channels_beside():
    layer = ConvNormAct(3, 5).to(DEVICE)
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    assert layer(x, beside=x).shape == (2, 8, 4, 4)
    torch.testing.assert_close(layer(x, beside=x)[:, 5:], x)
