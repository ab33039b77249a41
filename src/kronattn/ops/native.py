"""The first and the last stage on a CPU by compiled operators, for inference: what the package kronattn-cpu has.

It is optional, and never built with kronattn itself: ``native/README.md`` says how to install it. Where it is
installed, the environment's ``KRONATTN_NATIVE=0`` leaves it out.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kronattn.ops.checks import dtype_name
from kronattn.ops.compat import assume_constant, needs_dispatcher, under_transform
from kronattn.ops.fx import is_traced

__all__ = [
    "attend_own_averages_",
    "missing_reason",
    "pool",
    "serves",
    "spread",
    "spread_tokens",
    "switch",
    "unsupported_reason",
]

# Of the operators' signatures; kronattn_cpu has the same number.
_INTERFACE = 1


@assume_constant
def missing_reason() -> str | None:
    """Why there are no operators, found out once; None where there are."""
    return _found_out()


@cache
def _found_out() -> str | None:
    if os.environ.get("KRONATTN_NATIVE") == "0":
        return "the environment's KRONATTN_NATIVE=0 switches it off"
    try:
        import kronattn_cpu
    except ImportError:
        return "it needs the package kronattn-cpu, see native/README.md"
    except Exception as error:  # whatever is wrong with a build, the torch backend works
        lines = str(error).splitlines() or [""]
        return f"kronattn-cpu does not work here: {type(error).__name__}: {lines[0]}"
    if kronattn_cpu.INTERFACE != _INTERFACE:
        return "kronattn-cpu is of another version than kronattn: install it again"
    return None


def switch(on: bool) -> None:
    """Have this process, and those that it starts, do with the operators or without: for measurements and tests."""
    os.environ["KRONATTN_NATIVE"] = "1" if on else "0"
    _found_out.cache_clear()


def unsupported_reason(*tensors: Tensor, has_parameters: bool = False) -> str | None:
    """Why the operators cannot take these tensors, in words; None where they can.

    ``has_parameters`` says that more tensors take part, which may ask for gradients.
    """
    reason = missing_reason()
    if reason is not None:
        return reason
    records = torch.is_grad_enabled()
    for x in tensors:
        if not x.is_cpu:
            return f"it needs tensors on a CPU, not on {x.device.type}"
        if x.dtype != torch.float32:
            return f"it computes in float32, not in {dtype_name(x.dtype)}"
        if x.dim() != 4:
            return f"it takes grids of two axes, not of {x.dim() - 2}"
        if records and (has_parameters or x.requires_grad):
            return "it has no gradients: use torch.no_grad() or torch.inference_mode()"
    return _watched_reason(tensors[0])


def serves(x: Tensor) -> bool:
    """Whether :func:`attend_own_averages_` takes ``x``. Asked by each layer of a network, so it asks little."""
    if x.requires_grad or x.dtype != torch.float32 or not x.is_cpu:
        return False
    return missing_reason() is None and _watched_reason(x) is None


def _watched_reason(x: Tensor) -> str | None:
    if torch.compiler.is_compiling():
        return _exported_reason()
    if is_traced():
        return "traced programs must run without it"
    if under_transform() or needs_dispatcher(x):
        return "a transform or a counter of operations would not see through it"
    return None


@assume_constant
def _exported_reason() -> str | None:
    return "exported programs must run without it" if torch.compiler.is_exporting() else None


def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`kronattn.ops.torch_backend.pool`."""
    rows = _in_rows(x)
    return torch.ops.kronattn_cpu.pool.default(_dense(x, rows), rows), x


def spread(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int = 1,
    key_bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As :func:`kronattn.ops.torch_backend.spread`, for one head without biases of keys."""
    assert num_heads == 1
    assert key_bias is None
    rows = _in_rows(query)
    inputs: Any = _dense(query, rows), keys.contiguous(), values.contiguous()
    return torch.ops.kronattn_cpu.attend.default(*inputs, _dense(residual, rows), 1.0, rows)


def spread_tokens(tokens: Tensor, like: Tensor, *, residual: Tensor | None = None, mean_once: bool = False) -> Tensor:
    """As :func:`kronattn.ops.torch_backend.spread_tokens`."""
    rows = _in_rows(like)
    return torch.ops.kronattn_cpu.outer.default(tokens.contiguous(), like, _dense(residual, rows), mean_once, rows)


def attend_own_averages_(
    y: Tensor, x: Tensor, values: Tensor, direct: Tensor | None, scale: float, qkv: bool, mean_once: bool
) -> None:
    """Add to (N, d, h, w) y, which must be channels-last, the attention of (N, c, h, w) x to its own averages, whose
    values are these times (c, d) ``values``, and x times (c, d) ``direct``: all stages in one call, since in a network
    a call takes as long as the arithmetic of a small grid."""
    torch.ops.kronattn_cpu.fused_.default(y, _dense(x, True), values, direct, scale, qkv, mean_once)


def _in_rows(x: Tensor) -> bool:
    """Whether the channels of a position lie side by side."""
    return x.stride(1) == 1 and x.shape[1] > 1


def _dense(x: Any, rows: bool) -> Any:
    """``x`` without gaps in one of the two layouts: a copy where it has another."""
    if x is None:
        return None
    if x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last if rows else torch.contiguous_format)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if rows else x.contiguous()
