"""Every network of Table 1's family: exact cost, training, sizes, capture, and timm's contract."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import kronattn
from kronattn.measure.madd import count_madd
from kronattn.models.kanet import TABLE_1, VARIANTS, KANet
from kronattn.nn import AttnModule, AttnSkipModule, BaseSkipModule
from kronattn.nn.coefficient_norm import CoefficientNorm
from tests.versions import skip_tied_export

# Parameters without batch norm, and multiply-adds for one 224×224 image.
EXACT = {
    "mobilenetv2": (3_470_760, 300_774_272),
    "mobilenetv2_kao": (3_462_120, 298_649_632),
    "kanet_kv": (3_449_448, 288_413_728),
    "kanet_qkv": (3_449_448, 281_119_392),
    "kanet_qkv_as_printed": (3_449_448, 281_119_392),
    "attnnet": (3_449_448, 365_374_304),
    "attnnet_pool": (3_449_448, 300_248_480),
    "kanet_without_kao": (3_458_088, 290_538_368),
}
SMALL = {"num_classes": 10, "width": 0.25}


def small(name, **options):
    torch.manual_seed(0)
    return kronattn.create_model(name, **(SMALL | options))


def by_hand(variant: str, size: int = 224) -> tuple[int, int]:
    """Parameters without batch norm and MAdd from the paper's text alone: no network is built."""
    size = -(-size // 2)
    c, params, madd = 32, 3 * 32 * 9, 3 * 32 * 9 * size**2
    attends = variant not in ("mobilenetv2", "kanet_without_kao")
    skips = not variant.startswith("mobilenetv2")
    for row in TABLE_1:
        for position in range(row.repeats):
            stride, d, r = row.stride if position == 0 else 1, row.channels, row.expansion
            out = -(-size // stride)
            attention = row.attends and attends
            # A module that would attend is an ordinary BaseModule in kanet_without_kao.
            kept = c if (attention or (skips and not row.attends)) and r > 1 else 0
            new = 0 if r == 1 else r * c - kept
            deep = new if attention else r * c
            params += c * new + 9 * deep + r * c * d
            madd += size**2 * c * new + out**2 * (9 * deep + r * c * d)
            if attention:
                tokens, pooled = 2 * size, (-(-size // 2)) ** 2
                queries, keys = {
                    "kanet_qkv": (tokens, tokens),
                    "kanet_qkv_as_printed": (tokens, tokens),
                    "attnnet": (size**2, size**2),
                    "attnnet_pool": (size**2, pooled),
                }.get(variant, (size**2, tokens))
                params += c * c
                madd += queries * keys * 2 * c + keys * c * c
            c, size = d, out
    params += c * 1280 + 1280 * 1000 + 1000
    madd += size**2 * c * 1280 + 1280 * 1000
    return params, madd


@pytest.mark.parametrize("name", VARIANTS)
class TestCost:
    def test_exact_figures(self, name):
        model = kronattn.create_model(name)
        norms = {
            id(p) for m in model.modules() if isinstance(m, nn.BatchNorm2d | CoefficientNorm) for p in m.parameters()
        }
        params = sum(p.numel() for p in model.parameters() if id(p) not in norms)
        madd = count_madd(model, torch.empty(1, 3, 224, 224))
        assert (params, madd) == EXACT[name] == by_hand(name)

    def test_against_an_independent_counter(self, name):
        fvcore = pytest.importorskip("fvcore.nn", reason="fvcore is not installed")
        model = small(name).eval()
        x = torch.randn(1, 3, 64, 96)
        analysis = fvcore.FlopCountAnalysis(model, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        # Two products that fvcore has no rule for.
        analysis.set_op_handle("aten::baddbmm", _baddbmm_madd, "aten::scaled_dot_product_attention", _attention_madd)
        counts = analysis.by_operator()
        counts.pop("batch_norm")  # which the paper does not count
        assert count_madd(model, x) == sum(counts.values())


def _sizes(value):
    return value.type().sizes()


def _baddbmm_madd(inputs, outputs):
    batch, rows, inner = _sizes(inputs[1])
    return Counter({"baddbmm": batch * rows * inner * _sizes(inputs[2])[-1]})


def _attention_madd(inputs, outputs):
    query, key, value = (_sizes(x) for x in inputs[:3])
    return Counter({"attention": math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])})


# One of each operator; the others differ in what is around it.
EXPORTED = ("kanet_kv", "kanet_qkv", "attnnet_pool")


@pytest.mark.parametrize(
    "name", [name if name in EXPORTED else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_export_with_dynamic_sizes(name):
    skip_tied_export(name == "attnnet_pool")
    model = small(name).eval()
    sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    program = torch.export.export(model, (torch.randn(3, 3, 96, 128),), dynamic_shapes=(sizes,))
    for shape in [(2, 3, 80, 112), (4, 3, 100, 72)]:
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
class TestNetwork:
    def test_a_step_lowers_the_loss_and_reaches_every_parameter(self, name):
        model = small(name, drop_rate=0.0)
        x, y = torch.randn(4, 3, 96, 96), torch.arange(4)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for _ in range(5):
            loss = nn.functional.cross_entropy(model(x), y)
            optimiser.zero_grad()
            loss.backward()
            for key, parameter in model.named_parameters():
                assert parameter.grad is not None, key
                assert torch.isfinite(parameter.grad).all(), key
                assert parameter.grad.abs().sum() > 0, key
            optimiser.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]

    @pytest.mark.parametrize("size", [(32, 32), (33, 47), (64, 40), (97, 32)])
    def test_any_size_from_32_up(self, name, size):
        assert small(name).eval()(torch.randn(1, 3, *size)).shape == (1, 10)

    def test_state_dict_and_seed(self, name):
        first, second = small(name), small(name)
        assert all(
            torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
        )
        torch.manual_seed(1)
        third = kronattn.create_model(name, **SMALL)
        kronattn.models.load_weights(third, first.state_dict())
        x = torch.randn(1, 3, 48, 48)
        assert torch.equal(first.eval()(x), third.eval()(x))

    def test_channels_last_and_autocast(self, name):
        model = small(name).eval()
        x = torch.randn(2, 3, 64, 48)
        expected = model(x)
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)
        xl = x.to(memory_format=torch.channels_last)
        torch.testing.assert_close(last(xl), expected, rtol=1e-3, atol=1e-3)
        features = last.forward_features(xl)
        assert features.is_contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            torch.testing.assert_close(last(xl), expected, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(x).dtype == torch.bfloat16

    @pytest.mark.filterwarnings("ignore")
    def test_jit_trace(self, name):
        model = small(name).eval()
        x = torch.randn(1, 3, 64, 64)
        traced = torch.jit.trace(model, x)
        torch.testing.assert_close(traced(x + 1), model(x + 1), rtol=1e-3, atol=1e-3)

    def test_fx_feature_extraction(self, name):
        extraction = pytest.importorskip("torchvision.models.feature_extraction", reason="torchvision is not installed")
        model = small(name).eval()
        extractor = extraction.create_feature_extractor(model, ["stages.3", "stages.9"])
        x = torch.randn(1, 3, 64, 64)
        out = extractor(x)
        torch.testing.assert_close(out["stages.9"], model.forward_intermediates(x, [4], intermediates_only=True)[0])

    def test_checkpointing_gives_the_same_gradients(self, name):
        model = small(name, drop_rate=0.0)
        x = torch.randn(2, 3, 32, 32)
        gradients = []
        for enable in (False, True):
            twin = copy.deepcopy(model)
            twin.set_grad_checkpointing(enable)
            twin(x).sum().backward()
            gradients.append([p.grad for p in twin.parameters()])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)


def test_classes_may_be_counted_by_numpy():
    labels = np.array([0, 2, 1])
    assert KANet("kanet_kv", num_classes=labels.max() + 1, width=0.25)(torch.randn(1, 3, 64, 64)).shape == (1, 3)


def test_stages_are_called_as_the_module_they_are():
    """What is put around the stages, or hooked to them, takes part."""
    model = KANet("kanet_kv", num_classes=3, width=0.25).eval()
    seen = []
    model.stages.register_forward_hook(lambda module, arguments, output: seen.append(output.shape))
    x = torch.randn(1, 3, 64, 64)
    expected = model(x)
    assert len(seen) == 1
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(x), expected)
    assert len(seen) == 1  # one by one, since each is recomputed by itself


def test_table_1_says_where_the_attention_is():
    model = KANet("kanet_kv")
    assert sum(isinstance(m, AttnSkipModule) for m in model.modules()) == 10
    assert sum(isinstance(m, BaseSkipModule) for m in model.modules()) == 7
    kao = KANet("mobilenetv2_kao")
    assert sum(isinstance(m, AttnModule) and not isinstance(m, AttnSkipModule) for m in kao.modules()) == 10


def test_arguments():
    model = small("kanet_kv", in_chans=1, stem_stride=1, drop_rate=0.5, act_layer=nn.SiLU, global_pool="avgmax")
    assert model.head_drop.p == 0.5
    assert model.stem.conv.stride == (1, 1)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 10)
    assert [info["reduction"] for info in model.feature_info] == [1, 2, 4, 8, 16]
    assert small("kanet_kv", norm_layer=nn.InstanceNorm2d)(torch.randn(2, 3, 64, 64)).shape == (2, 10)
    weights = [m.weight for m in small("kanet_kv").modules() if isinstance(m, nn.Conv2d) and m.groups == 1]
    for weight in weights:  # Xavier: uniform within ±sqrt(6 / (fan in + fan out))
        fan = (weight.shape[0] + weight.shape[1]) * weight[0, 0].numel()
        assert weight.abs().max() <= (6 / fan) ** 0.5 + 1e-6
        assert weight.std().item() == pytest.approx((2 / fan) ** 0.5, rel=0.25)


class TestHeads:
    def test_without_classifier_and_reset(self):
        model = small("kanet_kv", num_classes=0)
        x = torch.randn(2, 3, 64, 64)
        assert model(x).shape == (2, model.num_features)
        model.reset_classifier(7)
        assert model(x).shape == (2, 7)
        assert model.get_classifier().out_features == 7
        model.reset_classifier(0, "")
        assert model(x).shape == (2, model.num_features, 2, 2)
        assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, model.num_features, 2, 2)

    def test_intermediates(self):
        model = small("kanet_kv").eval()
        x = torch.randn(1, 3, 64, 96)
        final, features = model.forward_intermediates(x)
        assert [f.shape[1] for f in features] == [info["num_chs"] for info in model.feature_info]
        assert [64 // f.shape[2] for f in features] == [2, 4, 8, 16, 32]
        torch.testing.assert_close(final, model.forward_features(x))
        last_two = model.forward_intermediates(x, 2, stop_early=True, intermediates_only=True)
        torch.testing.assert_close(last_two, features[-2:])
        assert model.prune_intermediate_layers([1]) == [1]
        pruned = model.forward_intermediates(x, [1], intermediates_only=True)
        torch.testing.assert_close(pruned[0], features[1])

    def test_no_weight_decay_names_parameters(self):
        model = small("kanet_kv")
        names = model.no_weight_decay()
        assert len(names) == 10
        assert names <= {name for name, _ in model.named_parameters()}
        assert small("mobilenetv2").no_weight_decay() == set()


class TestTimm:
    @pytest.fixture(autouse=True)
    def _timm(self):
        self.timm = pytest.importorskip("timm", reason="timm is not installed: pip install 'kronattn[timm]'")

    @pytest.mark.parametrize("name", VARIANTS)
    def test_created_by_timm(self, name):
        assert self.timm.is_model(name)
        torch.manual_seed(0)
        model = self.timm.create_model(name, num_classes=10, width=0.25)
        x = torch.randn(1, 3, 64, 64)
        torch.testing.assert_close(model.eval()(x), small(name).eval()(x))
        assert model.default_cfg["classifier"] == "classifier"
        assert model.pretrained_cfg["first_conv"] == "stem.conv"

    @pytest.mark.parametrize("feature_cls", ["list", "dict", "hook", "fx", "getter"])
    def test_features_only(self, feature_cls):
        model = self.timm.create_model(
            "kanet_qkv", width=0.25, features_only=True, feature_cls=feature_cls, out_indices=(1, 2, 4)
        ).eval()
        features = model(torch.randn(1, 3, 64, 96))
        features = list(features.values()) if isinstance(features, dict) else features
        assert [f.shape[1] for f in features] == model.feature_info.channels()
        assert [64 // f.shape[2] for f in features] == model.feature_info.reduction() == [4, 8, 32]

    def test_features_only_through_kronattn(self):
        model = kronattn.create_model("kanet_kv", width=0.25, features_only=True)
        assert len(model(torch.randn(1, 3, 64, 64))) == 5

    def test_in_chans_and_layer_decay_groups(self):
        model = self.timm.create_model("kanet_kv", in_chans=1, width=0.25)
        assert model(torch.randn(2, 1, 32, 32)).shape == (2, 1000)
        from timm.models import group_parameters

        for coarse in (False, True):
            groups = group_parameters(model, model.group_matcher(coarse=coarse))
            assert sum(len(g) for g in groups.values()) == len(list(model.parameters()))
            assert len(groups) >= 11
        from timm.optim import param_groups_weight_decay

        decayed = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
        assert sum(len(group["params"]) for group in decayed) == len(list(model.parameters()))

    @pytest.mark.parametrize("order", ["import kronattn, timm", "import timm, kronattn"])
    def test_either_order_of_imports(self, order):
        code = f"{order}; print(timm.create_model('kanet_kv', width=0.25, num_classes=3).num_classes)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "3", done.stderr

    def test_index_out_of_range(self):
        with pytest.raises(ValueError, match="out_indices must lie between 0 and 4 .* not 7"):
            kronattn.create_model("kanet_kv", features_only=True, out_indices=(1, 7))


class TestErrors:
    def test_unknown_name(self):
        with pytest.raises(ValueError, match="unknown model 'kanet-kv': did you mean 'kanet_kv'?"):
            kronattn.create_model("kanet-kv")
        with pytest.raises(ValueError, match="unknown model 'zzz': known are kanet_kv, "):
            kronattn.create_model("zzz")
        for name in (None, 5, ["kanet_kv"]):
            with pytest.raises(TypeError, match="the name of a model must be a str, not"):
                kronattn.create_model(name)

    def test_unknown_option(self):
        with pytest.raises(TypeError, match="kanet_kv: .*num_clases"):
            kronattn.create_model("kanet_kv", num_clases=3)

    def test_no_weights(self):
        with pytest.raises(ValueError, match="no pretrained weights for 'attnnet': there are for kanet_kv, kanet_qkv$"):
            kronattn.create_model("attnnet", pretrained=True)

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((1, 3, 31, 64), "at least 32×32, but is 31×64"),
            ((1, 4, 64, 64), r"must have 3 channels \(in_chans\), but has 4"),
            ((3, 64, 64), r"must be \(N, 3, H, W\), but its shape is \(3, 64, 64\)"),
        ],
    )
    def test_bad_image(self, shape, message):
        with pytest.raises(ValueError, match=message):
            small("kanet_kv")(torch.randn(shape))

    @pytest.mark.parametrize(
        ("image", "message"),
        [
            (torch.zeros(1, 3, 64, 64).numpy(), "^the input must be a torch.Tensor, not ndarray$"),
            (None, "^the input must be a torch.Tensor, not NoneType$"),
            (torch.zeros(1, 3, 64, 64).byte(), "^the input must be floating-point, not uint8: convert it with x.float"),
        ],
    )
    def test_no_image(self, image, message):
        with pytest.raises(TypeError, match=message):
            small("kanet_kv")(image)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"variant": "kanet_kw"}, "unknown variant 'kanet_kw': did you mean 'kanet_kv' or 'kanet_qkv'?"),
            ({"variant": None}, "variant must be a name or a Variant, not NoneType"),
            ({"variant": None, "context": "kao_kv"}, "variant must be a name or a Variant, not NoneType"),
            ({"num_classes": -1}, "num_classes must be at least 0, not -1"),
            ({"num_classes": "3"}, "num_classes must be an int, not str"),
            ({"in_chans": 0}, "in_chans must be at least 1, not 0"),
            ({"in_chans": 1.0}, "in_chans must be an int, not float"),
            ({"width": 0}, "width must be a number above 0, not 0"),
            ({"width": float("nan")}, "width must be a number above 0, not nan"),
            ({"width": "1"}, "width must be a number above 0, not '1'"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises((TypeError, ValueError)) as raised:
            KANet(**options)
        assert str(raised.value) == message

    def test_a_bad_number_of_classes_leaves_the_network_as_it_was(self):
        model = small("kanet_kv")
        for classes in (-1, "a"):
            with pytest.raises((TypeError, ValueError), match="num_classes must be"):
                model.reset_classifier(classes)
        assert model.num_classes == model.classifier.out_features

    def test_no_features(self):
        model = small("kanet_kv")
        for call in (partial(model.forward_intermediates, torch.randn(1, 3, 32, 32)), model.prune_intermediate_layers):
            with pytest.raises(ValueError, match="indices must name one feature or more, not none"):
                call([])

    def test_feature_index(self):
        with pytest.raises(ValueError, match="feature index 5 is out of range: there are features 0 to 4"):
            small("kanet_kv").forward_intermediates(torch.randn(1, 3, 32, 32), [5])
        with pytest.raises(ValueError, match="the last 6 features were asked for, but there are 5"):
            small("kanet_kv").forward_intermediates(torch.randn(1, 3, 32, 32), 6)

    def test_global_pool(self):
        with pytest.raises(ValueError, match="global_pool must be one of 'avg', 'max', 'avgmax', '', not 'mean'"):
            small("kanet_kv", global_pool="mean")
