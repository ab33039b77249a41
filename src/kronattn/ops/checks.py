"""The one place where the operators' input is checked.

Every message is one line: the argument, what was given, what is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from kronattn.ops.autocast import autocast_is_on, autocasted
from kronattn.ops.fx import is_captured, leaf_function

__all__ = [
    "DTYPES",
    "MAX_AXES",
    "check_choice",
    "check_dtype",
    "check_grid",
    "check_grid_tensor",
    "check_heads",
    "check_mask",
    "check_mode",
    "check_options",
    "check_positive_int",
    "check_product_grid",
    "check_residual",
    "check_scale",
    "check_tokens",
    "check_triple",
    "dtype_name",
]

MAX_AXES = 4
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_grid_tensor(x: Tensor, name: str) -> None:
    """``x`` is a real floating-point tensor (N, C, *grid) of 1 to 4 axes, none of them empty."""
    _check_tensor(x, name)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, not {dtype_name(x.dtype)}")
    axes = x.dim() - 2
    if not 1 <= axes <= MAX_AXES:
        raise ValueError(
            f"{name} must be (N, C, *grid) with a grid of 1 to {MAX_AXES} axes, "
            f"but its shape {tuple(x.shape)} has {max(axes, 0)}"
        )
    if 0 in x.shape[1:]:
        raise ValueError(f"{name} must have at least one channel and one position on every axis, not {tuple(x.shape)}")


def check_grid(grid: Sequence[int]) -> None:
    """``grid`` is the sizes of 1 to 4 axes, integers from 1 up."""
    # A size may be a symbol: what it has in common with integers is that it can stand for one.
    if not isinstance(grid, Sequence) or not (is_captured() or all(hasattr(size, "__index__") for size in grid)):
        raise TypeError(f"grid must be a sequence of ints, the sizes of its axes, not {grid!r}")
    if not 1 <= len(grid) <= MAX_AXES:
        raise ValueError(f"grid must have 1 to {MAX_AXES} axes, not {tuple(grid)}")
    if any(size < 1 for size in grid):
        raise ValueError(f"grid must have at least one position on every axis, not {tuple(grid)}")


def check_tokens(tokens: Tensor, grid: Sequence[int]) -> None:
    """``tokens`` is (N, C, sum(grid)) for a grid of 1 to 4 axes."""
    _check_tensor(tokens, "tokens")
    check_grid(grid)
    if tokens.dim() != 3 or tokens.shape[-1] != sum(grid):
        raise ValueError(f"tokens must be (N, C, {sum(grid)}) for the grid {tuple(grid)}, not {tuple(tokens.shape)}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """``value`` is one of those that the argument called ``name`` can have."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def check_positive_int(name: str, value: Any, *, least: int = 1) -> None:
    """``value`` is an integer, Python's or numpy's, from ``least`` up."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def check_mode(mode: str) -> None:
    """``mode`` is the name of a Kronecker attention operator."""
    check_choice("mode", mode, ("kv", "qkv"))


def check_options(mode: str, mean: str, softmax: str, combine: str) -> None:
    """How often KAO_QKV counts the mean, how keys share a softmax, and how KAO_QKV puts its axes together."""
    check_mode(mode)
    check_choice("mean", mean, ("each", "once"))
    check_choice("softmax", softmax, ("joint", "per_axis"))
    check_choice("combine", combine, ("sum", "product"))
    if combine == "product" and mode == "kv":
        raise ValueError('combine="product" excludes mode="kv": every position asks for itself, nothing is multiplied')


def check_product_grid(grid: Sequence[int]) -> None:
    """A product needs two axes at least."""
    if len(grid) < 2:
        raise ValueError(f'combine="product" multiplies axes with each other, but the grid {tuple(grid)} has one')


def check_mask(mask: Tensor, x: Tensor, name: str, owner: str) -> None:
    """``mask`` is (N, *grid) for the (N, C, *grid) tensor ``x`` called ``owner``, boolean, on its device."""
    _check_tensor(mask, name)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be torch.bool, true where {owner} has data, not {dtype_name(mask.dtype)}")
    expected = (x.shape[0], *x.shape[2:])
    if mask.shape != expected:
        raise ValueError(f"{name} must be {owner}'s (N, *grid), {tuple(expected)}, not {tuple(mask.shape)}")
    _check_device(mask, name, x, owner)


def check_heads(num_heads: int, channels: int, name: str) -> None:
    """``num_heads`` is a positive integer that divides the channels of the tensor called ``name``."""
    check_positive_int("num_heads", num_heads)
    if channels % num_heads:
        raise ValueError(f"num_heads must divide {name}'s channels: {num_heads} does not divide {channels}")


def check_scale(scale: float | Tensor, num_heads: int) -> None:
    """``scale`` is a number, or a tensor of one element or of one for each head."""
    if isinstance(scale, Tensor):
        if not scale.is_floating_point():
            raise TypeError(f"scale must be a float or a floating-point tensor, not {dtype_name(scale.dtype)}")
        if scale.dim() > 1 or scale.numel() not in (1, num_heads):
            raise ValueError(
                f"scale must be a number, or a tensor of 1 or num_heads = {num_heads} elements, "
                f"not of shape {tuple(scale.shape)}"
            )
    elif isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a float or a tensor, not {type(scale).__name__}")


def check_triple(
    query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int, scale: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Check query, key and value together and fill in the defaults: key from query, value from key.

    The very same object is kept where an argument is left out, so that a backend can average it once. Under
    autocast all three come back in autocast's dtype, as for PyTorch's own attention.
    """
    check_grid_tensor(query, "query")
    check_heads(num_heads, query.shape[1], "query")
    check_scale(scale, num_heads)
    if key is None:
        if value is not None:
            raise ValueError("value was given without key: give both, or neither for self-attention")
        query = autocasted(query)
        return query, query, query
    check_grid_tensor(key, "key")
    if value is None:
        value = key
    else:
        check_grid_tensor(value, "value")
    for name, other in (("key", key), ("value", value)):
        _check_device(other, name, query)
        if other.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have query's batch size {query.shape[0]}, but has {other.shape[0]}")
    if key.shape[1] != query.shape[1]:
        raise ValueError(f"key must have query's {query.shape[1]} channels, but has {key.shape[1]}")
    if value.shape[2:] != key.shape[2:]:
        raise ValueError(f"value must have key's grid {tuple(key.shape[2:])}, but has {tuple(value.shape[2:])}")
    check_heads(num_heads, value.shape[1], "value")

    cast_query = autocasted(query)
    cast_key = cast_query if key is query else autocasted(key)
    cast_value = cast_key if value is key else autocasted(value)
    for name, other in (("key", cast_key), ("value", cast_value)):
        _check_same_dtype(other, name, cast_query)
    return cast_query, cast_key, cast_value


@leaf_function
def check_residual(residual: Tensor | None, query: Tensor, channels: int) -> Tensor | None:
    """``residual`` is of the output's shape, (N, channels, *query's grid), and of its device and dtype.

    Under autocast it comes back in autocast's dtype, as the query does.
    """
    if residual is None:
        return None
    _check_tensor(residual, "residual")
    expected = (query.shape[0], channels, *query.shape[2:])
    if residual.shape != expected:
        raise ValueError(f"residual must have the output's shape {tuple(expected)}, not {tuple(residual.shape)}")
    _check_device(residual, "residual", query)
    cast = autocasted(residual)
    _check_same_dtype(cast, "residual", query)
    return cast


def check_dtype(x: Tensor, name: str, dtype: torch.dtype | None, owner: str) -> None:
    """``x``, called ``name``, has the dtype of the weights of the layer called ``owner``, or autocast sees to it.

    Weights that are no tensors (quantised modules) have no dtype to compare with.
    """
    if dtype is None or x.dtype == dtype:
        return
    # Autocast leaves float64 as it is.
    hint = "" if torch.float64 in (x.dtype, dtype) else ", or use autocast"
    if not hint or not autocast_is_on(x):
        weights, own = dtype_name(dtype), dtype_name(x.dtype)
        raise TypeError(f"{owner} has {weights} weights, but {name} is {own}: convert either{hint}")


def _check_tensor(x: object, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")


def _check_device(x: Tensor, name: str, other: Tensor, owner: str = "query") -> None:
    if x.device != other.device:
        raise ValueError(f"{name} must be on {owner}'s device: {owner} is on {other.device}, {name} on {x.device}")


def _check_same_dtype(x: Tensor, name: str, query: Tensor) -> None:
    if x.dtype != query.dtype:
        names = dtype_name(query.dtype), dtype_name(x.dtype)
        raise TypeError(f"{name} must have query's dtype: query is {names[0]}, {name} is {names[1]}")


def dtype_name(dtype: torch.dtype) -> str:
    """Without the name of PyTorch."""
    return str(dtype).removeprefix("torch.")
