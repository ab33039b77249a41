"""The one place that decides what runs each stage of Kronecker attention, and that can say why.

``docs/kernels.md`` draws the decisions as a tree. Nothing else asks about devices, dtypes or tracing in order to pick
an implementation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronattn.ops import native
from kronattn.ops.checks import check_choice, check_mode, check_triple, dtype_name
from kronattn.ops.compat import assume_constant, under_transform
from kronattn.ops.fx import is_captured, is_traced, leaf_function
from kronattn.ops.triton.availability import broken_reason, has_room, interpreted

__all__ = ["BACKENDS", "Plan", "explain_plan", "kernels_unsupported_reason", "make_plan", "override_plan"]

BACKENDS = ("reference", "torch", "triton", "native")

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HALF = (torch.bfloat16, torch.float16)
# Channels of one head: a tile of sixteen positions still fits on the chip.
_WIDEST_KERNEL_HEAD = 512
# Channels of a head up to which fused attention, PyTorch's or ours, is fast.
_WIDEST_FAST_HEAD = 256
# Offsets within a sample are 32-bit integers.
_LARGEST_SAMPLE = 2**31


@dataclass(frozen=True)
class Plan:
    """What runs each stage of one call, and why.

    ``pool`` is "torch", "triton" or "native", ``spread`` is one of these or "matrix_products"; both are "reference"
    where the whole call is. The middle stage is plain PyTorch always.

    >>> print(Plan("torch", "torch", "query is on cpu"))
    pool: torch, mix: PyTorch, spread: torch (query is on cpu)
    """

    pool: str
    spread: str
    reason: str

    def __str__(self) -> str:
        return f"pool: {self.pool}, mix: PyTorch, spread: {self.spread} ({self.reason})"


def _without_cuda(kind: str) -> Plan:
    return Plan("torch", "torch", f"query is on {kind}: the kernels need a CUDA device")


_ON_CPU = _without_cuda("cpu")
_NATIVE = Plan("native", "native", "kronattn-cpu: float32 on a CPU, two axes, no gradients")
_NATIVE_POOL = Plan("native", "torch", "kronattn-cpu attends with one head and one softmax alone")
_overrides: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("kronattn_plan_overrides", default=())


@contextmanager
def override_plan(**stages: str) -> Iterator[None]:
    """Have every plan that is made inside run the stages named so: for tests and measurements.

    Example:
        >>> x = torch.randn(1, 4, 3, 3)
        >>> with override_plan(spread="matrix_products"):
        ...     explain_plan(x).spread
        'matrix_products'
    """
    token = _overrides.set((*_overrides.get(), *stages.items()))
    try:
        yield
    finally:
        _overrides.reset(token)


@assume_constant
def _overridden() -> tuple[tuple[str, str], ...]:
    return _overrides.get()


def explain_plan(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    mode: str = "kv",
    num_heads: int = 1,
    masked: bool = False,
    backend: str = "auto",
) -> Plan:
    """What :func:`kronattn.kronecker_attention` would run for these tensors, with a mask or without, and why.

    Example:
        >>> print(explain_plan(torch.randn(2, 64, 28, 28), mode="qkv"))
        pool: torch, mix: PyTorch, spread: torch (query is on cpu: the kernels need a CUDA device)
    """
    check_mode(mode)
    query, key, value = check_triple(query, key, value, num_heads, 1.0)
    return make_plan(query, key, value, mode=mode, num_heads=num_heads, masks=(masked or None,), backend=backend)


@leaf_function
def make_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mode: str = "kv",
    num_heads: int = 1,
    backend: str = "auto",
    per_key: bool = False,
    masks: Sequence[object] = (),
    channels: int | None = None,
    has_parameters: bool = False,
) -> Plan:
    """The plan for checked tensors.

    Args:
        query: (N, C, *grid).
        key: (N, C, *other_grid).
        value: (N, P, *other_grid).
        mode: "kv" or "qkv".
        num_heads: of the attention.
        backend: "auto" or one of ``BACKENDS``. A backend that cannot run is refused, with the reason.
        per_key: every key has a norm of its own, or every axis a softmax.
        masks: any that are not None leave attention to PyTorch, which takes a bias for each sample's keys.
        channels: the most that queries, keys or values have once they are mapped; those of query and value by default.
        has_parameters: whether more tensors take part, which may ask for gradients.
    """
    masked = any(mask is not None for mask in masks) if masks else False
    if backend == "auto":
        widest = max(channels or 0, query.shape[1], value.shape[1])
        if query.device.type == "cpu":
            plan = _on_cpu(query, key, value, num_heads, per_key, has_parameters)
        else:
            plan = _automatic(query, key, value, mode, num_heads, per_key, widest)
        overridden = _overridden()
        plan = replace(plan, reason="overridden", **dict(overridden)) if overridden else plan
        if masked and plan.spread != "torch":
            return replace(plan, spread="torch", reason="a mask: the kernels' bias of keys is the same for all samples")
        return plan
    if backend == "triton":
        reason = kernels_unsupported_reason(query, key, value, num_heads)
        if masked:
            reason = "its bias of keys is the same for all samples, and a mask's is not"
        if reason:
            raise ValueError(f"backend 'triton' cannot run here: {reason}")
    if backend == "native":
        reason = native.unsupported_reason(query, key, value, has_parameters=has_parameters)
        if masked or num_heads > 1 or per_key:
            reason = "it has one head, one softmax and no masks"
        if reason:
            raise ValueError(f"backend 'native' cannot run here: {reason}")
    check_choice("backend", backend, ("auto", *BACKENDS))
    return Plan(backend, backend, "asked for by name")


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, num_heads: int, per_key: bool, has_parameters: bool) -> Plan:
    if native.unsupported_reason(query, key, value, has_parameters=has_parameters) is not None:
        return _ON_CPU
    return _NATIVE if num_heads == 1 and not per_key else _NATIVE_POOL


def _automatic(
    query: Tensor, key: Tensor, value: Tensor, mode: str, num_heads: int, per_key: bool, channels: int
) -> Plan:
    if query.device.type != "cuda":
        return _without_cuda(query.device.type)
    if query.dtype not in _HALF:
        # float32 on the kernels has not been measured ahead.
        return Plan("torch", "torch", f"{dtype_name(query.dtype)}: the kernels are ahead in half precision alone")
    if query.dim() != 4 or key.dim() != 4:
        return Plan("torch", "torch", "grids of other than two axes have not been measured on the kernels")
    # Channels are averaged each by itself, so there may be any number of them.
    reason = kernels_unsupported_reason(query, key, value, channels)
    if reason is None and not has_room():
        reason = "the GPU has too little shared memory for the kernels' blocks"
    if reason is not None:
        return Plan("torch", "torch", reason)
    head = channels // num_heads
    if head <= _WIDEST_FAST_HEAD:
        return Plan("triton", "triton", f"half precision, two axes, {head} channels a head")
    if num_heads == 1 and not per_key and (mode == "qkv" or _is_small(query, key)):
        return Plan("triton", "matrix_products", f"{head} channels a head, and coefficients smaller than the features")
    return Plan("triton", "torch", f"{head} channels a head: too many for the kernels to be ahead")


def _is_small(query: Tensor, key: Tensor) -> bool:
    """Whether the coefficient matrix is at most half as large as the features."""
    if is_captured():
        return True  # sizes are yet to be seen; for few keys, which wide layers have, it is
    return 2 * math.prod(query.shape[2:]) * sum(key.shape[2:]) <= math.prod(query.shape[1:])


def kernels_unsupported_reason(query: Tensor, key: Tensor, value: Tensor, num_heads: int = 1) -> str | None:
    """Why the kernels cannot take this input, in words; None where they can."""
    if not query.is_cuda and not interpreted():
        return f"it needs a CUDA tensor, and query is on {query.device}"
    if query.dtype not in _KERNEL_DTYPES:
        return f"it computes in float32, bfloat16 and float16, not in {dtype_name(query.dtype)}"
    batch, channels = query.shape[:2]
    widest = (channels if value is query else max(channels, value.shape[1])) // num_heads
    if widest > _WIDEST_KERNEL_HEAD:
        return f"a head may have up to {_WIDEST_KERNEL_HEAD} channels, not {widest}"
    if batch == 0:
        return "the batch is empty"
    for name, x in (("query", query),) if value is query else (("query", query), ("key", key), ("value", value)):
        if x.numel() // batch >= _LARGEST_SAMPLE:
            return f"a sample of {name} must have fewer than 2**31 elements, not {x.numel() // batch}"
    if torch.compiler.is_compiling():
        return _captured_reason()
    if is_traced():
        return "traced programs must run without Triton"
    if under_transform():
        return "torch.func's transforms do not see through it"
    return broken_reason()


@assume_constant
def _captured_reason() -> str | None:
    """Why a program that is being captured must not hold kernels: it is exported, or Triton does not work.

    Asked outside of what is captured: PyTorch 2.11's compiler takes every capture for an export, and finding out
    whether Triton works changes what the next call sees.
    """
    return "exported programs must run without Triton" if torch.compiler.is_exporting() else broken_reason()
