"""The baselines of Table 3: their figures, their notes, and the two networks that are written here."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
import torch
from fvcore.nn import FlopCountAnalysis
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kronattn.models.baselines import BASELINES, ChannelNet, ShuffleNet
from kronattn.models.baselines.channelnet import ChannelWiseConv, GroupChannelWiseModule, GroupModule
from kronattn.models.baselines.shufflenet import ShuffleUnit, channel_shuffle
from tests.versions import skip_tied_export

Net = type[ShuffleNet] | type[ChannelNet]
WRITTEN = pytest.mark.parametrize("net", [ShuffleNet, ChannelNet])

# Recomputed at 224×224 and 1000 classes: parameters with and without batch norm's, multiply-adds.
FIGURES = {
    "googlenet": (6_624_904, 6_610_344, 1_498_376_192),
    "vgg16": (138_357_544, 138_357_544, 15_470_264_320),
    "alexnet": (61_100_840, 61_100_840, 714_188_480),
    "squeezenet": (1_248_424, 1_248_424, 818_924_576),
    "mobilenetv1": (4_231_976, 4_210_088, 568_740_352),
    "shufflenet": (3_442_168, 3_405_448, 292_443_552),
    "channelnet": (3_714_376, 3_690_440, 468_488_704),
}
PRINTED = {
    "googlenet": ("GoogleNet", 0.698, 6.8e6, 1550e6),
    "vgg16": ("VGG16", 0.715, 128e6, 15300e6),
    "alexnet": ("AlexNet", 0.572, 60e6, 720e6),
    "squeezenet": ("SqueezeNet", 0.575, 1.3e6, 833e6),
    "mobilenetv1": ("MobileNetV1", 0.706, 4.2e6, 569e6),
    "shufflenet": ("ShuffleNet 1.5x", 0.715, 3.4e6, 292e6),
    "channelnet": ("ChannelNet-v1", 0.705, 3.7e6, 407e6),
}


def build_on_meta(name: str, num_classes: int = 1000, in_chans: int = 3) -> nn.Module:
    with torch.device("meta"):
        return BASELINES[name].build(num_classes, in_chans).eval()


def parameters(model: nn.Module) -> tuple[int, int]:
    """Count parameters, with and without batch norm's."""
    total = sum(p.numel() for p in model.parameters())
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    return total, total - sum(p.numel() for m in norms for p in m.parameters(recurse=False))


def madd(model: nn.Module, size: int = 224) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, size, size, device="meta"))
    return counter.get_total_flops() // 2


# The layer tables again, as plain arithmetic: (kernel², in, out, groups, positions) for each convolution.

Layer = tuple[int, int, int, int, int]


def shufflenet_layers() -> list[Layer]:
    layers = [(9, 3, 24, 1, 112**2)]
    channels, side = 24, 56
    for out, units in ((360, 4), (720, 8), (1440, 4)):
        for unit in range(units):
            after = side // 2 if unit == 0 else side
            produced = out - channels if unit == 0 else out
            layers += [
                (1, channels, out // 4, 1 if channels == 24 else 3, side**2),
                (9, out // 4, out // 4, out // 4, after**2),
                (1, out // 4, produced, 3, after**2),
            ]
            channels, side = out, after
    return [*layers, (1, 1440, 1000, 1, 1)]


def channelnet_layers() -> list[Layer]:
    layers = [(9, 3, 32, 1, 112**2)]
    rows = [(32, 64, 112, 1), (64, 128, 56, 1), (128, 128, 56, 1), (128, 256, 28, 1), (256, 256, 28, 1)]
    rows += [(256, 512, 14, 1), *[(512, 512, 14, 2)] * 6, (512, 1024, 7, 1), (1024, 1024, 7, 1)]
    for i, o, side, groups in rows:
        layers += [(9, i, i, i, side**2), (1, i, o, groups, side**2)]
    return [*layers, *[(8, 1, 2, 1, 14**2 * 256)] * 2, (1, 1024, 1000, 1, 1)]


def weights(layer: Layer) -> int:
    kernel, i, o, groups, _ = layer
    return kernel * i * o // groups


@pytest.mark.parametrize(("name", "layers"), [("shufflenet", shufflenet_layers()), ("channelnet", channelnet_layers())])
def test_written_networks_agree_with_their_layer_tables(name: str, layers: list[Layer]) -> None:
    model = BASELINES[name].build().eval()
    expected_params = sum(map(weights, layers)) + 1000
    expected_madd = sum(weights(layer) * layer[-1] for layer in layers)
    assert parameters(model)[1] == expected_params == FIGURES[name][1]

    analysis = FlopCountAnalysis(model, torch.zeros(1, 3, 224, 224)).unsupported_ops_warnings(False)
    operators = analysis.by_operator()
    assert operators["conv"] + operators["linear"] == expected_madd == FIGURES[name][2]


def test_shufflenet_has_the_printed_figures() -> None:
    _, params, operations = FIGURES["shufflenet"]
    assert params == pytest.approx(3.4e6, rel=0.01)
    assert operations == pytest.approx(292e6, rel=0.01)


def test_channelnet_has_the_printed_parameters_and_its_note_derives_the_rest() -> None:
    _, params, operations = FIGURES["channelnet"]
    assert params == pytest.approx(3.7e6, rel=0.01)

    # MobileNetV1 less its five layers of 512 channels is what both networks share
    layer = 9 * 512 + 512 * 512
    shared_madd = FIGURES["mobilenetv1"][2] - 5 * layer * 14**2
    shared_params = FIGURES["mobilenetv1"][1] - 5 * layer
    group_layer = (9 * 512 + 512 * 512 // 2) * 14**2
    channel_wise = 2 * 8 * 512 * 14**2
    assert shared_madd + 6 * group_layer + channel_wise == operations

    left = 407_000_000 - shared_madd
    derived = [params, operations, shared_madd, 6 * group_layer, group_layer, channel_wise]
    derived += [operations - 407_000_000, left, left // 14**2, shared_params + left // 14**2]
    note = BASELINES["channelnet"].note
    assert note is not None
    for figure in derived:
        assert f"{figure:,}" in note


@pytest.mark.parametrize("name", BASELINES)
def test_figures(name: str) -> None:
    model = build_on_meta(name)
    assert (*parameters(model), madd(model)) == FIGURES[name]


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("googlenet", "GoogLeNet_Weights"),
        ("vgg16", "VGG16_Weights"),
        ("alexnet", "AlexNet_Weights"),
        ("squeezenet", "SqueezeNet1_0_Weights"),
    ],
)
def test_torchvision_says_the_same_count(name: str, weights: str) -> None:
    models = pytest.importorskip("torchvision").models
    assert getattr(models, weights).IMAGENET1K_V1.meta["num_params"] == FIGURES[name][0]


def test_table_has_the_printed_values_in_order() -> None:
    rows = {key: (row.label, row.paper_top1, row.paper_params, row.paper_madd) for key, row in BASELINES.items()}
    assert rows == PRINTED
    assert list(rows) == list(PRINTED)
    assert all(row.name == key for key, row in BASELINES.items())
    with pytest.raises(FrozenInstanceError):
        BASELINES["vgg16"].paper_top1 = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("name", BASELINES)
def test_a_row_has_a_note_exactly_where_it_differs_from_print(name: str) -> None:
    row = BASELINES[name]
    _, params, operations = FIGURES[name]
    agrees = params == pytest.approx(row.paper_params, rel=0.01) and operations == pytest.approx(
        row.paper_madd, rel=0.01
    )
    assert (row.note is None) == agrees
    if row.note is not None:
        assert f"{params:,}" in row.note
        assert f"{operations:,}" in row.note


def test_note_of_googlenet() -> None:
    model = build_on_meta("googlenet")
    swapped = [m[1].conv for n, m in model.named_modules() if n.endswith("branch3")]
    assert len(swapped) == 9
    for conv in swapped:
        conv.weight = nn.Parameter(conv.weight.new_empty(*conv.weight.shape[:2], 5, 5))
        conv.kernel_size, conv.padding = (5, 5), (2, 2)
    biases = sum(m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    note = BASELINES["googlenet"].note or ""
    assert f"{parameters(model)[1] + biases:,} and {madd(model):,}" in note


def test_note_of_vgg16() -> None:
    note = BASELINES["vgg16"].note or ""
    linear = 25_088 * 4096 + 4096 * 4096 + 4096 * 1000
    assert f"{linear:,}" in note
    assert f"{FIGURES['vgg16'][2] - linear:,}" in note


def test_note_of_alexnet() -> None:
    """The original at 227×227: convolutions 2, 4 and 5 in two groups."""
    layers: list[Layer] = [
        (121, 3, 96, 1, 55**2),
        (25, 96, 256, 2, 27**2),
        (9, 256, 384, 1, 13**2),
        (9, 384, 384, 2, 13**2),
        (9, 384, 256, 2, 13**2),
        (1, 9216, 4096, 1, 1),
        (1, 4096, 4096, 1, 1),
        (1, 4096, 1000, 1, 1),
    ]
    params = sum(weights(layer) + layer[2] for layer in layers)
    operations = sum(weights(layer) * layer[-1] for layer in layers)
    assert f"{params:,} parameters and {operations:,} MAdd" in (BASELINES["alexnet"].note or "")


def test_note_of_squeezenet() -> None:
    models = pytest.importorskip("torchvision").models
    note = BASELINES["squeezenet"].note or ""
    operations = madd(build_on_meta("squeezenet"), 227)
    assert round(operations / 1e6) == 833
    assert f"{operations:,}" in note
    with torch.device("meta"):
        assert f"{madd(models.squeezenet1_1().eval()):,}" in note


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("in_chans", [1, 3, 4])
def test_classes_and_channels(name: str, in_chans: int) -> None:
    model = build_on_meta(name, num_classes=7, in_chans=in_chans)
    assert model(torch.empty(2, in_chans, 224, 224, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("name", ["googlenet", "alexnet", "squeezenet", "mobilenetv1"])
def test_borrowed_network_runs_on_grey_images(name: str) -> None:
    logits = BASELINES[name].build(num_classes=3, in_chans=1).eval()(torch.randn(1, 1, 96, 96))
    assert logits.shape == (1, 3)
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        ("googlenet", "torchvision", "vision"),
        ("vgg16", "torchvision", "vision"),
        ("alexnet", "torchvision", "vision"),
        ("squeezenet", "torchvision", "vision"),
        ("mobilenetv1", "timm", "timm"),
    ],
)
def test_missing_library(monkeypatch: pytest.MonkeyPatch, name: str, library: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        BASELINES[name].build()
    # The library's own name of it may say a version.
    assert re.fullmatch(rf"{name}\w* needs {library}: pip install 'kronattn\[{extra}\]'", str(caught.value))


def test_broken_library_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ModuleNotFoundError("No module named 'PIL'", name="PIL")

    monkeypatch.setattr("kronattn.extras.importlib.import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="PIL"):
        BASELINES["vgg16"].build()


def test_import_needs_torch_alone() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torchvision', 'timm', 'fvcore')));"
        "from kronattn.models.baselines import BASELINES; BASELINES['channelnet'].build(2)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_googlenet_builds_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("torchvision")
    recwarn.clear()
    build_on_meta("googlenet")
    assert not recwarn.list


# The two networks that are written here


@WRITTEN
@pytest.mark.parametrize("size", [(32, 32), (33, 47), (63, 111), (96, 65)])
def test_odd_sizes(net: Net, size: tuple[int, int]) -> None:
    logits = net(num_classes=5).eval()(torch.randn(1, 3, *size))
    assert logits.shape == (1, 5)
    assert logits.isfinite().all()


@WRITTEN
def test_training_lowers_the_loss_and_reaches_every_parameter(net: Net) -> None:
    torch.manual_seed(0)
    model = net(num_classes=4).train()
    images, labels = torch.randn(8, 3, 64, 64), torch.arange(8) % 4
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name
        optimiser.step()
    assert losses[-1] < 0.7 * losses[0]


@WRITTEN
def test_signal_neither_dies_nor_explodes(net: Net) -> None:
    torch.manual_seed(0)
    logits = net(num_classes=100).train()(torch.randn(4, 3, 64, 64))
    assert 0.01 < logits.std().item() < 100


@WRITTEN
def test_channels_last(net: Net) -> None:
    model = net(num_classes=5).eval()
    x = torch.randn(2, 3, 47, 64)
    expected = model(x)
    actual = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@WRITTEN
def test_trace_works_at_other_sizes(net: Net) -> None:
    model = net(num_classes=5).eval()
    traced = torch.jit.trace(model, torch.randn(1, 3, 64, 64))
    other = torch.randn(2, 3, 47, 33)
    torch.testing.assert_close(traced(other), model(other))


@WRITTEN
def test_export_with_any_batch_and_size(net: Net) -> None:
    skip_tied_export()
    model = net(num_classes=5).eval()
    # from 33, since at 32 the last map is 1×1 and torch.export treats a size of 1 as a case of its own
    side = {axis: torch.export.Dim(name, min=33) for axis, name in ((2, "h"), (3, "w"))}
    dims = {0: torch.export.Dim("n", min=1), **side}
    exported = torch.export.export(model, (torch.randn(2, 3, 64, 80),), dynamic_shapes=(dims,))
    for size in ((1, 3, 47, 33), (3, 3, 33, 64)):
        other = torch.randn(size)
        torch.testing.assert_close(exported.module()(other), model(other))


def test_channel_shuffle_against_loops() -> None:
    x = torch.randn(2, 12, 3, 5)
    y = channel_shuffle(x, 3)
    for group in range(3):
        for index in range(4):
            assert torch.equal(y[:, index * 3 + group], x[:, group * 4 + index])
    assert torch.equal(channel_shuffle(y, 4), x)


def test_shuffle_units() -> None:
    x = torch.randn(2, 24, 7, 9)
    unit = ShuffleUnit(24, 60, stride=2, first_groups=1).eval()
    y = unit(x)
    assert y.shape == (2, 60, 4, 5)
    # the first channels are the averaged input, which convolutions do not touch
    torch.testing.assert_close(y[:, :24], F.avg_pool2d(x, 3, 2, padding=1).relu())
    with pytest.raises(ValueError, match="24 channels in, 60 out"):
        ShuffleUnit(24, 60)


def expected_channel_wise(x: Tensor, kernels: Tensor) -> Tensor:
    groups, length = kernels.shape
    padded = F.pad(x, (0, 0, 0, 0, (length - groups) // 2, (length - groups) // 2))
    outputs = [
        sum(kernel[t] * padded[:, start + t] for t in range(length))
        for kernel in kernels
        for start in range(0, x.shape[1], groups)
    ]
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(("groups", "kernel"), [(2, 8), (1, 3), (3, 5), (4, 4)])
def test_channel_wise_convolution_against_loops(groups: int, kernel: int) -> None:
    layer = ChannelWiseConv(groups, kernel).double()
    x = torch.randn(2, 12, 3, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(layer(x), expected_channel_wise(x, layer.conv.weight[:, 0, :, 0]))
    assert torch.autograd.gradcheck(layer, x)


@pytest.mark.parametrize(("groups", "kernel"), [(2, 7), (4, 2)])
def test_channel_wise_kernel_must_fit(groups: int, kernel: int) -> None:
    with pytest.raises(ValueError, match="plus an even number"):
        ChannelWiseConv(groups, kernel)


@pytest.mark.parametrize(("module", "joined"), [(GroupModule, False), (GroupChannelWiseModule, True)])
def test_only_the_channel_wise_module_joins_groups(module: Callable[[int], nn.Module], joined: bool) -> None:
    torch.manual_seed(0)
    layer = module(16).eval()
    x = torch.randn(1, 16, 5, 5)
    changed = x.clone()
    changed[:, :8] += 1
    difference = (layer(changed) - layer(x))[:, 8:]
    assert bool(difference.any()) is joined
