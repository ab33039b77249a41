"""Multiply-adds (MAdd), read off what is executed, and parameters: the counters of the whole library."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.ops.compat import is_batch_norm, tree_map

__all__ = ["count_madd", "count_parameters"]


def count_madd(call: Callable[..., Any], *inputs: Any, **options: Any) -> int:
    """Count the multiply-adds of one call of a function or a module: convolutions, matrix products, attention.

    Element-wise work (activations, batch norm, softmax, averages) is not counted, as in the paper. A module is
    counted as it runs in evaluation, on a copy: neither its mode nor its state changes. Where possible nothing
    is computed: shapes alone go through the computation, so that a large network takes milliseconds.

    Args:
        call: a function, a module, or a method of a module.
        inputs, options: its arguments. The paper's figures are for one sample: give a batch of 1.

    Returns:
        The number of multiply-adds, each one multiplication and one addition.

    Example:
        >>> count_madd(torch.nn.Linear(10, 20), torch.empty(1, 10))
        200
        >>> x = torch.empty(1, 1, 196, 8)  # 196 positions of 8 channels, each the query of 196 keys and values
        >>> count_madd(torch.nn.functional.scaled_dot_product_attention, x, x, x) == 196 * 196 * (8 + 8)
        True
    """
    try:
        shapes = tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, (inputs, options))
        return _count(_with_copied_module(call, _meta_copy), *shapes)
    except Exception:
        # No shapes-only form: it reads values, uses an operation without one, or holds tensors of its own.
        # Whatever else was wrong with the call is raised again here.
        return _count(_copied(call), inputs, options)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of a model's parameters: all, and those that do not belong to a batch norm.

    Example:
        >>> count_parameters(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)))
        (48, 32)
    """
    norms = (m for m in model.modules() if is_batch_norm(m) or isinstance(m, CoefficientNorm))
    in_norms = sum(parameter.numel() for norm in norms for parameter in norm.parameters(recurse=False))
    everything = sum(parameter.numel() for parameter in model.parameters())
    return everything, everything - in_norms


def _count(call: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> int:
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    with _computed_literally(), torch.no_grad(), counter:
        call(*inputs, **options)
    flops = counter.get_total_flops()
    if flops % 2:
        raise RuntimeError(f"{flops} floating-point operations are not a whole number of multiply-adds")
    return flops // 2


@contextmanager
def _computed_literally() -> Iterator[None]:
    """The one place for whatever makes modules compute what their definition says, operation by operation.

    PyTorch's own attention modules have a fused path for evaluation, which the counter cannot look into.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _copied(call: Callable[..., Any]) -> Callable[..., Any]:
    return _with_copied_module(call, lambda module: copy.deepcopy(module).eval())


def _with_copied_module(call: Callable[..., Any], make_copy: Callable[[nn.Module], nn.Module]) -> Callable[..., Any]:
    if isinstance(call, nn.Module):
        return make_copy(call)
    if isinstance(call, MethodType) and isinstance(call.__self__, nn.Module):
        return MethodType(call.__func__, make_copy(call.__self__))
    return call


def _meta_copy(module: nn.Module) -> nn.Module:
    # deepcopy takes what it finds in the memo for already copied: no weight is ever duplicated.
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, memo).eval()


def _matrix_vector(matrix: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _matrix_vector_added(_: torch.Size, matrix: torch.Size, *__: Any, **___: Any) -> int:
    return 2 * matrix.numel()


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    """(N, H, m, d) queries, (N, H', n, d) keys and (N, H', n, p) values: KᵀQ and its product with V."""
    batch, heads, queries, channels = query
    return 2 * batch * heads * queries * key[-2] * (channels + value[-1])


_aten = torch.ops.aten

# What FlopCounterMode has no formula for, in floating-point operations: two for a multiply-add. Its own formula
# for fused attention on the CPU is missing in older versions of PyTorch.
_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten.mv: _matrix_vector,
    _aten.dot: _matrix_vector,
    _aten.vdot: _matrix_vector,
    _aten.addmv: _matrix_vector_added,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_fused_attention_overrideable: _attention,
}
