"""The kernels as operators of PyTorch, and their gradients.

Every kernel is launched through an operator of ``torch.library``: eager code, torch.compile, fake tensors and counters
of operations all see the same thing. Gradients are autograd functions around them, which torch.compile traces. An empty
operator costs a call 4.5 µs where a plain function costs 2.2, and 51 µs forward and backward where a plain autograd
function costs 34; ``torch.library.custom_op`` takes 7.5 and 58 (two Intel cores, torch 2.15). A launch takes several
times that, and one way is half of the code of two.

``pool`` and ``moments`` hand their input on, and whoever reads it next takes it from there. So gradients of the same
features meet in the backward of ``pool``, which adds its own in one pass, instead of being written and added up one by
one.

Grids are (N, C, *grid); tokens are (N, S, C), channels side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kronattn.ops import grid as torch_grid
from kronattn.ops import torch_backend
from kronattn.ops.coefficients import Moments
from kronattn.ops.fx import is_captured
from kronattn.ops.triton.attend import attend_backward, attend_forward
from kronattn.ops.triton.layout import empty_grid, empty_like_grid, is_channels_last, on_device, rows_and_width
from kronattn.ops.triton.moments import moments_backward, moments_forward
from kronattn.ops.triton.outer import mean_once_forward, outer_sum_forward
from kronattn.ops.triton.pool import pool_forward

__all__ = ["differentiable", "moments", "pool", "records", "spread", "spread_tokens"]


def pool(x: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Averages of (N, C, *grid) over all axes but one, the last axis first, and ``x`` to go on with.

    Returns:
        (N, sum(grid), C) in ``dtype``, added up in float32, and (N, C, *grid).
    """
    if x.dim() == 3:
        return x.transpose(1, 2).to(dtype), x
    if x.dim() > 4:
        tokens, width = pool(x.flatten(2, -2), torch.float32)[0], x.shape[-1]
        rest = torch_grid.wide_averages(tokens[:, width:].transpose(1, 2).unflatten(2, x.shape[2:-1]))
        return torch.cat([tokens[:, :width], rest.transpose(1, 2)], dim=1).to(dtype), x
    return _tokens(x, True, dtype)


def spread(
    query: Tensor, keys: Tensor, values: Tensor, *, num_heads: int = 1, key_bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The last stage of KAO_KV, as :func:`kronattn.ops.torch_backend.spread`."""
    if records(query, keys, values, key_bias, residual):
        itself = residual is query
        # The compiler takes no tensor twice.
        values = values.view_as(values) if values is keys else values
        return _Spread.apply(query, keys, values, key_bias, None if itself else residual, num_heads, itself)
    return _attend(query, *_as_read(query, keys, values, key_bias), residual, num_heads)


def _as_read(
    query: Tensor, keys: Tensor, values: Tensor, key_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and bias as the kernels read them: contiguous, and tokens in the dtype of the products."""
    same = values is keys
    keys = _in_dtype(keys, query.dtype)
    values = keys if same else _in_dtype(values, query.dtype)
    return keys, values, None if key_bias is None else key_bias.contiguous()


def _in_dtype(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous tokens of a dtype; most are, and then PyTorch need not be asked to make them so."""
    tokens = tokens if tokens.dtype == dtype else tokens.to(dtype)
    return tokens if tokens.is_contiguous() else tokens.contiguous()


def spread_tokens(tokens: Tensor, like: Tensor, *, residual: Tensor | None = None, mean_once: bool = False) -> Tensor:
    """The last stage of KAO_QKV, as :func:`kronattn.ops.torch_backend.spread_tokens`; of two axes the kernel
    counts the mean once by itself."""
    grid = like.shape[2:]
    if len(grid) == 1:
        return torch_backend.spread_tokens(tokens, like, residual=residual)
    if len(grid) > 2:
        tokens = torch_backend.count_mean_once(tokens, grid) if mean_once else tokens
        # What is left to do for the axes that the kernel reads as one is done on their tokens, which are few.
        width = grid[-1]
        rows = torch_grid.outer_sum(tokens[:, width:].transpose(1, 2), grid[:-1]).flatten(2)
        tokens = torch.cat([tokens[:, :width], rows.transpose(1, 2)], dim=1)
    return _spread_out(tokens, residual, grid, is_channels_last(like), like.dtype, False, mean_once and len(grid) == 2)


def moments(query: Tensor, keys: Tensor, *, num_heads: int = 1) -> tuple[Moments, Tensor, Tensor]:
    """Batch statistics of each head's coefficients, of (N, C, *grid) queries and (N, S, C) keys; and both to go on
    with."""
    members = query.numel() // query.shape[1] * keys.shape[1]
    if records(query, keys):
        mean, squares, query, keys = _Moments.apply(query, keys, num_heads)
    else:
        mean, squares = _moments(query, _in_dtype(keys, query.dtype), num_heads)
    return Moments(members, mean, squares), query, keys


def records(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is done to any of the tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _tokens(x: Tensor, mean: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Averages or sums, and ``x`` to go on with."""
    return _Pool.apply(x, mean, dtype) if records(x) else (_pool(x, mean, dtype), x)


def _spread_out(tokens: Tensor, residual: Tensor | None, *how: Any) -> Tensor:
    """The outer sum of tokens, and a residual. It is the averages' (or sums') gradient, and they are its."""
    inputs = tokens.contiguous(), residual, *how
    return _SpreadTokens.apply(*inputs) if records(tokens, residual) else _outer_sum(*inputs)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.how = x.shape[2:], is_channels_last(x), x.dtype, mean
        # KAO_QKV reads nothing but the tokens: then there is nothing to add to.
        ctx.set_materialize_grads(False)
        return _pool(x, mean, dtype), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_tokens: Tensor | None, d_x: Tensor | None) -> tuple[Tensor | None, None, None]:
        return d_x if d_tokens is None else _spread_out(d_tokens, d_x, *ctx.how), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, key_bias: Tensor | None, residual: Tensor | None,
        num_heads: int, itself: bool,
    ) -> Tensor:  # fmt: skip
        read = _as_read(query, keys, values, key_bias)
        ctx.save_for_backward(query, keys, values, key_bias, *read)
        ctx.num_heads, ctx.itself, ctx.has_residual = num_heads, itself, residual is not None
        return _attend(query, *read, query if itself else residual, num_heads)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        query, keys, values, key_bias, *read = ctx.saved_tensors
        d_residual = d_y if ctx.has_residual else None
        if torch.is_grad_enabled():

            def call(query: Tensor, keys: Tensor, values: Tensor, key_bias: Tensor | None) -> Tensor:
                residual = query if ctx.itself else None
                options: Any = {"num_heads": ctx.num_heads, "key_bias": key_bias, "residual": residual}
                return torch_backend.spread(query, keys, values, **options)

            return *differentiable(call, (query, keys, values, key_bias), d_y), d_residual, None, None
        dtype = keys.dtype if keys.dtype == values.dtype else torch.float32
        d_query, d_tokens, d_bias = _attend_backward(query, d_y, *read, ctx.num_heads, dtype, ctx.itself)
        d_keys, d_values = d_tokens.split((keys.numel(), values.numel()))
        d_keys, d_values = d_keys.view(keys.shape).to(keys.dtype), d_values.view(values.shape).to(values.dtype)
        d_bias = None if key_bias is None else d_bias.to(key_bias.dtype)
        return d_query, d_keys, d_values, d_bias, d_residual, None, None


class _SpreadTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, residual: Tensor | None, grid: Sequence[int], channels_last: bool,
        dtype: torch.dtype, of_averages: bool, mean_once: bool = False,
    ) -> Tensor:  # fmt: skip
        ctx.how, ctx.has_residual = (of_averages, tokens.dtype), residual is not None
        ctx.grid = grid if mean_once else None
        return _outer_sum(tokens, residual, grid, channels_last, dtype, of_averages, mean_once)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        d_tokens, _ = _tokens(d_y, *ctx.how)
        if ctx.grid is not None:
            # Counting the mean once is a symmetric map: its gradient is the map itself.
            # A compiler fuses what it sees in plain PyTorch, and launches it for less than an operator costs.
            plain = is_captured() or records(d_tokens)
            d_tokens = (torch_backend.count_mean_once if plain else _mean_once)(d_tokens, ctx.grid)
        return d_tokens, d_y if ctx.has_residual else None, None, None, None, None, None


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        read = _in_dtype(keys, query.dtype)
        mean, squares = _moments(query, read, num_heads)
        ctx.save_for_backward(query, keys, read, mean)
        ctx.num_heads = num_heads
        ctx.set_materialize_grads(False)
        return mean, squares, query.view_as(query), keys.view_as(keys)

    @staticmethod
    def backward(
        ctx: Any, d_mean: Tensor | None, d_squares: Tensor | None, d_query: Tensor | None, d_keys: Tensor | None
    ) -> tuple[Any, ...]:
        if d_mean is None and d_squares is None:
            return d_query, d_keys, None
        query, keys, read, mean = ctx.saved_tensors
        if torch.is_grad_enabled():

            def call(query: Tensor, keys: Tensor) -> Tensor:
                found = torch_backend.moments(query, keys, num_heads=ctx.num_heads)
                parts = [x * d for x, d in ((found.mean, d_mean), (found.squares, d_squares)) if d is not None]
                return torch.stack(parts).sum()

            received = differentiable(call, (query, keys), None)
            totals = (new if old is None else old + new for old, new in zip((d_query, d_keys), received, strict=True))
            return *totals, None
        d_squares = torch.zeros_like(mean) if d_squares is None else d_squares
        d_keys = None if d_keys is None else d_keys.contiguous()
        d_query, d_keys = _moments_backward(query, read, mean, d_mean, d_squares, d_query, d_keys, ctx.num_heads)
        return d_query, d_keys.to(keys.dtype), None


def differentiable(call: Callable[..., Tensor], inputs: Sequence[Any], d_y: Tensor | None) -> list[Any]:
    """Gradients of ``call`` that can be differentiated again; None for an input that needs none."""
    # Views, because one input may depend on another: each is to receive its own part alone.
    leaves = [x if x is None else x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in inputs]
    given = [x for x in leaves if x is not None]
    gradients = iter(torch.autograd.grad(call(*leaves), given, d_y, create_graph=True, allow_unused=True))
    return [None if x is None else next(gradients) for x in leaves]


_library = torch.library.Library("kronattn", "DEF")


def _operator(schema: str, launcher: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An operator kronattn::NAME: what launches the kernel, and what says only how the result looks."""
    name = schema.partition("(")[0]

    def launch(x: Tensor, *rest: Any) -> Any:
        with on_device(x):
            return launcher(x, *rest)

    _library.define(schema)
    _library.impl(name, launch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kronattn::{name}", fake, lib=_library)
    return getattr(torch.ops.kronattn, name).default


# Averages (or sums) of (N, C, *grid), read as rows × last axis: (N, last + rows, C).
_pool = _operator(
    "pool(Tensor x, bool mean, ScalarType dtype) -> Tensor",
    pool_forward,
    lambda x, mean, dtype: x.new_empty((x.shape[0], sum(rows_and_width(x.shape[2:])), x.shape[1]), dtype=dtype),
)

# (N, last + rows, C) spread over the grid, plus a residual: (N, C, *grid).
_outer_sum = _operator(
    "outer_sum(Tensor tokens, Tensor? residual, SymInt[] grid, bool channels_last, ScalarType dtype, bool of_averages,"
    " bool mean_once=False) -> Tensor",
    outer_sum_forward,
    lambda tokens, residual, grid, channels_last, dtype, *_: empty_grid(
        tokens.shape[0], tokens.shape[2], grid, channels_last, dtype, tokens.device
    ),
)

# Attention of every position of (N, C, *grid) to (N, S, C) keys with (N, S, P) values: (N, P, *grid).
_attend = _operator(
    "attend(Tensor query, Tensor keys, Tensor values, Tensor? key_bias, Tensor? residual, int num_heads) -> Tensor",
    attend_forward,
    lambda query, keys, values, *_: _empty_like(query, values.shape[2]),
)


def _empty_like(query: Tensor, channels: int) -> Tensor:
    return empty_like_grid(query, channels, is_channels_last(query))


# Gradients of the query, of keys and values in one row, and of the bias.
_attend_backward = _operator(
    "attend_backward(Tensor query, Tensor d_y, Tensor keys, Tensor values, Tensor? key_bias, int num_heads,"
    " ScalarType dtype, bool add_d_y) -> (Tensor, Tensor, Tensor)",
    attend_backward,
    lambda query, d_y, keys, values, key_bias, num_heads, dtype, add_d_y: (
        _empty_like(query, query.shape[1]),
        keys.new_empty((keys.numel() + values.numel(),), dtype=dtype),
        query.new_empty(0 if key_bias is None else key_bias.shape, dtype=torch.float32),
    ),
)

# (N, width + height, C) tokens less half of each axis's mean.
_mean_once = _operator(
    "mean_once(Tensor tokens, SymInt[] grid) -> Tensor",
    mean_once_forward,
    lambda tokens, grid: torch.empty_like(tokens),
)

# Mean and squared deviations of each head's coefficients, (num_heads,) each.
_moments = _operator(
    "moments(Tensor query, Tensor keys, int num_heads) -> (Tensor, Tensor)",
    moments_forward,
    lambda query, keys, num_heads: tuple(query.new_empty((num_heads,), dtype=torch.float32) for _ in range(2)),
)

# Gradients of query and keys, plus what they have received already.
_moments_backward = _operator(
    "moments_backward(Tensor query, Tensor keys, Tensor mean, Tensor? d_mean, Tensor d_squares, Tensor? d_query,"
    " Tensor? d_keys, int num_heads) -> (Tensor, Tensor)",
    moments_backward,
    lambda query, keys, *_: (_empty_like(query, query.shape[1]), torch.empty_like(keys)),
)


# A multiply-add counts as two operations, as in PyTorch's own formulas; averages and outer sums only add.
@register_flop_formula(torch.ops.kronattn.attend)
def _attend_flops(query: Sequence[int], keys: Sequence[int], values: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return 2 * query[0] * math.prod(query[2:]) * keys[1] * (keys[2] + values[2])


@register_flop_formula(torch.ops.kronattn.attend_backward)
def _attend_backward_flops(
    query: Sequence[int], d_y: Sequence[int], keys: Sequence[int], values: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return 2 * query[0] * math.prod(query[2:]) * keys[1] * (3 * keys[2] + 2 * values[2])


@register_flop_formula([torch.ops.kronattn.moments, torch.ops.kronattn.moments_backward])
def _moments_flops(query: Sequence[int], keys: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return 4 * query[0] * math.prod(query[2:]) * keys[1] * keys[2]
