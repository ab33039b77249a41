"""The one place that picks a backend. A new one is one entry in ``BACKENDS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kronattn.ops import plain, reference, triton
from kronattn.ops.attend import is_captured

__all__ = ["BACKENDS", "Backend", "averages_backend", "axis_averages", "choose_backend"]


def _serves_everything(query: Tensor, key: Tensor, value: Tensor, num_heads: int) -> str | None:
    return None


def _always(operator: str, query: Tensor, key: Tensor, value: Tensor, num_heads: int) -> bool:
    return True


@dataclass(frozen=True)
class Backend:
    """One implementation of the two operators; all take checked input and give the same result.

    ``refuses(query, key, value, num_heads)`` is None where the backend can run, else the reason it cannot, in
    words. ``worth_it(operator, query, key, value, num_heads)`` is whether "auto" should pick it where it can.
    ``axis_averages`` and ``attend_averages`` are the two halves of Kronecker attention, for modules that do
    something to the averages in between. ``layer`` does all of a self-attention layer at once, and ``built_layer`` that
    of one too wide for it; they give None for what they cannot do, and are None where there is no such thing.
    """

    attention: Callable[..., Tensor]
    kronecker_attention: Callable[..., Tensor]
    axis_averages: Callable[[Tensor], Tensor] = plain.axis_averages
    attend_averages: Callable[..., Tensor] = plain.attend_averages
    refuses: Callable[[Tensor, Tensor, Tensor, int], str | None] = _serves_everything
    worth_it: Callable[[str, Tensor, Tensor, Tensor, int], bool] = _always
    layer: Callable[..., Tensor | None] | None = None
    built_layer: Callable[..., Tensor | None] | None = None


BACKENDS = {
    "reference": Backend(reference.attention, reference.kronecker_attention),
    "torch": Backend(plain.attention, plain.kronecker_attention),
    "triton": Backend(
        triton.attention,
        triton.kronecker_attention,
        triton.axis_averages,
        triton.attend_averages,
        triton.refuses,
        triton.worth_it,
        triton.attention_layer,
        triton.attention_layer_built,
    ),
}

# Fastest first. The reference is for checking and is never picked.
_AUTOMATIC: tuple[str, ...] = ("triton", "torch")


def choose_backend(
    name: str, query: Tensor, key: Tensor, value: Tensor, *, operator: str = "kv", num_heads: int = 1
) -> Backend:
    """The backend called ``name`` or, for ``"auto"``, the fastest that supports the input.

    ``operator`` is what it is wanted for: "attention", or a mode of Kronecker attention.
    """
    if name == "auto":
        for candidate in _AUTOMATIC:
            backend = BACKENDS[candidate]
            if backend.worth_it(operator, query, key, value, num_heads) and not backend.refuses(
                query, key, value, num_heads
            ):
                return backend
        return BACKENDS["torch"]
    if name not in BACKENDS:
        known = ", ".join(repr(known) for known in ("auto", *BACKENDS))
        raise ValueError(f"backend must be one of {known}, not {name!r}")
    reason = BACKENDS[name].refuses(query, key, value, num_heads)
    if reason:
        raise ValueError(f"backend {name!r} cannot run here: {reason}")
    return BACKENDS[name]


def averages_backend(x: Tensor, backend: Backend) -> Backend:
    """The fastest backend for the averages of (N, C, *grid) where ``backend`` is the one that attends.

    Not always the same: channels are averaged each by itself, like so many heads of one channel, so there is no limit
    on how many there are. A captured graph keeps to ``backend``.
    """
    return backend if is_captured() else choose_backend("auto", x, x, x, num_heads=x.shape[1])


def axis_averages(x: Tensor, backend: Backend) -> Tensor:
    """Averages of (N, C, *grid) as :func:`kronattn.axis_averages`, in float32 at least, by :func:`averages_backend`."""
    return averages_backend(x, backend).axis_averages(x)
