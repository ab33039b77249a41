"""The U-Net: shapes, where its context layers stand, and what it refuses."""

import pytest
import torch
from torch import nn

import kronattn
from kronattn.models.unet import UNet
from kronattn.nn import list_contexts


@pytest.mark.parametrize("context", list_contexts())
@pytest.mark.parametrize("axes", [2, 3])
def test_every_context_at_odd_sizes(context, axes):
    torch.manual_seed(0)
    model = UNet(num_classes=3, in_chans=2, axes=axes, widths=(4, 8, 8), context=context)
    x = torch.randn(2, 2, *(7, 10, 5)[:axes])
    y = model(x)
    assert y.shape == (2, 3, *x.shape[2:])
    y.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("axes", [2, 3])
def test_only_a_context_sees_the_whole_grid(axes):
    """The last position, further from the first than convolutions reach, moves it through the context alone."""
    reached = {}
    for context in ("none", "global_mean"):
        torch.manual_seed(0)
        model = UNet(num_classes=2, in_chans=1, axes=axes, widths=(4, 4), context=context).eval()
        x = torch.randn(1, 1, *[40, *[8] * (axes - 1)], requires_grad=True)
        model(x)[(0, slice(None), *[0] * axes)].sum().backward()
        reached[context] = float(x.grad[(0, 0, *[-1] * axes)].abs())
    assert reached["none"] == 0
    assert reached["global_mean"] > 0


def test_places():
    def layers(**options):
        model = UNet(widths=(4, 8, 16), context="global_mean", **options)
        return [name for name, module in model.named_modules() if type(module).__name__ == "GlobalMean"]

    assert layers() == ["bottom.attn", "skips.1.attn"]
    assert layers(places=["bottom"]) == ["bottom.attn"]
    assert layers(places=[]) == []


def test_the_norms_of_coefficients_do_not_decay():
    model = UNet(widths=(4, 8), context="kao_kv")
    assert model.no_weight_decay() == {name for name, _ in model.named_parameters() if "bottom.attn.norm" in name}
    assert model.no_weight_decay()
    model = UNet(widths=(4, 8), context="kao_kv:positions=learned")
    assert "bottom.attn.positions.vectors" in model.no_weight_decay()


def test_any_layer_may_be_its_context():
    """One without a residual of its own, too."""
    model = UNet(num_classes=2, widths=(4, 8), context=lambda channels: nn.Conv2d(channels, channels, 1))
    x = torch.randn(1, 8, 5, 6)
    torch.testing.assert_close(model.bottom(x), x + model.bottom.attn(x))
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 2, 16, 16)


@pytest.mark.parametrize(("option", "value"), [("num_classes", 0), ("num_classes", "3"), ("in_chans", 0)])
def test_bad_numbers(option, value):
    with pytest.raises((ValueError, TypeError), match=f"{option} must be"):
        UNet(widths=(4, 8), **{option: value})


def test_a_bad_number_of_classes_leaves_the_network_as_it_was():
    model = UNet(num_classes=3, widths=(4, 8))
    with pytest.raises(ValueError, match="num_classes must be at least 1, not 0"):
        model.reset_classifier(0)
    assert model(torch.randn(1, 3, 9, 9)).shape == (1, 3, 9, 9)


def test_by_name():
    gated = kronattn.create_model("unet", widths=(4, 8)).bottom
    assert (gated.attn.mode, gated.attn.gate) == ("kv", True)
    assert kronattn.create_model("unet", num_classes=4, widths=(4, 8))(torch.randn(1, 3, 9, 9)).shape == (1, 4, 9, 9)
    volumes = kronattn.create_model("unet3d", num_classes=4, widths=(4, 8))
    assert volumes(torch.randn(1, 1, 5, 6, 7)).shape == (1, 4, 5, 6, 7)
    volumes.reset_classifier(2)
    assert volumes(torch.randn(1, 1, 5, 6, 7)).shape == (1, 2, 5, 6, 7)


def test_bad_input():
    with pytest.raises(ValueError, match="axes must be 2 or 3, not 4"):
        UNet(axes=4)
    with pytest.raises(ValueError, match="widths must be two numbers"):
        UNet(widths=(8,))
    with pytest.raises(ValueError, match="places must be of bottom, skips, not 'top'"):
        UNet(places=["top"])
    model = UNet(widths=(4, 8))
    with pytest.raises(ValueError, match=r"the input must be \(N, 3, H, W\), but its shape is \(1, 3, 4, 4, 4\)"):
        model(torch.randn(1, 3, 4, 4, 4))
    with pytest.raises(ValueError, match=r"the input must have 3 channels \(in_chans\), but has 1"):
        model(torch.randn(1, 1, 4, 4))
