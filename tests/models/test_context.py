"""Any context layer in the place of attention: in KANet's layout, in a segmentation head, by name and by builder."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kronattn
from kronattn.measure.madd import count_madd
from kronattn.models import DeepLabV2
from kronattn.models.deeplab import ContextHead
from kronattn.models.files import Description, load_model, save_model
from kronattn.models.kanet import VARIANTS, KANet, with_context
from kronattn.nn import GlobalMean, KroneckerAttention, build_context, list_contexts, resize_scores
from tests.versions import skip_tied_export

CONTEXTS = list_contexts()
LAYERS = [name for name in CONTEXTS if name != "none"]
every_context = pytest.mark.parametrize("name", CONTEXTS)
every_layer = pytest.mark.parametrize("name", LAYERS)


def small(variant="kanet_kv", **options):
    torch.manual_seed(0)
    return KANet(variant, num_classes=5, width=0.25, **options)


def reaches_everything(model, x):
    """Every parameter has a gradient, and belongs to a module that is called."""
    called = set()
    for key, module in model.named_modules():
        module.register_forward_hook(lambda *_, key=key: called.add(key))
    model(x).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert key.rpartition(".")[0] in called, key


@every_context
class TestKANet:
    def test_trains(self, name):
        model = small(context=name, drop_rate=0.0)
        x = torch.randn(4, 3, 64, 48)
        assert model(x).shape == (4, 5)
        reaches_everything(model, x)

    def test_the_layer_is_where_attention_was(self, name):
        model, own = small(context=name), small()
        places = [key for key, module in own.named_modules() if isinstance(module, KroneckerAttention)]
        assert len(places) == 10
        if name == "none":
            assert not any(hasattr(module, "attn") for module in model.modules())
            return
        built = build_context(name, 8)
        for key in places:
            layer = model.get_submodule(key)
            assert type(layer) is type(built)
            assert layer.channels == own.get_submodule(key).channels

    def test_smaller_output_stride(self, name):
        model = small(context=name, output_stride=8).eval()
        assert model.forward_features(torch.randn(1, 3, 64, 64)).shape[2:] == (8, 8)

    def test_saved_and_loaded(self, name, tmp_path):
        options = {"width": 0.25, "context": name, "num_classes": 2}
        model = kronattn.create_model("kanet_kv", **options).eval()
        description = Description(
            model="kanet_kv", options=options, classes=["a", "b"], resize=64, size=64, mean=[0.5] * 3, std=[0.5] * 3
        )
        save_model(tmp_path / "weights.safetensors", model, description)
        again, _ = load_model(tmp_path / "weights.safetensors")
        x = torch.randn(1, 3, 64, 64)
        assert torch.equal(again.eval()(x), model(x))


@pytest.mark.parametrize(
    ("context", "variant"),
    [
        ("none", "kanet_without_kao"),
        ("kao_kv", "kanet_kv"),
        ("kao_qkv", "kanet_qkv"),
        ("attention", "attnnet"),
        ("attention_pool", "attnnet_pool"),
    ],
)
def test_names_of_the_papers_networks(context, variant):
    """A context's name gives the network of the paper that has it: the same weights, the same output."""
    model, own = small(context=context), small(variant)
    own.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model.eval()(x), own.eval()(x))


def test_controls_cost_what_kanet_costs():
    """The same parameters but for the norms of the coefficients, of which each attention has one."""
    parameters = {name: sum(p.numel() for p in KANet(context=name).parameters()) for name in LAYERS}
    assert parameters["global_mean"] == parameters["axis_means"] == parameters["kao_kv"] - 10
    cost = {
        name: count_madd(KANet(context=name), torch.empty(1, 3, 224, 224))
        for name in ("global_mean", "axis_means", "kao_qkv", "kao_kv")
    }
    assert cost["global_mean"] < cost["axis_means"] < cost["kao_qkv"] < cost["kao_kv"]


def test_context_of_a_module_without_skip():
    model = small("mobilenetv2_kao", context="global_mean")
    assert sum(isinstance(module, GlobalMean) for module in model.modules()) == 10


def test_options_and_builders():
    model = small(context="kao_qkv", context_options={"num_heads": 2})
    assert {m.num_heads for m in model.modules() if isinstance(m, KroneckerAttention)} == {2}
    model = small(context=nn.Identity)  # takes any arguments
    x = torch.randn(2, 3, 32, 32)
    assert model.eval()(x).shape == (2, 5)


def test_through_timm():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.create_model("kanet_kv", context="global_context", width=0.25, num_classes=3)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: small(context="global_maen"),
            ValueError,
            "unknown context 'global_maen': did you mean 'global_mean'",
        ),
        (
            lambda: small("mobilenetv2", context="kao_kv"),
            ValueError,
            "mobilenetv2 has no attention that context='kao_kv' could take the place of",
        ),
        (lambda: small(context_options={"num_heads": 2}), ValueError, "were given without context"),
        (
            lambda: kronattn.create_model("kanet_kv", context="global_mean", context_options={"num_heads": 2}),
            TypeError,
            "global_mean: got an unexpected keyword argument 'num_heads'",
        ),
        (
            lambda: DeepLabV2("aspp", context="kao_kv", backbone="kanet_kv"),
            ValueError,
            "ASPP has no attention that context='kao_kv' could take the place of",
        ),
        (lambda: ContextHead(8, 3, "global_maen"), ValueError, "did you mean 'global_mean'"),
        (lambda: ContextHead(8, 3, width=0), ValueError, "width must be an int from 1 up"),
        (lambda: ContextHead(8, 0), ValueError, "num_classes must be at least 1, not 0"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_variant_stays_as_it_was():
    before = copy.copy(VARIANTS)
    with_context("kanet_kv", "global_mean")
    assert before == VARIANTS


@every_context
class TestHead:
    def head(self, name, **options):
        torch.manual_seed(0)
        head = ContextHead(16, 5, name, **options)
        for conv in head.classifiers():  # large enough for differences to show
            nn.init.normal_(conv.weight, std=0.5)
        return head

    def test_equation(self, name):
        head = self.head(name).eval()
        x = torch.randn(2, 16, 7, 9)
        expected = (
            torch.einsum("kc,nchw->nkhw", head.classifier.weight[..., 0, 0], x) + head.classifier.bias[:, None, None]
        )
        if name not in ("none", "identity"):
            reduced = torch.einsum("kc,nchw->nkhw", head.reduce.weight[..., 0, 0], x)
            context = head.attn(reduced)
            assert context.shape == (2, 4, 7, 9)
            expected = expected + torch.einsum("kc,nchw->nkhw", head.context_classifier.weight[..., 0, 0], context)
        torch.testing.assert_close(head(x), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(head(x, size=(50, 70)), resize_scores(head(x), (50, 70)))

    def test_trains_and_takes_other_classes(self, name):
        head = self.head(name, width=8)
        reaches_everything(head, torch.randn(2, 16, 7, 9))
        head.reset_classifier(3)
        assert head(torch.randn(2, 16, 5, 6)).shape == (2, 3, 5, 6)

    def test_traces_and_exports(self, name):
        skip_tied_export(name == "attention_pool")
        model = nn.Sequential(nn.Conv2d(3, 16, 1), self.head(name)).eval()
        x = torch.randn(2, 3, 9, 11)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
        sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
        program = torch.export.export(model, (x,), dynamic_shapes=(sizes,))
        x = torch.randn(3, 3, 17, 6)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)

    def test_deeplab(self, name):
        options = {"backbone": "kanet_kv", "backbone_options": {"width": 0.25}}
        model = kronattn.create_model("deeplabv2_kao_kv", context=name, num_classes=3, **options)
        assert isinstance(model.head, ContextHead)
        assert model(torch.randn(2, 3, 65, 50)).shape == (2, 3, 65, 50)
        model.reset_classifier(4)
        assert model(torch.randn(2, 3, 65, 50)).shape == (2, 4, 65, 50)

    def test_device_and_dtype(self, name):
        head = ContextHead(16, 5, name, device="meta", dtype=torch.float64)
        assert {(p.device.type, p.dtype) for p in head.parameters()} == {("meta", torch.float64)}


@every_layer
def test_coefficients_alone_are_kept_from_decay(name):
    undecayed = small(context=name).no_weight_decay()
    assert bool(undecayed) == (name.startswith(("attention", "kao")))
