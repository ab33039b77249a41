"""Names that were not found, with those that are near."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["near_names"]


def near_names(name: str, known: Iterable[str], *, most: int = 3) -> str:
    """What to say after "unknown": the nearest names or, where none is near, all of them.

    Example:
        >>> near_names("kanet_kw", ["kanet_kv", "kanet_qkv", "mobilenetv2"])
        "did you mean 'kanet_kv' or 'kanet_qkv'?"
        >>> near_names("x", ["cat", "dog"])
        'known are cat, dog'
    """
    listed = list(known)
    near = difflib.get_close_matches(name, listed, n=most, cutoff=0.6)
    if not near:
        return "known are " + ", ".join(listed)
    return f"did you mean {' or '.join(repr(one) for one in near)}?"
