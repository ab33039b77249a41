"""timm: our networks by name, and our layer wherever timm takes an ``attn_layer``.

``import kronattn`` registers the networks as soon as timm is imported; :func:`register` does it at once, and says where
timm is missing. A layer needs no registration: timm's ``attn_layer`` takes the class itself.
"""

from __future__ import annotations

import importlib

from kronattn.extras import require_library

__all__ = ["register"]


def register() -> list[str]:
    """Register our classifiers and DeepLabs with timm, and return their names. Calling it again changes nothing.

    Example:
        >>> "kanet_kv" in register()
        True
        >>> import timm
        >>> timm.is_model("kanet_kv")
        True
    """
    require_library("timm", "registering with timm")
    # U-Nets stay ours: timm's networks end in classes or features.
    return list(importlib.import_module("kronattn.models.timm_entrypoints").REGISTERED)
