"""DeepLabV2: strides and sizes, dilation, frozen norms, weights from files, capture, timm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kronattn
from kronattn.measure import count_madd
from kronattn.models import DeepLabV2, load_backbone_weights, task_of
from kronattn.models.deeplab.backbones import BACKBONES, build_backbone
from kronattn.models.kanet import KANet, Row
from kronattn.models.registry import MODELS
from kronattn.nn import AttnSkipModule, BaseSkipModule

NAMES = ("deeplabv2_aspp", "deeplabv2_attn", "deeplabv2_kao_kv", "deeplabv2_kao_qkv")
# Table 1 with one module at each resolution and two that attend.
SHORT = (Row(False, 1, 16, 1, 1), *(Row(False, 6, c, 1, 2) for c in (24, 32)), Row(True, 6, 64, 1, 1))
SHORT = (*SHORT, Row(False, 6, 64, 1, 2), Row(True, 6, 96, 1, 1), Row(False, 6, 160, 1, 2))
TINY = {"backbone": "kanet_kv", "backbone_options": {"width": 0.25, "table": SHORT}, "num_classes": 4}
every_name = pytest.mark.parametrize("name", NAMES)


def tiny(name, **options):
    """A small network whose scores are neither all alike nor next to nothing."""
    torch.manual_seed(0)
    model = kronattn.create_model(name, **(TINY | options))
    for conv in model.head.classifiers():
        nn.init.normal_(conv.weight, std=0.3)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    model(torch.randn(2, 3, 65, 65))
    for norm in norms:
        norm.momentum = 0.1
    return model


def torchvision_models():
    return pytest.importorskip("torchvision.models", reason="torchvision is not installed")


def with_statistics(module: nn.Module) -> nn.Module:
    """Batch norms that have seen something: else what they compute says nothing about where they stand."""
    generator = torch.Generator().manual_seed(1)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.copy_(0.1 * torch.randn(norm.num_features, generator=generator))
            norm.running_var.copy_(0.5 + torch.rand(norm.num_features, generator=generator))
    return module


class TestNames:
    def test_every_name_has_a_task(self):
        assert kronattn.list_models() == list(MODELS)
        assert kronattn.list_models("segmentation") == [*NAMES, "unet"]
        assert sorted(
            name for task in ("classification", "segmentation", "volumes") for name in kronattn.list_models(task)
        ) == sorted(MODELS)
        assert {task_of(name) for name in NAMES} == {"segmentation"}
        assert task_of("kanet_kv") == "classification"

    def test_bad_names(self):
        with pytest.raises(ValueError, match="task must be classification, segmentation, volumes, not 'detection'"):
            kronattn.list_models("detection")
        with pytest.raises(ValueError, match="unknown model 'deeplabv2_kao': did you mean"):
            task_of("deeplabv2_kao")

    @every_name
    def test_benchmarks_of_classifiers_do_not_take_them(self, name):
        from kronattn.bench.networks import bench_networks

        with pytest.raises(ValueError, match=f"unknown network '{name}'"):
            bench_networks([name])


@every_name
class TestNetwork:
    @pytest.mark.parametrize("size", [(65, 65), (33, 47), (64, 40), (7, 90), (1, 1)])
    @pytest.mark.parametrize("output_stride", [8, 16])
    def test_any_size(self, name, size, output_stride):
        model = tiny(name, output_stride=output_stride).eval()
        x = torch.randn(2, 3, *size)
        features = model.forward_features(x)
        assert features.shape[2:] == tuple(-(-n // output_stride) for n in size)
        assert model(x).shape == (2, 4, *size)

    def test_scores_lie_on_their_pixels(self, name):
        model = tiny(name).eval()
        x = torch.randn(1, 3, 50, 65)
        torch.testing.assert_close(model(x)[..., ::8, ::8], model.head(model.forward_features(x)))

    def test_gradients_reach_everything_and_lower_the_loss(self, name):
        model = tiny(name)
        x, y = torch.randn(2, 3, 65, 49), torch.randint(0, 4, (2, 65, 49))
        y[:, :9] = 255
        optimiser = torch.optim.SGD(model.parameters(), lr=0.003)
        losses = []
        for _ in range(4):
            loss = nn.functional.cross_entropy(model(x), y, ignore_index=255)
            optimiser.zero_grad()
            loss.backward()
            for key, parameter in model.named_parameters():
                assert parameter.grad is not None, key
                assert parameter.grad.abs().sum() > 0, key
            optimiser.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]

    def test_export_with_dynamic_sizes(self, name):
        model = tiny(name).eval()
        sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
        program = torch.export.export(model, (torch.randn(2, 3, 96, 128),), dynamic_shapes=(sizes,))
        for shape in [(3, 3, 81, 57), (2, 3, 104, 120)]:
            x = torch.randn(shape)
            torch.testing.assert_close(program.module()(x), model(x), rtol=1e-3, atol=1e-3)

    @pytest.mark.filterwarnings("ignore")
    def test_compile_and_trace(self, name):
        model = tiny(name).eval()
        x = torch.randn(1, 3, 57, 64)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(torch.jit.trace(model, x)(x + 1), model(x + 1), rtol=1e-3, atol=1e-3)

    def test_autocast_and_channels_last(self, name):
        model = tiny(name).eval()
        x = torch.randn(1, 3, 57, 64)
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)
        torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), model(x), rtol=1e-3, atol=1e-3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(x).float()
        # Eight bits of mantissa through some twenty layers.
        assert (half - model(x)).abs().mean() < 0.1 * model(x).std()

    def test_timm(self, name):
        timm = pytest.importorskip("timm", reason="timm is not installed")
        model = timm.create_model(name, **TINY)
        assert model(torch.randn(2, 3, 33, 40)).shape == (2, 4, 33, 40)
        assert model.default_cfg["num_classes"] == 21
        for create in (timm.create_model, kronattn.create_model):
            with pytest.raises(ValueError, match="has no features_only"):
                create(name, features_only=True)

    def test_other_classes(self, name):
        model = tiny(name)
        model.reset_classifier(7)
        assert model.num_classes == 7
        assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 7, 32, 32)


class TestResNet:
    @pytest.fixture(autouse=True)
    def _torchvision(self):
        self.models = torchvision_models()

    def plain_features(self, resnet, x):
        resnet.avgpool = resnet.fc = nn.Identity()
        return resnet.eval()(x).unflatten(1, (-1, *self.grid))

    @pytest.mark.parametrize("output_stride", [8, 16])
    def test_as_torchvision_dilates_it(self, output_stride):
        backbone = with_statistics(build_backbone("resnet50", output_stride=output_stride)).eval()
        theirs = self.models.resnet50(weights=None, replace_stride_with_dilation=[False, output_stride == 8, True])
        theirs.load_state_dict(backbone.state_dict(), strict=False)
        x = torch.randn(1, 3, 65, 50)
        self.grid = (-(-65 // output_stride), -(-50 // output_stride))
        with torch.no_grad():
            torch.testing.assert_close(backbone(x), self.plain_features(theirs, x))

    @pytest.mark.parametrize("name", ["resnet18", "resnet50"])
    @pytest.mark.parametrize("output_stride", [8, 16, 32])
    def test_at_the_old_positions_nothing_changes(self, name, output_stride):
        backbone = with_statistics(build_backbone(name, output_stride=output_stride)).eval()
        theirs = self.models.get_model(name, weights=None)
        theirs.load_state_dict(backbone.state_dict(), strict=False)
        x = torch.randn(1, 3, 97, 70)
        self.grid = (4, 3)
        step = 32 // output_stride
        with torch.no_grad():
            ours, plain = backbone(x)[..., ::step, ::step], self.plain_features(theirs, x)
        # Sums in another order, through many layers without a trained scale.
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4 * plain.abs().max().item())

    def test_the_paper_s_network(self):
        with torch.device("meta"):
            model = kronattn.create_model("deeplabv2_kao_qkv")
            assert model(torch.empty(1, 3, 321, 321)).shape == (1, 21, 321, 321)
            assert model.forward_features(torch.empty(1, 3, 321, 321)).shape == (1, 2048, 41, 41)
        plain = self.models.ResNet101_Weights.DEFAULT.meta["num_params"] - 1000 * 2049
        assert sum(p.numel() for p in model.backbone.parameters()) == plain

    @pytest.mark.parametrize("name", NAMES)
    def test_head_costs_by_hand(self, name):
        """From the definitions alone: parameters, and MAdd of a 41×41 map of 2048 channels, for 21 classes."""
        c, w, k, side = 2048, 512, 21, 41
        m, n = side**2, 2 * side
        classifier, context = (c + w) * k + k, 3 * c * w + 1
        values = n * c * w + n * w * k
        expected = {
            "deeplabv2_aspp": (4 * (9 * c * k + k), 4 * 9 * c * k * m),
            "deeplabv2_attn": (classifier + context, m * (c + w) * k + 3 * m * c * w + m * m * 2 * w),
            # The query's map goes into the n keys, where it is cheaper than at m positions; and the context's
            # classifier is applied to the values.
            "deeplabv2_kao_kv": (classifier + context, m * c * k + n * 2 * c * w + values + m * n * (c + k)),
            "deeplabv2_kao_qkv": (classifier + context, m * c * k + n * 2 * c * w + values + n * n * (w + k)),
        }
        with torch.device("meta"):
            head = kronattn.create_model(name, backbone="resnet50").head.eval()
        found = sum(p.numel() for p in head.parameters()), count_madd(head, torch.empty(1, c, side, side))
        assert found == expected[name]

    def test_other_channels(self):
        model = kronattn.create_model("deeplabv2_kao_kv", backbone="resnet18", in_chans=1, num_classes=2)
        assert model(torch.randn(2, 1, 40, 33)).shape == (2, 2, 40, 33)


class TestKANet:
    @pytest.mark.parametrize("variant", ["mobilenetv2", "kanet_without_kao"])
    @pytest.mark.parametrize("output_stride", [8, 16])
    @pytest.mark.parametrize("width", [0.25, 1.0])  # at 0.25 strided modules have as many channels out as in
    def test_at_the_old_positions_nothing_changes(self, variant, output_stride, width):
        torch.manual_seed(0)
        plain = with_statistics(KANet(variant, width=width)).eval()
        dilated = KANet(variant, width=width, output_stride=output_stride).eval()
        dilated.load_state_dict(plain.state_dict())
        x = torch.randn(2, 3, 97, 130)
        step = 32 // output_stride
        expected = plain.forward_features(x)
        torch.testing.assert_close(dilated.forward_features(x)[..., ::step, ::step], expected, rtol=1e-4, atol=1e-4)
        with torch.inference_mode():  # where the concatenation may be left out
            torch.testing.assert_close(dilated.forward_features(x)[..., ::step, ::step], expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("output_stride", [8, 16, 32])
    def test_features(self, output_stride):
        model = KANet("kanet_kv", width=0.25, output_stride=output_stride, num_classes=3).eval()
        x = torch.randn(1, 3, 64, 96)
        found = model.forward_intermediates(x, intermediates_only=True)
        reductions = [info["reduction"] for info in model.feature_info]
        assert reductions == [min(r, output_stride) for r in (2, 4, 8, 16, 32)]
        assert [64 // f.shape[2] for f in found] == reductions
        assert model(x).shape == (1, 3)

    def test_dilations(self):
        model = KANet("kanet_kv", output_stride=8)
        rates = [
            m.depthwise.conv.dilation[0] for m in model.modules() if isinstance(m, BaseSkipModule | AttnSkipModule)
        ]
        # Seventeen modules; strides of 2 that are not taken at the 7th and the 14th.
        assert rates == [1] * 7 + [2] * 7 + [4] * 3

    def test_timm_knows_the_option(self):
        timm = pytest.importorskip("timm", reason="timm is not installed")
        model = timm.create_model("kanet_kv", width=0.25, features_only=True, output_stride=16, out_indices=(3, 4))
        assert model.feature_info.reduction() == [16, 16]
        assert [64 // f.shape[2] for f in model(torch.randn(2, 3, 64, 64))] == [16, 16]

    @pytest.mark.parametrize("stride", [4, 64, 0, "8"])
    def test_bad_strides(self, stride):
        for build in (KANet, DeepLabV2):
            with pytest.raises(ValueError, match="output_stride must be 8, 16 or 32, not"):
                build(output_stride=stride)


class TestFrozenNorms:
    @pytest.mark.parametrize("backbone", ["kanet_kv", "resnet18"])
    def test_really_frozen(self, backbone):
        if backbone == "resnet18":
            torchvision_models()
        torch.manual_seed(0)
        model = DeepLabV2("kao_kv", backbone=backbone, freeze_norm=True, num_classes=3)
        norms = [m for m in model.backbone.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        before = copy.deepcopy([norm.state_dict() for norm in norms])
        for _ in range(2):
            model.eval()
            model.train()
            assert model.training
            assert model.head.attn.norm.training
            assert not any(norm.training for norm in norms)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimiser = torch.optim.SGD(trained, lr=0.1, weight_decay=0.1)
        model(torch.randn(2, 3, 40, 40)).square().mean().backward()
        optimiser.step()
        for norm, state in zip(norms, before, strict=True):
            assert all(not p.requires_grad and p.grad is None for p in norm.parameters())
            for key, tensor in norm.state_dict().items():
                assert torch.equal(tensor, state[key]), key
        assert model.head.attn.norm.num_batches_tracked == 1
        assert all(p.grad is not None for p in trained)

    def test_shared_statistics_stay_frozen_too(self):
        model = tiny("deeplabv2_kao_kv", freeze_norm=True)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model).train()
        assert not any(m.training for m in model.backbone.modules() if isinstance(m, nn.SyncBatchNorm))

    def test_weights_go_from_frozen_to_not_and_back(self):
        free, frozen = tiny("deeplabv2_kao_kv"), tiny("deeplabv2_kao_kv", freeze_norm=True)
        frozen.load_state_dict(free.state_dict())
        free.load_state_dict(frozen.state_dict())
        assert any(m.training for m in free.backbone.modules() if isinstance(m, nn.BatchNorm2d))


class TestBackboneWeights:
    @pytest.fixture
    def resnet(self):
        torch.manual_seed(5)
        return torchvision_models().resnet18(weights=None).state_dict()

    @pytest.fixture
    def model(self):
        return DeepLabV2("kao_kv", backbone="resnet18", num_classes=3)

    def check(self, model, state):
        for key, tensor in model.backbone.state_dict().items():
            assert torch.equal(tensor, state[key]), key

    @pytest.mark.parametrize(
        "wrapped",
        [
            lambda state: state,
            lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}, "epoch": 3},
            lambda state: {"model": state},
            # A segmentation network, as torchvision's that were trained on MS-COCO.
            lambda state: (
                {f"backbone.{k}": v for k, v in state.items() if k[:2] != "fc"}
                | {"classifier.4.weight": torch.zeros(21, 256, 1, 1), "aux_classifier.0.weight": torch.zeros(2)}
            ),
        ],
    )
    def test_pytorch_files(self, resnet, model, tmp_path, wrapped):
        path = tmp_path / "resnet18.pth"
        torch.save(wrapped(resnet), path)
        load_backbone_weights(model.backbone, path)
        self.check(model, resnet)

    def test_safetensors_as_an_option(self, resnet, tmp_path):
        safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
        path = tmp_path / "resnet18.safetensors"
        safetensors.save_file(resnet, path)
        self.check(kronattn.create_model("deeplabv2_aspp", backbone="resnet18", backbone_weights=str(path)), resnet)

    def test_kanet(self, tmp_path):
        classifier = kronattn.create_model("kanet_kv", num_classes=10, **TINY["backbone_options"])
        torch.save(classifier.state_dict(), tmp_path / "kanet.pt")
        model = tiny("deeplabv2_kao_kv", backbone_weights=tmp_path / "kanet.pt")
        assert torch.equal(model.backbone.stem.conv.weight, classifier.stem.conv.weight)

    def test_a_whole_segmentation_network(self, tmp_path):
        first = tiny("deeplabv2_aspp")
        nn.init.ones_(first.backbone.stem.conv.weight)
        torch.save(first.state_dict(), tmp_path / "first.pth")
        second = tiny("deeplabv2_kao_qkv", backbone_weights=tmp_path / "first.pth")
        assert torch.equal(second.backbone.stem.conv.weight, first.backbone.stem.conv.weight)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda s: {k: v for k, v in s.items() if k != "bn1.weight"},
                "do not fit the backbone: missing bn1.weight",
            ),
            (lambda s: s | {"layer9.weight": torch.ones(1)}, "unknown layer9.weight"),
            (
                lambda s: s | {"conv1.weight": torch.ones(2, 2)},
                r"conv1.weight is \(2, 2\) and should be \(64, 3, 7, 7\)",
            ),
            (lambda s: {}, "does not hold a state dict"),
            (lambda s: [1, 2], "holds a list where a dictionary of tensors was expected"),
            (lambda s: s | {"lr": 0.1}, "does not hold a state dict"),
            (lambda s: {"model": nn.Linear(1, 1)}, "is no checkpoint of tensors and plain values"),
        ],
    )
    def test_what_does_not_fit(self, resnet, model, tmp_path, change, message):
        path = tmp_path / "other.pth"
        torch.save(change(dict(resnet)), path)
        before = copy.deepcopy(model.backbone.state_dict())
        with pytest.raises(ValueError, match=message) as caught:
            load_backbone_weights(model.backbone, path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        self.check(model, before)

    @pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
    def test_broken_files(self, model, tmp_path, suffix):
        pytest.importorskip("safetensors", reason="safetensors is not installed")
        for content in (b"", b"not weights at all"):
            path = tmp_path / f"broken{suffix}"
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"broken{suffix} ") as caught:
                load_backbone_weights(model.backbone, path)
            assert "\n" not in str(caught.value)

    def test_missing_files_and_folders(self, model, tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no file .*none.pth"):
            load_backbone_weights(model.backbone, tmp_path / "none.pth")
        (tmp_path / "folder.pth").mkdir()
        with pytest.raises(IsADirectoryError, match="folder.pth is a folder"):
            load_backbone_weights(model.backbone, tmp_path / "folder.pth")
        with pytest.raises(ValueError, match="weights.onnx must end in .pth"):
            load_backbone_weights(model.backbone, tmp_path / "weights.onnx")


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"backbone": "resnet-50"}, "unknown backbone 'resnet-50': did you mean 'resnet50'?"),
            ({"backbone": "zzz"}, "unknown backbone 'zzz': known are " + ", ".join(BACKBONES[:2])),
            ({"head": "psp"}, "head must be one of aspp, attn, kao_kv, kao_qkv, not 'psp'"),
            ({"head": "aspp", "head_width": 64}, "head_width has no meaning for ASPP"),
            ({"backbone": "kanet_kv", "num_classes": 0}, "num_classes must be at least 1, not 0"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            DeepLabV2(**options)

    def test_unknown_option(self):
        with pytest.raises(TypeError, match="deeplabv2_kao_kv: .*num_clases"):
            kronattn.create_model("deeplabv2_kao_kv", num_clases=3)

    @pytest.mark.parametrize(
        ("shape", "message"),
        [((3, 64, 64), r"must be \(N, 3, H, W\), but its shape is"), ((1, 4, 64, 64), "must have 3 channels")],
    )
    def test_images(self, shape, message):
        with pytest.raises(ValueError, match=message):
            tiny("deeplabv2_kao_kv")(torch.randn(shape))

    def test_a_head_of_one_s_own(self):
        model = DeepLabV2(lambda channels, classes: nn.Conv2d(channels, classes, 1), **TINY)
        assert model(torch.randn(2, 3, 40, 41)).shape == (2, 4, 40, 41)

    def test_options_reach_the_head(self):
        model = tiny("deeplabv2_kao_kv", head_width=12, head_options={"num_heads": 3, "coefficient_norm": None})
        assert (model.head.width, model.head.attn.num_heads, model.head.attn.norm) == (12, 3, None)
        assert model.no_weight_decay() == {
            name for name, _ in model.named_parameters() if name.startswith("backbone.") and ".attn.norm." in name
        }
