"""Makes a module one node of any torch.fx graph, so that its forward is free to look at shapes and strides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import fx

__all__ = ["traced_as_one_node"]


def traced_as_one_node(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``forward``: symbolic tracing records a call of the module rather than what happens inside.

    Tracers treat torch.nn's own modules so and can be told to for others (``leaf_modules``); this tells them
    all, whichever library started the trace.
    """

    @functools.wraps(forward)
    def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, fx.Proxy):
                tracer: Any = argument.tracer
                return tracer.create_proxy("call_module", tracer.path_of_module(self), arguments, options)
        return forward(self, *arguments, **options)

    return wrapper
