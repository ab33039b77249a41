"""Our attention in segmentation_models_pytorch's decoders, our networks as its encoders."""

import pytest
import torch

from tests.integrations.examples import example
from tests.integrations.steps import attention_layers, exports, saves_and_loads, step

smp = pytest.importorskip("segmentation_models_pytorch", reason="not installed: pip install 'kronattn[smp]'")


def test_a_unet_trains_saves_loads_and_exports(tmp_path):
    unet = example("smp_unet").unet
    torch.manual_seed(0)
    model, x = unet(), torch.randn(2, 3, 64, 64)
    assert any("decoder" in name for name, module in model.named_modules() if module in attention_layers(model))
    step(model, x, torch.randint(0, 3, (2, 64, 64)))
    saves_and_loads(model, unet(), x, tmp_path)
    exports(model, x)


@pytest.mark.parametrize("kind", ["Unet", "UnetPlusPlus"])
def test_decoders_by_name(kind):
    from kronattn.integrations.smp import register

    assert register() == register() == ["kao_kv", "kao_qkv"]
    build = getattr(smp, kind)
    model = build("resnet18", encoder_weights=None, decoder_attention_type="kao_kv", classes=2)
    assert {layer.mode for layer in attention_layers(model)} == {"kv"}
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 2, 64, 64)
    # What smp had stays, and what it refused is refused.
    assert not attention_layers(build("resnet18", encoder_weights=None, decoder_attention_type="scse"))
    with pytest.raises(ValueError, match="Attention magic is not implemented; kronattn's are kao_kv and kao_qkv"):
        build("resnet18", encoder_weights=None, decoder_attention_type="magic")


def test_encoder_weights():
    import kronattn

    with pytest.raises(ValueError, match="kanet_kv has no weights of ImageNet"):
        smp.Unet("tu-kanet_kv", encoder_weights="imagenet")
    model = example("smp_unet").unet_from_imagenette()
    packaged = kronattn.create_model("kanet_kv", pretrained=True)
    states = dict(model.encoder.named_parameters())
    (stem,) = (value for name, value in states.items() if name.endswith("stem.conv.weight"))
    assert torch.equal(stem, packaged.stem.conv.weight)
