"""Context layers by name: what a network, a head or a recipe can put in the place of attention."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from kronattn.names import near_names
from kronattn.nn.attention import DenseAttention, KroneckerAttention
from kronattn.nn.context import AxisMeans, CoordinateGate, GlobalContext, GlobalMean, NoContext, SqueezeAxial
from kronattn.ops.checks import check_positive_int

__all__ = ["CONTEXTS", "build_context", "context_builder", "list_contexts", "parse_context"]

# "none" asks a network to do without, if it has a form for that; "identity" is a layer that adds nothing.
CONTEXTS: dict[str, Callable[..., nn.Module]] = {
    "none": NoContext,
    "identity": NoContext,
    "global_mean": GlobalMean,
    "axis_means": AxisMeans,
    "coordinate_gate": CoordinateGate,
    "global_context": GlobalContext,
    "squeeze_axial": SqueezeAxial,
    "attention": DenseAttention,
    "attention_pool": partial(DenseAttention, pool=2),
    "kao_kv": partial(KroneckerAttention, mode="kv"),
    "kao_qkv": partial(KroneckerAttention, mode="qkv"),
    "kao_qkv_as_printed": partial(KroneckerAttention, mode="qkv", mean="each"),
}

# Layers with parameters for each axis, which have to know how many there are.
PER_AXIS = ("coordinate_gate", "squeeze_axial")
# Vectors that positions="learned" has for each axis, where nothing else is said.
_PLACES = 16
# Python's words, as people write them in a recipe or on a command line.
_WORDS = ("true", "false", "none")


def list_contexts() -> list[str]:
    """The names that :func:`build_context` knows.

    Example:
        >>> list_contexts()[:3]
        ['none', 'identity', 'global_mean']
    """
    return list(CONTEXTS)


def build_context(name: str, channels: int, *, axes: int = 2, **options: Any) -> nn.Module:
    """Build a context layer by its name.

    Args:
        name: one of :func:`list_contexts`; options may follow it: ``"kao_qkv:positions=learned:gate=true"``.
        channels: of its input and output.
        axes: of the grid: 2 for images, 3 for volumes. Most layers take any number of them.
        options: the layer's own, such as ``num_heads=4``.

    Example:
        >>> build_context("global_context", 64)(torch.randn(2, 64, 5, 6)).shape
        torch.Size([2, 64, 5, 6])
        >>> build_context("global_maen", 64)
        Traceback (most recent call last):
        ...
        ValueError: unknown context 'global_maen': did you mean 'global_mean'...? There are none, identity, ...
    """
    check_positive_int("axes", axes)
    name, named = parse_context(name)
    if "axes" in named:
        raise ValueError(f"{name}: axes={named['axes']!r} is not for the name to say: it follows from the grid")
    for option in named.keys() & options.keys():
        raise ValueError(f"{option} was given twice, as {named[option]!r} after {name} and as {options[option]!r}")
    options |= named
    if name in PER_AXIS:
        options["axes"] = axes
    if options.get("positions") is not None and name.startswith("kao_"):
        options.setdefault("grid", (_PLACES,) * axes)
    try:
        return CONTEXTS[name](channels, **options)
    except TypeError as error:
        # Python's own message names a class and its __init__, which the caller has not heard of.
        raise TypeError(f"{name}: {str(error).split('() ')[-1]}") from None


def parse_context(text: str) -> tuple[str, dict[str, Any]]:
    """A name of :func:`list_contexts`, or the error lists them, and the options that follow it after colons.

    Example:
        >>> parse_context("kao_qkv:positions=learned:num_heads=4:gate=true")
        ('kao_qkv', {'positions': 'learned', 'num_heads': 4, 'gate': True})
    """
    name, *parts = str(text).split(":")
    if name not in CONTEXTS:
        near, listed = near_names(name, CONTEXTS), ", ".join(CONTEXTS)
        raise ValueError(f"unknown context {name!r}: {near if listed in near else f'{near} There are {listed}'}")
    options: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not option.isidentifier() or not equals:
            raise ValueError(f"context {text!r}: options are like {name}:positions=learned:gate=true, not {part!r}")
        if option in options:
            raise ValueError(f"context {text!r} gives {option} twice")
        options[option] = _value(value)
    return name, options


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in _WORDS else text)
    except (ValueError, SyntaxError):
        return text


def context_builder(context: str | Callable[..., nn.Module], **options: Any) -> Callable[..., nn.Module]:
    """What builds a context layer from its number of channels: a name of :func:`list_contexts`, or a callable's own.

    Example:
        >>> context_builder("kao_qkv", num_heads=2)(8).num_heads
        2
    """
    if isinstance(context, str):
        parse_context(context)
        return partial(build_context, context, **options)
    if not callable(context):
        raise TypeError(f"context must be a name or build a layer from its channels, not {type(context).__name__}")
    return partial(context, **options)
