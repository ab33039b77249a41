"""The inference form of networks: fewer operators, the same outputs at any size."""

from __future__ import annotations

import copy
import statistics

import pytest
import torch
from torch import nn

import kronattn
from kronattn.inference import fuse_known, fuse_unsupported_reason
from kronattn.inference.attention import FusedKroneckerAttention
from kronattn.models.kanet import VARIANTS
from kronattn.models.registry import packaged_names
from kronattn.nn import AttnModule, AttnSkipModule, BaseModule, BaseSkipModule, ConvNormAct, KroneckerAttention
from kronattn.ops import native
from tests.native import native_operators, needs_native
from tests.trained import network, settled, small_network

SIZES = [(64, 64), (97, 70), (33, 130)]
MANY_SIZES = [
    tuple(torch.randint(32, 200, (2,), generator=torch.Generator().manual_seed(seed)).tolist()) for seed in range(20)
]
FORMS = {
    "fused": kronattn.fuse,
    "attention kept": lambda model: kronattn.fuse(model, attention=False),
    "portable": lambda model: fuse_known(model, portable=True),
}


def untrained(name, **options):
    torch.manual_seed(0)
    return kronattn.create_model(name, num_classes=3, **options).eval()


def trained(name, **options):
    """A few steps of training: every weight, norm and gain has moved."""
    model = untrained(name, **options).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        output = model(torch.randn(4, 3, 64, 64, generator=generator))
        labels = torch.randint(3, (4, *output.shape[2:]), generator=generator)
        nn.functional.cross_entropy(output, labels).backward()
        optimiser.step()
        optimiser.zero_grad()
    return model.eval()


def assert_same(fused, model, sizes, batch=2):
    """The fused network in float32 against the network in float64: in float32 it is itself up to 7e-6 off."""
    exact = copy.deepcopy(model).double()
    for size in sizes:
        x = torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected, found = exact(x.double()), fused(x)
        assert found.dtype == torch.float32
        assert found.shape == expected.shape
        # Of the largest output: an untrained network's are 1e-3, or 1e3.
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), size


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", VARIANTS)
def test_networks(name, form):
    model = network(name)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    fused = FORMS[form](model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    assert_same(fused, model, SIZES[:2])
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["kanet_kv", "kanet_qkv"])
def test_attention_is_folded_where_it_is_our_own(name):
    folded = [
        module for module in kronattn.fuse(network(name)).modules() if isinstance(module, FusedKroneckerAttention)
    ]
    kept = [module for module in kronattn.fuse(network(name), attention=False).modules() if hasattr(module, "observer")]
    assert (len(folded), len(kept)) == (10, 10)


@pytest.mark.parametrize("name", kronattn.list_models("segmentation"))
def test_segmenters(name):
    torch.manual_seed(0)
    # One on torchvision's ResNet, whose norms are found by tracing.
    options = {"backbone": "kanet_qkv", "backbone_options": {"width": 0.25}}
    if name == "unet":
        options = {}
    if name == "deeplabv2_kao_kv":
        pytest.importorskip("torchvision", reason="torchvision is not installed")
        options = {"backbone": "resnet18"}
    model = settled(kronattn.create_model(name, num_classes=3, **options), size=33)
    fused = kronattn.fuse(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    assert_same(fused, model, [(65, 48)], batch=1)


def assert_no_further_from_the_truth(model, forms):
    """In float64 all forms agree at every size: the algebra is right.

    In float32 a network that was hardly trained can amplify rounding to 3e-4 by itself, at sizes where its outputs are
    all small: whose furthest is the furthest is luck. (Of ten such networks each of kanet_kv, kanet_qkv and
    mobilenetv2, a form's median over the sizes was 0.5 to 2.3 times the network's own, its furthest 0.2 to 5 times.)
    """
    exact = copy.deepcopy(model).double()
    exact_forms = [form(exact) for form in forms]
    networks = [model, *(form(model) for form in forms)]
    errors = []
    for size in MANY_SIZES:
        x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            truth = exact(x.double())
            largest = truth.abs().max()
            for fused in exact_forms:
                assert (fused(x.double()) - truth).abs().max() <= 1e-10 * largest, size
            errors.append([float((network(x) - truth).abs().max() / largest) for network in networks])
    own, *others = zip(*errors, strict=True)
    for found in others:
        assert statistics.median(found) <= max(1e-5, 2 * statistics.median(own)), (found, own)
        assert max(found) <= max(1e-5, 10 * max(own)), (found, own)


@pytest.mark.sweep
@pytest.mark.parametrize("build", [untrained, trained])
@pytest.mark.parametrize("name", VARIANTS)
def test_networks_at_many_sizes(name, build):
    assert_no_further_from_the_truth(build(name, width=0.25), FORMS.values())


@pytest.mark.sweep
@pytest.mark.parametrize("build", [untrained, trained])
@pytest.mark.parametrize("name", kronattn.list_models("segmentation"))
def test_segmenters_at_many_sizes(name, build):
    options = {} if name == "unet" else {"backbone": "kanet_kv", "backbone_options": {"width": 0.25}}
    assert_no_further_from_the_truth(build(name, **options), [kronattn.fuse])


@pytest.mark.sweep
@pytest.mark.parametrize("name", packaged_names())
def test_trained_weights_at_many_sizes(name):
    """In float32, against the network in float32."""
    model = kronattn.create_model(name, pretrained=True).eval()
    fused = kronattn.fuse(model)
    for size in MANY_SIZES:
        x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected, found = model(x), fused(x)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), size


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "block",
    [
        ConvNormAct(3, 6, kernel_size=3, stride=2),
        BaseModule(3, 3, expansion=1),
        BaseSkipModule(3, 6),
        BaseSkipModule(3, 3, act_layer=nn.SiLU),
        BaseSkipModule(3, 3, stride=2, expansion=1),
        AttnSkipModule(3, 3),
        AttnModule(3, 6, stride=2),
        AttnModule(3, 6, stride=2, expansion=1),
        AttnSkipModule(3, 3, attn_layer=lambda c: KroneckerAttention(c, "qkv", project="qkv")),
        AttnSkipModule(3, 3, attn_layer=lambda c: KroneckerAttention(c, "qkv", num_heads=3, scale=0.3)),
        AttnSkipModule(3, 3, attn_layer=lambda c: KroneckerAttention(c, coefficient_norm=None, project="", scale=2.0)),
        AttnSkipModule(3, 3, attn_layer=lambda c: KroneckerAttention(c, "qkv", layer_scale=0.5, mean="each")),
        AttnSkipModule(3, 3, attn_layer=lambda c: KroneckerAttention(c, "qkv", gate=True, softmax="per_axis")),
        AttnSkipModule(
            3, 3, attn_layer=lambda c: KroneckerAttention(c, positions="learned", coefficient_norm="cosine")
        ),
        AttnSkipModule(3, 3, attn_layer=nn.Identity),
    ],
    ids=lambda block: type(block).__name__,
)
def test_modules_of_every_kind(block, form):
    block = settled(block, size=9)
    for size in ((7, 10), (20, 33)):
        assert_same(FORMS[form](block), block, [size])


def test_a_layer_with_an_option_nobody_has_heard_of_is_called(monkeypatch):
    """Layers are compared with what they were folded to."""
    forward = KroneckerAttention.forward
    monkeypatch.setattr(KroneckerAttention, "forward", lambda self, *args, **kw: 2 * forward(self, *args, **kw))
    block = settled(AttnModule(3, 3), size=9)
    fused = kronattn.fuse(block)
    assert not any(isinstance(module, FusedKroneckerAttention) for module in fused.modules())
    assert_same(fused, block, [(9, 12)])


def test_networks_of_others():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    ).eval()
    fused = kronattn.fuse(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    assert_same(fused, model, [(33, 40)])
    torch.manual_seed(0)
    model = settled(timm.create_model("mobilenetv2_035", num_classes=3))
    assert_same(kronattn.fuse(model), model, [(64, 80)])


def test_a_norm_that_others_read_too_stays():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            x = self.conv(x)
            return self.norm(x) + x

    model = settled(Shared(), size=8)
    assert_same(kronattn.fuse(model), model, [(8, 9)])


def adapted():
    model = network("kanet_kv")
    nn.utils.parametrizations.weight_norm(model.head.conv)
    return model.eval()  # parametrisations come in training mode


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: network("kanet_kv").train(), "KANet cannot be fused: it is in training mode, .* call eval"),
        (
            lambda: BaseModule(3, 3, norm_layer=lambda c: nn.GroupNorm(1, c)).eval(),
            "BaseModule cannot be fused: project.norm is GroupNorm; only nn.BatchNorm2d",
        ),
        (
            lambda: BaseModule(3, 3, norm_layer=lambda c: nn.BatchNorm2d(c, track_running_stats=False)).eval(),
            "project.norm is BatchNorm2d; only nn.BatchNorm2d with running statistics",
        ),
        (adapted, "head.conv .* has hooks or an adapter"),
        (lambda: nn.Linear(2, 2).eval(), "Linear cannot be fused: it has no batch norm"),
    ],
)
def test_what_cannot_be_fused_says_why_in_one_line(model, reason):
    model = model()
    with pytest.raises(ValueError, match=reason) as caught:
        kronattn.fuse(model)
    assert "\n" not in str(caught.value)
    assert fuse_unsupported_reason(model) in str(caught.value)


def test_what_cannot_be_fused_stays_as_it_is():
    block = settled(AttnSkipModule(3, 3, norm_layer=lambda c: nn.GroupNorm(1, c)), size=9)
    assert_same(fuse_known(block), block, [(9, 12)])
    model = adapted()
    assert_same(fuse_known(model), model, [(64, 64)])


def test_dilated_convolutions_stay_dilated():
    """A segmenter's backbone has its strides replaced by dilation."""
    block = BaseSkipModule(3, 6, stride=2)
    block.dilate(2)
    block = settled(block, size=9)
    for form in FORMS.values():
        assert_same(form(block), block, [(7, 10)])


@pytest.mark.parametrize("name", ["kanet_kv", "kanet_qkv"])
def test_exportable_at_any_size(name):
    model = small_network(name)
    fused, any_size = kronattn.fuse(model), torch.export.Dim.DYNAMIC
    with torch.no_grad():
        shapes = ({0: any_size, 2: any_size, 3: any_size},)
        program = torch.export.export(fused, (torch.randn(2, 3, 96, 64),), dynamic_shapes=shapes)
    assert_same(program.module(), model, SIZES)


def test_a_captured_graph_concatenates_no_map():
    """A compiler takes a concatenation of channels for strided copies, as slow as all the rest of the network."""
    with torch.no_grad():
        program = torch.export.export(kronattn.fuse(small_network("kanet_kv")), (torch.randn(1, 3, 64, 64),))
    nodes = list(program.graph.nodes)
    assert any("softmax" in str(node.target) for node in nodes)
    # The averages of both axes are, on a grid that no matrix is at hand for.
    joined = [node for node in nodes if node.target is torch.ops.aten.cat.default]
    assert all(node.meta["val"].dim() == 3 for node in joined)


def test_gradients_reach_the_image():
    """Saliency works on the inference form too."""
    model = network("kanet_qkv")
    images = [torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2)]
    for each, x in zip((model, kronattn.fuse(model)), images, strict=True):
        each(x)[0, 0].backward()
    scale = images[0].grad.abs().max()
    assert scale > 0
    assert (images[0].grad - images[1].grad).abs().max() < 1e-4 * scale


@needs_native
@pytest.mark.usefixtures(native_operators.__name__)
class TestNative:
    """With the operators of kronattn-cpu: all of an attention layer is one call."""

    @pytest.mark.parametrize("name", ["kanet_kv", "kanet_qkv", "kanet_qkv_as_printed"])
    def test_networks(self, name, monkeypatch):
        calls, real = [], native.attend_own_averages_
        monkeypatch.setattr(
            native, "attend_own_averages_", lambda *of, **options: calls.append(1) or real(*of, **options)
        )
        model = trained(name, width=0.35)
        fused = kronattn.fuse(model)
        calls.clear()  # what is fused is compared with the layer
        assert_same(fused, model, SIZES)
        assert len(calls) == 10 * len(SIZES)

    @pytest.mark.parametrize("mode", ["kv", "qkv"])
    @pytest.mark.parametrize("mean", ["once", "each"])
    @pytest.mark.parametrize(("channels", "out"), [(5, 7), (16, 16), (24, 40), (33, 1)])
    @pytest.mark.parametrize("has_direct", [True, False])
    def test_layers(self, mode, mean, channels, out, has_direct):
        torch.manual_seed(0)
        layer = KroneckerAttention(channels, mode=mode, mean=mean).eval()
        matrix, direct = torch.randn(out, channels), torch.randn(out, channels) * has_direct
        fused = FusedKroneckerAttention(layer, matrix, direct)
        for grid in ((1, 1), (3, 5), (9, 14), (40, 33)):
            x = torch.randn(2, channels, *grid).contiguous(memory_format=torch.channels_last)
            y = torch.randn(2, out, *grid).contiguous(memory_format=torch.channels_last)
            with torch.no_grad():
                found = fused(x, y.clone())
                exact = y.double() + torch.einsum("dc,nchw->ndhw", direct.double(), x.double())
                exact += torch.einsum("dc,nchw->ndhw", matrix.double(), copy.deepcopy(layer).double()(x.double()))
            assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()

    def test_compiled(self):
        model = kronattn.fuse(untrained("kanet_kv", width=0.35))
        x = torch.randn(1, 3, 64, 64)
        with torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-6)

    def test_gradients_reach_the_image(self):
        model, x = kronattn.fuse(untrained("kanet_kv", width=0.35)), torch.randn(1, 3, 64, 64, requires_grad=True)
        model(x).sum().backward()
        assert x.grad.abs().max() > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"context": "kao_kv:gate=true"}, {"context": "global_mean"}], ids=str)
def test_with_gradients_on(form, options):
    """Nobody has to say no_grad: weights are constants, and gradients by the input are the network's."""
    model = settled(untrained("kanet_kv", width=0.25, **options))
    fused, x = FORMS[form](model), torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert not fused(x).requires_grad
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outputs = fused(leaves[0]), model(leaves[1])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    found, expected = (torch.autograd.grad(y.sum(), leaf)[0] for y, leaf in zip(outputs, leaves, strict=True))
    assert (found - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("place", ["stages.1.0", "stages.3.0", "stages.1.0.depthwise", "stages.1.0.project", "stem"])
def test_hooks_are_not_dropped(place):
    model = untrained("kanet_kv", width=0.25)
    model.get_submodule(place).register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(ValueError, match=f"KANet cannot be fused: {place} has hooks; remove them first"):
        kronattn.fuse(model)
    assert_same(fuse_known(model), model, [(64, 64)])


@pytest.mark.parametrize("place", ["attn", "project.act"])
def test_hooks_of_what_is_called_are_called(place):
    block, seen = settled(AttnSkipModule(3, 3), size=9), []
    block.get_submodule(place).register_forward_hook(lambda *_: seen.append(place))
    fused = kronattn.fuse(block)
    seen.clear()
    assert_same(fused, block, [(9, 12)])
    assert seen == [place] * 2


def test_a_module_with_one_part_that_cannot_be_folded_stays_whole():
    """Its other parts are called with what to concatenate."""
    block = settled(BaseSkipModule(3, 6), size=9)
    nn.utils.parametrizations.weight_norm(block.project.conv)
    assert_same(fuse_known(block.eval()), block, [(9, 12)])
