import segmentation_models_pytorch as smp
from torch import nn

import kronattn  # timm, and so smp, knows our networks from here on
from kronattn.integrations.smp import register

register()


def unet(classes: int = 3) -> nn.Module:
    """A U-Net with KANet for its encoder and Kronecker attention in its decoder."""
    return smp.Unet("tu-kanet_kv", encoder_weights=None, decoder_attention_type="kao_qkv", classes=classes)


def unet_from_imagenette(classes: int = 3) -> nn.Module:
    """The same from the weights that come with kronattn, of Imagenette: asking for "imagenet" is an error."""
    return smp.Unet("tu-kanet_kv.imagenette", encoder_weights="imagenette", classes=classes)
