"""What an attention layer computes, in float64 and literally: whole grids mapped, every coefficient materialised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kronattn.nn import DenseAttention, KroneckerAttention
from kronattn.ops import reference
from kronattn.ops.attention import pool_grid


def expected(layer: Any, query: Tensor, key: Tensor, value: Tensor, residual: Tensor | None) -> dict[str, Tensor]:
    """Output and, in training, the statistics that the layer has afterwards."""
    grid = query.shape[2:]
    if isinstance(layer, DenseAttention) and layer.pool is not None:
        key, value = pool_grid(key, layer.pool), pool_grid(value, layer.pool)
    query, key, value = (
        _mapped(linear, x) for linear, x in ((layer.query_map, query), (layer.key_map, key), (layer.value_map, value))
    )
    tokens = isinstance(layer, KroneckerAttention) and layer.mode == "qkv"
    queries = reference.axis_averages(query) if tokens else query.flatten(2)
    if isinstance(layer, KroneckerAttention):
        keys, values = reference.axis_averages(key), reference.axis_averages(value)
    else:
        keys, values = key.flatten(2), value.flatten(2)
    heads = layer.num_heads
    queries, keys, values = (x.unflatten(1, (heads, -1)) for x in (queries, keys, values))
    matrix = layer.scale * (keys.transpose(2, 3) @ queries)  # (N, heads, keys, queries)
    matrix, statistics = _normed(layer, matrix)
    y = (values @ matrix.softmax(dim=2)).flatten(1, 2)
    if tokens:
        if layer.mean == "once":
            parts = y.split(list(reversed(grid)), dim=2)
            y = torch.cat([part - (1 - 1 / len(grid)) * part.mean(dim=2, keepdim=True) for part in parts], dim=2)
        y = reference.outer_sum(y, grid)
    else:
        y = y.unflatten(2, grid)
    if getattr(layer, "layer_scale", None) is not None:
        y = y * layer.layer_scale.gain.view(-1, *[1] * len(grid))
    return {"output": y if residual is None else y + residual} | statistics


def _mapped(linear: Any, x: Tensor) -> Tensor:
    return x if linear is None else (x.movedim(1, -1) @ linear.weight.t()).movedim(-1, 1)


def _normed(layer: Any, matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    norm = layer.norm
    if norm is None:
        return matrix, {}
    per_key = layer.coefficient_norm == "batch_per_key"
    dims, shape = ((0, 3), (1, *matrix.shape[1:3], 1)) if per_key else ((0, 2, 3), (1, matrix.shape[1], 1, 1))
    statistics = {}
    if layer.training:
        mean, variance = matrix.mean(dim=dims), matrix.var(dim=dims, correction=0)
        unbiased = matrix.detach().var(dim=dims)
        for name, now in (("running_mean", mean.detach()), ("running_var", unbiased)):
            before = getattr(norm, name)
            statistics[name] = before + norm.momentum * (now.flatten() - before)
    else:
        mean, variance = norm.running_mean, norm.running_var
    matrix = (matrix - mean.view(shape)) * torch.rsqrt(variance.view(shape) + norm.eps) * norm.weight.view(shape)
    return matrix if norm.bias is None else matrix + norm.bias.view(shape), statistics
