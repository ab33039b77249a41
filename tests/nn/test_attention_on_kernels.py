"""The attention layer on the fused kernels, through Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from kronattn.nn import KroneckerAttention
from kronattn.ops import backends
from tests.ops.cases import lay_out

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
