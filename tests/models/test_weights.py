"""Weights from elsewhere: MobileNetV2's of torchvision and timm, and weights that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kronattn import create_model
from kronattn.models import load_mobilenetv2_weights, load_weights
from kronattn.models.weights import adapt_first_convolution


def randomised(model):
    """Batch norms with statistics that matter, as after training."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def torchvision_mobilenet(**options):
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    return randomised(models.mobilenet_v2(**options))


def timm_mobilenet(**options):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    return randomised(timm.create_model("mobilenetv2_100", **options))


@pytest.mark.parametrize("build", [torchvision_mobilenet, timm_mobilenet])
def test_mobilenetv2_gives_their_outputs(build):
    theirs = build()
    ours = create_model("mobilenetv2").eval()
    transfer = load_mobilenetv2_weights(ours, theirs.state_dict())
    assert not transfer.left
    assert not transfer.in_part
    assert len(transfer.taken) == len(ours.state_dict()) == len(theirs.state_dict())
    for size in ((64, 64), (96, 72)):
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            expected, output = theirs(x), ours(x)
        assert (output - expected).abs().max() <= 1e-5 * expected.abs().max().clamp_min(1)


@pytest.mark.parametrize("name", ["kanet_kv", "kanet_qkv", "attnnet", "mobilenetv2_kao", "kanet_without_kao"])
def test_the_others_start_from_it(name):
    source = randomised(create_model("mobilenetv2", num_classes=7))
    state = source.state_dict()
    model = create_model(name, num_classes=7)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    transfer = load_mobilenetv2_weights(model, state)
    after = model.state_dict()
    assert sorted(transfer.taken + transfer.in_part + transfer.left) == sorted(after)
    for key in transfer.taken:
        assert torch.equal(after[key], state[key])
    for key in transfer.in_part:
        assert torch.equal(after[key], state[key][tuple(slice(size) for size in after[key].shape)])
        assert ".expand." in key or ".depthwise." in key
    for key in transfer.left:
        assert torch.equal(after[key], before[key])
        assert ".attn." in key
    assert f"{len(transfer.taken)} tensors taken" in str(transfer)


def test_other_classes_leave_the_classifier():
    state = create_model("mobilenetv2", num_classes=7).state_dict()
    transfer = load_mobilenetv2_weights(create_model("mobilenetv2", num_classes=5), state)
    assert transfer.left == ["classifier.weight", "classifier.bias"]


def test_errors():
    state = create_model("mobilenetv2", width=0.5).state_dict()
    with pytest.raises(ValueError, match=r"stem.conv.weight is \(16, .* use the same width and in_chans"):
        load_mobilenetv2_weights(create_model("mobilenetv2"), state)
    with pytest.raises(ValueError, match="not a MobileNetV2's as in torchvision, timm or kronattn: fc.weight"):
        load_mobilenetv2_weights(create_model("mobilenetv2"), {"fc.weight": torch.zeros(1)})
    model = create_model("kanet_kv", num_classes=3)
    state = model.state_dict()
    state["extra"] = state.pop("stem.conv.weight")
    state["classifier.weight"] = torch.zeros(4, 1280)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(
        ValueError, match="do not fit KANet: missing stem.conv.weight; unknown extra; .*classifier.weight"
    ):
        load_weights(model, state)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_no_channels_to_adapt_to():
    with pytest.raises(ValueError, match="channels must be at least 1, not 0"):
        adapt_first_convolution(torch.ones(8, 3, 3, 3), 0)
