"""Pool, mix, spread: the three stages of Kronecker attention, each run by what the plan names.

    x (N, C, *grid) ──pool──▶ tokens (N, sum(grid), C) ──mix──▶ keys, values, tokens ──spread──▶ y (N, P, *grid)

``pool`` and ``spread`` read and write whole grids. What lies between them is about few vectors: the scale, the
coefficients' batch statistics and, for KAO_QKV, attention itself are here; linear maps and the norm are the layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kronattn.ops import matrix_products, native, torch_backend
from kronattn.ops.autocast import without_autocast
from kronattn.ops.coefficients import Moments, token_moments
from kronattn.ops.compat import needs_dispatcher
from kronattn.ops.fx import is_captured, leaf_function
from kronattn.ops.masks import NO_MASKS, Masks, present
from kronattn.ops.plan import Plan
from kronattn.ops.torch_backend import scaled

__all__ = [
    "coefficients",
    "combine_tokens",
    "masked_bias",
    "moments",
    "moments_of_coefficients",
    "normalise",
    "pool",
    "scaled",
    "spread",
    "spread_coefficients",
]

# Coefficients of a sample's tokens with each other that are materialised without a thought.
_FEW_COEFFICIENTS = 2**16


def _implementation(name: str) -> ModuleType:
    if name == "triton":
        from kronattn.ops.triton import operators  # needs Triton, which not every build of PyTorch comes with

        return operators
    if name == "native":
        return native
    # Matrix products are for one head without biases; what they do not serve, plain PyTorch does.
    return torch_backend


@leaf_function
def pool(x: Tensor, plan: Plan, shares: Tensor | None = None, *, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """The first stage: averages over all axes but one, and ``x`` to go on with, so that its gradients meet.

    With ``shares``, averages of what there is; see :mod:`kronattn.ops.masks`.

    Returns:
        (N, sum(grid), C), the last axis first, in float32 at least unless the kernels go on with it, or unless it may
        be ``rounded`` to ``x``'s dtype at once; and (N, C, *grid).
    """
    with without_autocast(x):
        if plan.pool == "triton" and shares is None and (plan.spread == "triton" or rounded):
            # The kernels take tokens in the dtype of their products.
            return _implementation("triton").pool(x, x.dtype)
        tokens, x = _implementation(plan.pool).pool(x)
        return (tokens if shares is None else tokens / shares.where(shares > 0, 1).unsqueeze(2)), x


@leaf_function
def spread(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    *,
    num_heads: int = 1,
    key_bias: Tensor | None = None,
    residual: Tensor | None = None,
    axes: Sequence[int] | None = None,
) -> Tensor:
    """The last stage of KAO_KV: every position attends to the keys; see :func:`kronattn.ops.torch_backend.spread`.

    KAO_QKV's attention is the same: its averages are a grid of one axis. With ``axes``, the keys' grid, the keys of
    each axis have a softmax of their own.
    """
    if axes is not None:
        sizes = list(reversed(axes))
        biases = [None] * len(sizes) if key_bias is None else key_bias.split(sizes, dim=-1)
        # Each axis has an equal part of the weight, by way of its values.
        parts = zip(keys.split(sizes, dim=1), (values / len(sizes)).split(sizes, dim=1), biases, strict=True)
        for axis_keys, axis_values, bias in parts:
            residual = spread(
                query, axis_keys, axis_values, plan, num_heads=num_heads, key_bias=bias, residual=residual
            )
        assert residual is not None
        return residual
    if plan.spread == "matrix_products" and num_heads == 1 and key_bias is None:
        weights = matrix_products.softmax(coefficients(query, keys, plan), keys.shape[1])
        return spread_coefficients(weights, values, query, residual=residual)
    return _implementation(plan.spread).spread(
        query, keys, values, num_heads=num_heads, key_bias=key_bias, residual=residual
    )


@leaf_function
def coefficients(query: Tensor, keys: Tensor, plan: Plan) -> Tensor:
    """Materialised coefficients of (N, C, *grid) queries and (N, S, C) keys of one head, as rows of
    :mod:`kronattn.ops.matrix_products`."""
    with without_autocast(query):
        rows = _between_products(keys, plan).centred(keys, query.dtype)
        return torch.bmm(query.flatten(2).transpose(1, 2), rows.transpose(1, 2))


@leaf_function
def moments_of_coefficients(matrix: Tensor, count: int, plan: Plan) -> tuple[Moments, Tensor]:
    """Batch statistics of materialised coefficients of ``count`` keys, and these to go on with."""
    with without_autocast(matrix):
        moments, matrix = _between_products(matrix, plan).moments(matrix, count)
        return moments, matrix


@leaf_function
def spread_coefficients(weights: Tensor, values: Tensor, like: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """The last stage from (N, m, S) materialised coefficients, after their softmax, and (N, S, P) values.

    Returns:
        (N, P, *grid) for ``like``'s (N, any, *grid), plus the residual.
    """
    with without_autocast(like):
        weights, values = weights.to(like.dtype), values.to(like.dtype)
        if residual is None:
            rows = torch.bmm(weights, values)
        else:
            rows = torch.baddbmm(residual.flatten(2).transpose(1, 2), weights, values)
        return rows.transpose(1, 2).unflatten(2, like.shape[2:])


def _between_products(x: Tensor, plan: Plan) -> ModuleType:
    """Kernels where eager code runs unwatched on a GPU; the compiler fuses PyTorch's functions by itself."""
    if plan.pool != "triton" or is_captured() or needs_dispatcher(x):
        return matrix_products
    from kronattn.ops.triton import wide  # needs Triton

    return wide


@leaf_function
def masked_bias(bias: Tensor | None, shares: Tensor | None, num_heads: int) -> Tensor | None:
    """(N, num_heads, S): what keeps tokens that are not there from being attended to; without shares, ``bias``."""
    if shares is None:
        return bias
    return torch.where(present(shares), shares.new_zeros(()), -torch.inf).unsqueeze(1).expand(-1, num_heads, -1)


@leaf_function
def combine_tokens(
    tokens: Tensor,
    like: Tensor,
    plan: Plan,
    *,
    mean: str = "each",
    combine: str = "sum",
    shares: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The last stage of KAO_QKV: every position receives the sum, or the product, of its axes' tokens; see
    :func:`kronattn.ops.torch_backend.spread_tokens`."""
    if combine == "sum":
        once = mean == "once"
        if once and shares is not None:
            tokens, once = torch_backend.count_mean_once(tokens, like.shape[2:], shares), False
        return _implementation(plan.pool).spread_tokens(tokens, like, residual=residual, mean_once=once)
    y = torch_backend.multiply_tokens(tokens, like, shares)
    return y if residual is None else y + residual


@leaf_function
def moments(
    query: Tensor,
    keys: Tensor,
    plan: Plan,
    *,
    num_heads: int = 1,
    per_key: bool = False,
    like: Tensor | None = None,
    query_tokens: Tensor | None = None,
    masks: Masks = NO_MASKS,
) -> tuple[Moments, Tensor, Tensor]:
    """Batch statistics of the coefficients, for each head (or key of each head); query and keys to go on with.

    Args:
        query: (N, C, *grid), or (N, C, M) averages.
        keys: (N, S, C), the scale multiplied in.
        like: (N, any, *grid), where the queries are averages of that grid.
        query_tokens: (N, sum(grid), C), the query's averages where they are at hand: saves a pass.
        masks: which positions, averages and keys count.
    """
    with without_autocast(query):
        if masks.mask is not None and masks.shares is not None and masks.key_shares is not None:
            there = masks.mask.flatten(1) if like is None else masks.shares > 0, masks.key_shares > 0
            return torch_backend.moments(query, keys, num_heads=num_heads, there=there), query, keys
        if plan.spread == "triton" and not per_key:
            return _implementation("triton").moments(query, keys, num_heads=num_heads)
        # One axis has as many averages as positions. Sizes that are yet to be seen must not be asked about.
        few = like is not None and like.dim() > 3 and (is_captured() or _are_few(query, keys))
        if few and not per_key:
            return token_moments(query.transpose(1, 2), keys, num_heads=num_heads), query, keys
        # The mean over all positions is that of the last axis's averages, which stand first.
        mean = None if query_tokens is None else query_tokens[:, : query.shape[-1]].mean(dim=1)
        return torch_backend.moments(query, keys, num_heads=num_heads, per_key=per_key, query_mean=mean), query, keys


def normalise(
    keys: Tensor, weight: Tensor, moments: Moments | None, running: tuple[Tensor, Tensor, Tensor], **constants: Any
) -> Tensor:
    """The norm of the coefficients multiplied into keys by the kernel, or into materialised coefficients whose softmax
    it takes too; see :mod:`kronattn.nn.coefficient_norm`."""
    from kronattn.ops.triton import coefficient_norm  # needs Triton

    return coefficient_norm.normalise(keys, weight, moments, running, **constants)


def _are_few(query: Tensor, keys: Tensor) -> bool:
    return len(query) > 0 and query.shape[2] * keys.shape[1] <= _FEW_COEFFICIENTS
