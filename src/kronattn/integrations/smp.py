"""segmentation_models_pytorch: Kronecker attention in its decoders, and our networks as its encoders.

Encoders need nothing but ``import kronattn``: ``smp.Unet("tu-kanet_kv", encoder_weights=None)``. Decoders take
``decoder_attention_type="kao_kv"`` or ``"kao_qkv"`` after :func:`register`.
"""

from __future__ import annotations

from typing import Any

from kronattn.extras import require_library
from kronattn.integrations.ultralytics import KroneckerBlock

__all__ = ["ATTENTIONS", "register"]

# Values of decoder_attention_type, and what our layer calls them.
ATTENTIONS = {"kao_kv": "kv", "kao_qkv": "qkv"}


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
                    self.attention = KroneckerBlock(params["in_channels"], ATTENTIONS[name])

        modules.Attention = Attention
    return list(ATTENTIONS)
