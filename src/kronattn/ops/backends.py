"""The one place that picks a backend. A new one is one entry in ``BACKENDS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kronattn.ops import plain, reference

__all__ = ["BACKENDS", "Backend", "choose_backend"]


def _serves_everything(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of the two operators; all take checked input and give the same result.

    ``refuses(query, key, value)`` is None where the backend can run, else the reason it cannot, in words.
    """

    attention: Callable[..., Tensor]
    kronecker_attention: Callable[..., Tensor]
    refuses: Callable[[Tensor, Tensor, Tensor], str | None] = _serves_everything


BACKENDS = {
    "reference": Backend(reference.attention, reference.kronecker_attention),
    "torch": Backend(plain.attention, plain.kronecker_attention),
}

# Fastest first. The reference is for checking and is never picked.
_AUTOMATIC = ("torch",)


def choose_backend(name: str, query: Tensor, key: Tensor, value: Tensor) -> Backend:
    """The backend called ``name`` or, for ``"auto"``, the fastest that supports the input."""
    if name == "auto":
        return next(
            BACKENDS[candidate] for candidate in _AUTOMATIC if not BACKENDS[candidate].refuses(query, key, value)
        )
    if name not in BACKENDS:
        known = ", ".join(repr(known) for known in ("auto", *BACKENDS))
        raise ValueError(f"backend must be one of {known}, not {name!r}")
    reason = BACKENDS[name].refuses(query, key, value)
    if reason:
        raise ValueError(f"backend {name!r} cannot run here: {reason}")
    return BACKENDS[name]
