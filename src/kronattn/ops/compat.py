"""Every use of a private interface of PyTorch, each for want of a public one.

``tests/ops/test_compat.py`` has a test for each that fails when PyTorch takes it away or changes what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_map

__all__ = [
    "assume_constant",
    "copy_all",
    "has_hooks",
    "is_batch_norm",
    "lerp_all",
    "needs_dispatcher",
    "tree_map",
    "under_transform",
    "without_modes",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def under_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ...) is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def needs_dispatcher(x: Tensor) -> bool:
    """Whether something watches the operators that run on ``x``: a tensor subclass, or a dispatch mode such as a
    counter of operations."""
    return type(x) not in (Tensor, nn.Parameter) or _get_current_dispatch_mode() is not None


def without_modes() -> AbstractContextManager[Any]:
    """No dispatch mode at work: operators run, whoever watches or fakes the call around."""
    return _disable_current_modes()


def assume_constant(function: Function) -> Function:
    """What torch.compiler.assume_constant_result does, without importing the compiler to say so."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of ``module`` is more than its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_batch_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a batch norm of any number of dimensions, synchronised or not."""
    return isinstance(module, _BatchNorm)


def lerp_all(tensors: Sequence[Tensor], others: Sequence[Tensor], weight: float | Tensor) -> None:
    """Move each tensor towards another by ``weight``, in place, in few launches for all of them.

    ``weight`` may be a tensor on the device, which a CUDA graph reads anew each time.
    """
    tensors, others = list(tensors), list(others)
    if isinstance(weight, Tensor):
        torch._foreach_mul_(tensors, 1 - weight)
        torch._foreach_add_(tensors, torch._foreach_mul(others, weight))
    else:
        torch._foreach_lerp_(tensors, others, weight)


def copy_all(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Copy each of the others into a tensor, in few launches for all of them."""
    torch._foreach_copy_(list(tensors), list(others))
