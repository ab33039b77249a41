"""Which modules may be left out of a call because their weights say all there is to know about them."""

from __future__ import annotations

from torch import Tensor, nn

from kronattn.ops.compat import has_hooks

__all__ = ["is_plain"]

_MODULES = (nn.Conv2d, nn.Linear, nn.BatchNorm2d)
_WEIGHTS = (nn.Parameter, Tensor, type(None))


def is_plain(*modules: nn.Module) -> bool:
    """Whether calling each module is the same as computing with its weights: the one function that shortcuts ask.

    Not so for subclasses (adapters, parametrised or sharded or quantised modules), for modules with hooks (pruning,
    counters, whoever listens), and for weights that are more than a tensor. Those modules are called.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> is_plain(linear), is_plain(nn.utils.parametrizations.weight_norm(linear))
        (True, False)
    """
    return all(
        type(module) in _MODULES
        and not has_hooks(module)
        and type(getattr(module, "weight", None)) in _WEIGHTS
        and type(getattr(module, "bias", None)) in _WEIGHTS
        for module in modules
    )
