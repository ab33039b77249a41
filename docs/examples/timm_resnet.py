from functools import partial

import timm
from torch import Tensor, nn

from kronattn.nn import KroneckerAttention


class AddedAttention(KroneckerAttention):
    """Kronecker attention added to its input: what timm puts at the end of a block replaces the block's output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, residual=x)


def resnet(attention: bool = True) -> nn.Module:
    """A ResNet-18 whose blocks end in Kronecker attention, through timm's own door for attention layers."""
    layer = partial(AddedAttention, layer_scale=0.0)
    return timm.create_model("resnet18", block_args={"attn_layer": layer} if attention else None)
