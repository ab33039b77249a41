"""Wide layers and heads with their coefficients built, at once and with their gradient by hand: on a GPU, or through
Triton's interpreter where there is none.

Memory that the launchers allocate is filled with NaN beforehand, so that whatever a kernel leaves out shows.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kronattn import record_coefficients
from kronattn.nn import KroneckerAttention, KroneckerSegmentationHead
from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.ops import backends, gpu
from tests.nn.test_attention_built import check, named_results
from tests.ops.cases import TOLERANCE, lay_out, poison_empty, relative_error

pytest.importorskip("triton", reason="Triton is not installed")

from kronattn.ops.triton import built_layer, rules

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHANNELS, GRID = 64, (13, 11)
MODES = ("kv", "qkv")
HALF = (torch.bfloat16, torch.float16)
OPTIONS = {
    "maps": {"project": "qkv", "qk_channels": 48, "out_channels": 24},
    "odd": {"project": "qkv", "qk_channels": 45, "out_channels": 5},
    "values": {},
    "keys": {"project": "kv", "coefficient_norm": None},
    "bare": {"project": ""},
}


@pytest.fixture
def seen(monkeypatch):
    """Have the kernels serve whatever they can, as for a wide layer on a GPU; which of the two passes were by hand."""
    eager = dataclasses.replace(backends.BACKENDS["triton"], worth_it=lambda *_: True)
    monkeypatch.setitem(backends.BACKENDS, "triton", eager)
    monkeypatch.setattr(gpu, "_WIDEST_FUSED", 0)
    on_gpu(monkeypatch, True)
    # PyTorch convolves float32 with the precision of tf32 unless told otherwise.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    poison_empty(monkeypatch)
    calls = []
    for name in ("_forward", "_gradients"):
        real = getattr(built_layer, name)
        monkeypatch.setattr(built_layer, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
    return calls


def on_gpu(monkeypatch, answer):
    monkeypatch.setattr(gpu, "on_gpu", lambda x: answer)


def features(dtype, layout="channels_last", batch=2):
    # Not negative and so with a large mean, as a backbone's features are.
    x = torch.randn(batch, CHANNELS, *GRID).relu().to(DEVICE, dtype)
    return lay_out(x, layout)


def make_layer(mode, options, dtype=torch.float32):
    torch.manual_seed(0)
    layer = KroneckerAttention(CHANNELS, mode, **OPTIONS[options]).to(DEVICE, dtype)
    _tell_apart(layer.norm)
    return layer


def make_head(mode, classes=5, dtype=torch.float32):
    torch.manual_seed(0)
    head = KroneckerSegmentationHead(CHANNELS, classes, mode, width=48).to(DEVICE, dtype)
    for conv in head.classifiers():
        torch.nn.init.normal_(conv.weight, std=0.5)
    torch.nn.init.normal_(head.classifier.bias)
    _tell_apart(head.attn.norm)
    return head


def _tell_apart(norm):
    """Statistics and a gain other than those that all norms start with."""
    if norm is not None:
        norm.bn.weight.data.fill_(0.75)
        norm.bn.running_mean.fill_(3.0)
        norm.bn.running_var.fill_(2.0)


def compare(module, x, monkeypatch, dtype):
    """Output, every gradient and the statistics against the plain module in float64."""
    exact = copy.deepcopy(module).double()
    found = []
    for one, answer in ((module, True), (exact, False)):
        on_gpu(monkeypatch, answer)
        leaf = x.to(next(one.parameters()).dtype if answer is False else dtype).detach()
        leaf = (leaf if answer is False else x.detach()).requires_grad_()
        y = one(leaf)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE, y.dtype)
        found.append(named_results(one, [leaf], y, weights))
    on_gpu(monkeypatch, True)
    check(*found, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False])
def test_equals_the_plain_layer(mode, options, dtype, layout, training, seen, monkeypatch):
    layer = make_layer(mode, options, dtype).train(training)
    compare(layer, features(dtype, layout), monkeypatch, dtype)
    assert seen == ["_forward", "_gradients"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("classes", "layout"), [(1, "contiguous"), (5, "channels_last"), (21, "channels_last"), (8, "contiguous")]
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_equals_the_plain_head(mode, classes, layout, dtype, training, seen, monkeypatch):
    head = make_head(mode, classes, dtype).train(training)
    compare(head, features(dtype, layout), monkeypatch, dtype)
    assert seen == ["_forward", "_gradients"]
