import timm
from torch import nn

from kronattn.nn import KroneckerAttention


def resnet(attention: bool = True) -> nn.Module:
    """A ResNet-18 whose blocks end in Kronecker attention, through timm's own door for attention layers."""
    return timm.create_model("resnet18", block_args={"attn_layer": KroneckerAttention} if attention else None)
