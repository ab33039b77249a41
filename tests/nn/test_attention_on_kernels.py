"""The attention layer on the fused kernels, through Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from kronattn.nn import KroneckerAttention, KroneckerSegmentationHead
from kronattn.ops import backends, gpu
from tests.ops.cases import TOLERANCE, lay_out, poison_empty, relative_error

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernels(monkeypatch):
    """Let "auto" pick the kernels wherever they can run."""
    eager = dataclasses.replace(backends.BACKENDS["triton"], worth_it=lambda *_: True)
    monkeypatch.setitem(backends.BACKENDS, "triton", eager)
    monkeypatch.setattr(backends, "_AUTOMATIC", ("triton", "torch"))


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_heads": 2, "project": "qkv"},
        {"coefficient_norm": "batch_per_key", "grid": (5, 6)},
        {"coefficient_norm": None, "scale": 0.5, "project": ""},
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_equals_the_plain_layer(mode, layout, options, training, kernels, monkeypatch):
    torch.manual_seed(0)
    layer = KroneckerAttention(8, mode, **options).to(DEVICE).train(training)
    plain = copy.deepcopy(layer)
    x = lay_out(torch.randn(2, 8, 5, 6, device=DEVICE), layout)
    results = []
    for module, automatic in ((layer, ("triton", "torch")), (plain, ("torch",))):
        monkeypatch.setattr(backends, "_AUTOMATIC", automatic)
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = module(leaf, added=leaf)
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters()), *module.buffers()])
    for fused, expected in zip(*results, strict=True):
        torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_a_head_too_wide_for_them_averages_by_the_kernel(mode, layout, dtype, training, kernels, monkeypatch):
    from kronattn.ops.triton import eager

    poison_empty(monkeypatch)
    # PyTorch convolves float32 with the precision of tf32 unless told otherwise.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    seen = []
    for name in ("averages_forward", "outer_sum_forward"):
        real = getattr(eager, name)
        monkeypatch.setattr(eager, name, lambda *a, real=real, name=name, **k: seen.append(name) or real(*a, **k))
    torch.manual_seed(0)
    # With a scale, the layer is not done at once.
    head = KroneckerSegmentationHead(520, 5, mode, width=64, scale=0.5).to(DEVICE, dtype).train(training)
    exact = copy.deepcopy(head).double()
    x = lay_out(torch.randn(2, 520, 3, 5, device=DEVICE).relu().to(dtype), layout)
    results = []
    for module, on_gpu in ((head, True), (exact, False)):
        monkeypatch.setattr(gpu, "on_gpu", lambda x, on_gpu=on_gpu: on_gpu)
        leaf = x.to(module.classifier.weight.dtype).detach().clone(memory_format=torch.preserve_format).requires_grad_()
        scores = module(leaf)
        results.append(
            [scores, *torch.autograd.grad(scores.square().sum(), [leaf, *module.attn.value_map.parameters()])]
        )
    assert seen == ["averages_forward", "outer_sum_forward"]
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_functional_gradients_of_the_weights_alone(mode, kernels):
    """The features are plain tensors then; torch.func still does not see through the kernels."""
    torch.manual_seed(0)
    layer = KroneckerAttention(8, mode, coefficient_norm=None).to(DEVICE)
    x = torch.randn(2, 8, 5, 6, device=DEVICE)
    found = torch.func.grad(lambda weights: torch.func.functional_call(layer, weights, (x,)).square().sum())(
        dict(layer.named_parameters())
    )
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4)
