"""What symbolic tracing records as one node, so that code is free to look at shapes, strides and devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx import Proxy

__all__ = ["is_captured", "is_traced", "leaf_function", "leaf_module"]

Function = TypeVar("Function", bound=Callable[..., Any])


def is_traced() -> bool:
    """Whether torch.jit.trace is at work."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def is_captured() -> bool:
    """Whether a graph is being captured (torch.compile, torch.export, torch.jit.trace), for sizes yet to be seen."""
    return torch.compiler.is_compiling() or is_traced()


def leaf_function(function: Function) -> Function:
    """Decorate a function: torch.fx records a call of it rather than what happens inside.

    torch.fx.wrap does this for callers in one file; this does it wherever the function is called from.
    """

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        for argument in (*arguments, *options.values()) if options else arguments:
            if isinstance(argument, Proxy):
                return argument.tracer.create_proxy("call_function", wrapper, arguments, options)
        return function(*arguments, **options)

    return wrapper  # type: ignore[return-value]


def leaf_module(forward: Function) -> Function:
    """Decorate a module's ``forward`` in the same way; a module that is traced by itself is traced through."""

    @functools.wraps(forward)
    def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        for argument in (*arguments, *options.values()):
            if isinstance(argument, Proxy) and argument.tracer.root is not self:  # type: ignore[attr-defined]
                tracer: Any = argument.tracer
                return tracer.create_proxy("call_module", tracer.path_of_module(self), arguments, options)
        return forward(self, *arguments, **options)

    return wrapper  # type: ignore[return-value]
