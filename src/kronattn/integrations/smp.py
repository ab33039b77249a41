"""segmentation_models_pytorch: Kronecker attention in its decoders, and our networks as its encoders.

Encoders need nothing but ``import kronattn``: ``smp.Unet("tu-kanet_kv", encoder_weights=None)``. Decoders take
``decoder_attention_type="kao_kv"`` or ``"kao_qkv"`` after :func:`register`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kronattn.extras import require_library
from kronattn.nn import KroneckerAttention

__all__ = ["ATTENTIONS", "KroneckerDecoderAttention", "register"]

# Values of decoder_attention_type, and what our layer calls them.
ATTENTIONS = {"kao_kv": "kv", "kao_qkv": "qkv"}


class KroneckerDecoderAttention(nn.Module):
    """x plus Kronecker attention of x: (N, C, h, w) to the same.

    Example:
        >>> KroneckerDecoderAttention(16, "qkv")(torch.randn(2, 16, 8, 12)).shape
        torch.Size([2, 16, 8, 12])
    """

    def __init__(self, in_channels: int, mode: str = "qkv") -> None:
        super().__init__()
        self.attn = KroneckerAttention(in_channels, mode)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


def register() -> list[str]:
    """Make smp's decoders know our attention, and return the values that ``decoder_attention_type`` now takes.

    Calling it again changes nothing; smp's own values stay.
    """
    modules = require_library("segmentation_models_pytorch.base.modules", "register()")
    own = modules.Attention
    if not getattr(own, "_knows_kronattn", False):

        class Attention(own):  # type: ignore[misc, valid-type]
            """smp's choice of attention by name, with ours among them."""

            _knows_kronattn = True

            def __init__(self, name: str | None, **params: Any) -> None:
                try:
                    super().__init__(None if name in ATTENTIONS else name, **params)
                except ValueError as error:
                    raise ValueError(f"{error}; kronattn's are {' and '.join(ATTENTIONS)}") from None
                if name in ATTENTIONS:
                    self.attention = KroneckerDecoderAttention(params["in_channels"], ATTENTIONS[name])

        modules.Attention = Attention
    return list(ATTENTIONS)
