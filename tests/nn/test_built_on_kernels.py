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
    for one, leaf in ((module, x.detach()), (exact, x.detach().double())):
        on_gpu(monkeypatch, one is module)
        y = one(leaf.requires_grad_())
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        found.append(named_results(one, [leaf], y, weights.to(DEVICE, y.dtype)))
    on_gpu(monkeypatch, True)
    check(*found, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("options", "training"),
    [("maps", True), ("maps", False), ("odd", True), ("values", True), ("keys", True), ("bare", False)],
)
@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float32, "contiguous"), *((half, "channels_last") for half in HALF)], ids=str
)
def test_equals_the_plain_layer(mode, options, training, dtype, layout, seen, monkeypatch):
    layer = make_layer(mode, options, dtype).train(training)
    compare(layer, features(dtype, layout), monkeypatch, dtype)
    assert seen == ["_forward", "_gradients"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("classes", "layout", "training"),
    [(1, "contiguous", True), (5, "channels_last", False), (21, "channels_last", True), (8, "contiguous", False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_equals_the_plain_head(mode, classes, layout, training, dtype, seen, monkeypatch):
    head = make_head(mode, classes, dtype).train(training)
    compare(head, features(dtype, layout), monkeypatch, dtype)
    assert seen == ["_forward", "_gradients"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_other_layouts(mode, layout, seen, monkeypatch):
    compare(make_head(mode), features(torch.float32, layout), monkeypatch, torch.float32)
    assert seen == ["_forward", "_gradients"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [True, False])
def test_the_same_without_a_gradient(mode, training, seen):
    """And nothing but training moves the running statistics."""
    x = features(torch.bfloat16)
    head = make_head(mode, dtype=torch.bfloat16).train(training)
    other, before = copy.deepcopy(head), copy.deepcopy(dict(head.named_buffers()))
    expected = head(x)
    with torch.no_grad():
        assert torch.equal(other(x), expected)
    assert seen == ["_forward", "_forward"]
    for name, buffer in head.named_buffers():
        assert torch.equal(buffer, dict(other.named_buffers())[name])
        assert torch.equal(buffer, before[name]) != training
    with torch.inference_mode():
        assert other.eval()(x).shape == expected.shape


@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_every_time(mode, seen):
    x = features(torch.bfloat16)
    found = []
    for _ in range(2):
        head, leaf = make_head(mode, dtype=torch.bfloat16), x.detach().requires_grad_()
        y = head(leaf)
        found.append(named_results(head, [leaf], y, torch.ones_like(y)))
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


@pytest.mark.parametrize("mode", MODES)
def test_only_what_is_wanted(mode, seen):
    """Everything but one frozen: the same gradient as with everything wanted."""
    x = features(torch.float32, batch=1)
    head = make_head(mode)
    everything = {"x": x.requires_grad_(), **dict(head.named_parameters())}
    y = head(x)
    weights = torch.randn_like(y)
    expected = dict(zip(everything, torch.autograd.grad(y, everything.values(), weights), strict=True))
    for name, wanted in everything.items():
        for one in everything.values():
            one.requires_grad_(one is wanted)
        # The running statistics differ by now, and are not used in training.
        torch.testing.assert_close(torch.autograd.grad(head(x), wanted, weights)[0], expected[name])
    assert seen == ["_forward", "_gradients"] * (1 + len(everything))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives(mode, training, seen, monkeypatch):
    x = features(torch.float32, batch=1)
    head = make_head(mode).train(training)
    exact = copy.deepcopy(head).double()
    names = ["x", *dict(head.named_parameters())]
    found = []
    for one, leaf in ((head, x.detach()), (exact, x.detach().double())):
        on_gpu(monkeypatch, one is head)
        sources = [leaf.requires_grad_(), *one.parameters()]
        first = torch.autograd.grad(one(leaf).square().mean(), sources, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        second = torch.autograd.grad(penalty, sources, allow_unused=True)
        found.append([dict(zip(names, gradients, strict=True)) for gradients in (first, second)])
    # The first gradients are by autograd; the second ones come to the scores' own, which need not be.
    assert seen == ["_forward", "_gradients"]
    for actual, expected in zip(*found, strict=True):
        # The gain multiplies what the query's map does, so it receives the sum of all that the map's entries receive,
        # each times its entry. These nearly cancel at times, and its error is theirs.
        terms = (exact.attn.query_map.weight * expected["attn.query_map.weight"]).abs().sum().item()
        for name, one in actual.items():
            assert (one is None) == (expected[name] is None), name
            if one is not None:
                floor = terms if name == "attn.norm.bn.weight" else 1e-3
                assert relative_error(one, expected[name], floor) < TOLERANCE[torch.float32], name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("classes", [5, 8])
def test_the_output_can_be_modified_in_place(mode, classes, seen):
    x = features(torch.float32, batch=1).requires_grad_()
    head = make_head(mode, classes)
    (expected,) = torch.autograd.grad((head(x) * 2).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(head(x).mul_(2).sum(), x)[0], expected)
    assert seen == ["_forward", "_gradients"] * 2


@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode, seen):
    """Weights and their gradients stay in float32."""
    x = features(torch.float32)
    head = make_head(mode)
    exact = copy.deepcopy(head).double()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = head(x)
    assert y.dtype == torch.bfloat16
    weights = torch.randn_like(y)
    found = named_results(head, [], y, weights)
    assert seen == ["_forward", "_gradients"]
    assert all(found[name].dtype == torch.float32 for name, _ in head.named_parameters())
    check(found, named_results(exact, [], exact(x.double()), weights.double()), torch.bfloat16)


@pytest.mark.parametrize("mode", MODES)
def test_recorded(mode, seen):
    """The same scores to the bit, and what was recorded is the part that comes from the context."""
    x = features(torch.float32, batch=1)
    head = make_head(mode).eval()
    expected = head(x)
    with record_coefficients(head) as recorded:
        assert torch.equal(head(x), expected)
    assert seen == ["_forward"] * 2
    context = expected - torch.nn.functional.conv2d(x, head.classifier.weight, head.classifier.bias)
    torch.testing.assert_close(recorded[0].output(), context, rtol=1e-4, atol=1e-4)


class TestStepsAside:
    """For whoever listens or looks on; the result is the same."""

    def compare(self, head, x, expected, seen):
        seen.clear()
        torch.testing.assert_close(head(x), expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", ["classifier", "context_classifier"])
    def test_for_hooks_of_the_classifiers(self, name, seen):
        head, x = make_head("kv").eval(), features(torch.float32, batch=1)
        expected, heard = head(x), []
        getattr(head, name).register_forward_hook(lambda *_: heard.append(1))
        self.compare(head, x, expected, seen)
        assert heard == [1]
        # The attention itself is still done at once.
        assert seen == ["_forward"]

    def test_for_hooks_of_the_norm(self, seen):
        head, x = make_head("kv").eval(), features(torch.float32, batch=1)
        expected, heard = head(x), []
        head.attn.norm.register_forward_hook(lambda *_: heard.append(1))
        self.compare(head, x, expected, seen)
        assert heard == [1]
        assert not seen

    def test_not_for_hooks_of_the_attention(self, seen):
        head, x = make_head("kv").eval(), features(torch.float32, batch=1)
        expected, heard = head(x), []
        head.attn.register_forward_hook(lambda *_: heard.append(1))
        self.compare(head, x, expected, seen)
        assert heard == [1]
        assert seen == ["_forward"]

    @pytest.mark.parametrize("mode", MODES)
    def test_where_operators_are_watched(self, mode, seen):
        head, x = make_head(mode).eval(), features(torch.float32, batch=1)
        expected = head(x)
        with FlopCounterMode(display=False) as counter:
            self.compare(head, x, expected, seen)
        assert not seen
        assert counter.get_total_flops() > 0

    @pytest.mark.parametrize("mode", MODES)
    def test_for_functional_transforms(self, mode, seen):
        layer, x = make_layer(mode, "keys"), features(torch.float32, batch=1)
        found = torch.func.grad(lambda w: torch.func.functional_call(layer, w, (x,)).square().sum())(
            dict(layer.named_parameters())
        )
        assert not seen
        layer(x).square().sum().backward()
        assert seen == ["_forward", "_gradients"]
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4)

    def test_for_more_keys_than_it_holds(self, seen, monkeypatch):
        head, x = make_head("kv").eval(), features(torch.float32, batch=1)
        expected = head(x)
        monkeypatch.setattr(rules, "_MOST_BUILT_KEYS", sum(GRID))
        self.compare(head, x, expected, seen)
        assert not seen
        monkeypatch.setattr(rules, "_MOST_BUILT_KEYS", sum(GRID) + 1)
        self.compare(head, x, expected, seen)
        assert seen == ["_forward"]

    @pytest.mark.parametrize("options", [{"scale": 0.5}, {"num_heads": 2}])
    def test_for_settings_it_does_not_have(self, options, seen):
        head = KroneckerSegmentationHead(CHANNELS, 5, width=48, **options).to(DEVICE).eval()
        assert head(features(torch.float32, batch=1)).shape == (1, 5, *GRID)
        assert not seen

    def test_for_float64(self, seen):
        make_head("kv", dtype=torch.float64)(features(torch.float64))
        assert not seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_skip_is_a_map_of_the_query(mode, at_once, bias, seen, monkeypatch):
    on_gpu(monkeypatch, at_once)
    layer, x = make_layer(mode, "maps").eval(), features(torch.float32, batch=1)
    read_out, weight = torch.randn(5, 24, device=DEVICE), torch.randn(5, CHANNELS, device=DEVICE)
    skip = weight, torch.randn(5, device=DEVICE) if bias else None
    added = torch.randn(1, 5, *GRID, device=DEVICE)
    found = layer(x, added=added, read_out=read_out, skip=skip)
    assert len(seen) == at_once
    expected = layer(x, added=added, read_out=read_out) + torch.einsum("kc,nchw->nkhw", weight, x)
    if bias:
        expected = expected + skip[1][:, None, None]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
