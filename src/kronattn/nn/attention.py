"""The attention modules: Kronecker attention and regular attention, as layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from kronattn.nn.grid_attention import GridAttention, Mixed, check_layer_input, map_positions, map_tokens
from kronattn.nn.layer_scale import LayerScale
from kronattn.nn.plain import is_plain
from kronattn.ops import stages, torch_backend
from kronattn.ops.attention import pool_grid
from kronattn.ops.autocast import without_autocast
from kronattn.ops.checks import check_mean, check_mode, check_residual
from kronattn.ops.fx import is_captured, leaf_function
from kronattn.ops.plan import Plan, make_plan

__all__ = ["DenseAttention", "KroneckerAttention"]

# Rows and columns of a feature map that one would put Kronecker attention on.
_TYPICAL_KEYS = 128


class KroneckerAttention(GridAttention):
    """Kronecker attention as a layer: global context for a feature map of any size.

    Three stages: averages of the grid, what there is to do with few vectors, and the output at every position. The maps
    of keys and values belong to the second: an average of mapped vectors is the mapped average.

    Args:
        channels: of the input.
        mode: "kv" (every position asks) or "qkv" (rows and columns ask).
        num_heads: divides the channels.
        mean: how often mode "qkv" counts the mean: "once", as Theorem 1 asks for, or once for "each" axis, as the paper
            prints it: that multiplies what differs from image to image, and networks of it learn worse.
        project: which of q, k, v get a linear map: "", "v", "qkv", ...
        coefficient_norm: "batch" (one scale for a head's coefficient matrix: any input size), "batch_per_key"
            (needs ``grid``), or None.
        scale: of the coefficients.
        qk_channels: that q and k are mapped to; ``channels`` by default.
        out_channels: that v is mapped to; ``channels`` by default.
        grid: the keys' grid, for "batch_per_key" alone.
        layer_scale: a gain for each channel of the output, learned, that starts at this number. At 0 a new layer with a
            residual leaves a pretrained network exactly as it was, and learns from there.

    Shape:
        query (N, channels, *grid), and key and value (N, channels, *other_grid) where given, to
        (N, out_channels, *grid); ``residual``, of that shape, is added to the result. ``map_values`` is applied to the
        (N, S, out_channels) values: a linear map of the output, without a bias and of a layer with one head, costs
        h + w vectors there instead of h·w.

    Example:
        >>> layer = KroneckerAttention(64, mode="qkv")
        >>> layer(torch.randn(2, 64, 28, 28)).shape
        torch.Size([2, 64, 28, 28])
    """

    def __init__(
        self,
        channels: int,
        mode: str = "kv",
        *,
        num_heads: int = 1,
        mean: str = "once",
        project: str = "v",
        coefficient_norm: str | None = "batch",
        scale: float = 1.0,
        qk_channels: int | None = None,
        out_channels: int | None = None,
        grid: Sequence[int] | None = None,
        layer_scale: float | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_mode(mode)
        check_mean(mean)
        super().__init__(
            channels,
            num_heads=num_heads,
            project=project,
            coefficient_norm=coefficient_norm,
            scale=scale,
            qk_channels=qk_channels,
            out_channels=out_channels,
            num_keys=None if grid is None else sum(grid),
            device=device,
            dtype=dtype,
        )
        self.mode = mode
        self.mean = mean
        self.layer_scale = None if layer_scale is None else LayerScale(self.out_channels, layer_scale, device, dtype)

    def plan(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Plan:
        """What would run each stage of a call, and why.

        Example:
            >>> print(KroneckerAttention(8).plan(torch.randn(2, 8, 5, 6)))
            pool: torch, mix: PyTorch, spread: torch (query is on cpu: the kernels need a CUDA device)
        """
        query, key, value = self._checked(query, key, value)
        return self._plan(query, key, value)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        map_values: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        key_is_query, value_is_key = key is None or key is query, value is None or value is key
        residual_is_query = residual is query
        query, key, value = self._checked(query, key, value)
        plan = self._plan(query, key, value)
        # Maps take tokens in the network's dtype, which may be narrower than averages are.
        maps_all = self.key_map is not None and self.value_map is not None
        key_tokens, key_grid = stages.pool(key, plan, rounded=maps_all)
        query = key_grid if key_is_query else query
        value_tokens = key_tokens if value_is_key else stages.pool(value, plan)[0]
        if maps_all and value_is_key:
            key_tokens = value_tokens = key_tokens.to(query.dtype)
        keys = stages.scaled(map_tokens(self.key_map, key_tokens, query), self.scale, self.num_heads)
        values = map_tokens(self.value_map, value_tokens, query)
        # A gain for each channel of the output is one for each channel of the values, of which there are few.
        values = values if self.layer_scale is None else self.layer_scale(values)
        if self.mode == "qkv":
            query_tokens = key_tokens if key_is_query else stages.pool(query, plan)[0]
            mixed = self._mix_tokens(map_tokens(self.query_map, query_tokens, query), keys, values, query, plan)
        else:
            mixed, query = self._mix_positions(query, keys, values, key_tokens if key_is_query else None, plan)
        if map_values is not None:
            # After the layer's own modules, as counters of parameters expect. Traced by itself, the layer has a
            # placeholder here, for what may be given or not.
            values = mixed.values
            values = optionally(map_values, values) if isinstance(map_values, fx.Proxy) else map_values(values)
            mixed = mixed._replace(values=values)
        if self.observer is not None:
            self.observer(self, mixed, query.shape[2:], key.shape[2:])
        residual = check_residual(query if residual_is_query else residual, query, mixed.values)
        queries, keys, bias, values, coefficients = mixed
        if self.mode == "kv":
            if coefficients is not None:
                return stages.spread_coefficients(coefficients, values, query, plan, residual=residual)
            return stages.spread(
                queries, keys, values, plan, num_heads=self.num_heads, key_bias=bias, residual=residual
            )
        if coefficients is not None:
            tokens = stages.spread_coefficients(coefficients, values, queries.transpose(1, 2), plan).transpose(1, 2)
        else:
            tokens = stages.attend_tokens(queries, keys, values, plan, num_heads=self.num_heads, key_bias=bias)
        tokens = stages.count_mean_once(tokens, query, plan) if self.mean == "once" else tokens
        return stages.spread_tokens(tokens, query, plan, residual=residual)

    def _mix_tokens(self, queries: Tensor, keys: Tensor, values: Tensor, like: Tensor, plan: Plan) -> Mixed:
        """KAO_QKV's middle stage: queries are (N, sum(grid), C) tokens too."""
        moments = None
        if self.num_heads == 1 and self._materialises(plan):
            return self._mix_materialised(queries, queries.transpose(1, 2), keys, values, plan)
        if self.uses_batch_statistics:
            per_key = self.coefficient_norm == "batch_per_key"
            moments, queries, keys = stages.moments_of_tokens(
                queries, keys, like, plan, num_heads=self.num_heads, per_key=per_key
            )
        keys, bias = self._normalised(keys, moments, plan)
        return Mixed(queries, keys, bias, values)

    def _mix_positions(
        self, query: Tensor, keys: Tensor, values: Tensor, query_tokens: Tensor | None, plan: Plan
    ) -> tuple[Mixed, Tensor]:
        """KAO_KV's middle stage: every position of (N, C, *grid) asks. Also the query to go on with.

        ``query_tokens`` are the averages of the query where they are at hand.
        """
        queries, moments = query, None
        if self.query_map is not None:
            if self._folds_query_map(keys, plan):
                keys = keys @ self.query_map.weight.to(keys.dtype)
            else:
                queries, query_tokens = map_positions(self.query_map, query), None
        if self._materialises(plan):
            return self._mix_materialised(queries, queries, keys, values, plan), query
        if self.uses_batch_statistics:
            moments, normed, keys = stages.moments_of_positions(
                queries,
                keys,
                plan,
                num_heads=self.num_heads,
                per_key=self.coefficient_norm == "batch_per_key",
                query_tokens=query_tokens,
            )
            query = normed if queries is query else query
            queries = normed
        keys, bias = self._normalised(keys, moments, plan)
        return Mixed(queries, keys, bias, values), query

    def _materialises(self, plan: Plan) -> bool:
        """Whether the coefficients are materialised; never while symbolic tracing, for which there is no plan yet."""
        return isinstance(plan, Plan) and plan.spread == "matrix_products" and self.coefficient_norm != "batch_per_key"

    def _mix_materialised(self, queries: Tensor, grid: Tensor, keys: Tensor, values: Tensor, plan: Plan) -> Mixed:
        """The same for wide layers: the coefficients are materialised once, for their statistics and to go on with.

        ``grid`` are the queries as (N, C, *grid).
        """
        coefficients, moments = stages.coefficients(grid, keys, plan), None
        if self.norm is not None:
            if self.uses_batch_statistics:
                moments, coefficients = stages.moments_of_coefficients(coefficients, keys.shape[1], plan)
            if self.observer is not None:
                keys = keys * self.norm.scale_and_bias(moments)[0]
            # What multiplies the keys multiplies the coefficients.
            coefficients, _ = self.norm(coefficients, moments, plan)
        return Mixed(queries, keys, None, values, coefficients)

    def _folds_query_map(self, keys: Tensor, plan: Plan) -> bool:
        """Whether the few keys are mapped back instead of all queries: k·(Wq) = (Wᵀk)·q.

        Worth it as long as there are few keys: attention then has all channels. The torch backend's statistics take the
        square of the number of channels. Never while symbolic tracing, which records the call of the map.
        """
        if self.num_heads > 1 or self.query_map is None or not is_plain(self.query_map) or not isinstance(plan, Plan):
            return False
        if self.uses_batch_statistics and plan.spread == "torch":
            return False
        count = _TYPICAL_KEYS if is_captured() else keys.shape[1]
        return count * (self.channels - self.qk_channels) <= self.channels * self.qk_channels

    def _checked(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return check_layer_input(
            query, key, value, channels=self.channels, dtype=self._map_dtype(), owner="KroneckerAttention"
        )

    def _plan(self, query: Tensor, key: Tensor, value: Tensor) -> Plan:
        return make_plan(
            query,
            key,
            value,
            mode=self.mode,
            num_heads=self.num_heads,
            per_key=self.coefficient_norm == "batch_per_key",
            channels=max(self.channels, self.qk_channels, self.out_channels),
        )

    def extra_repr(self) -> str:
        mean = f", mean={self.mean!r}" if self.mode == "qkv" else ""
        return f"{super().extra_repr()}, mode={self.mode!r}{mean}"


class DenseAttention(GridAttention):
    """Regular attention over a whole grid as a layer; with ``pool``, keys and values are max-pooled first.

    Args:
        channels: of the input.
        pool: the factor that keys and values are pooled by along every axis (Attn+Pool); 7 becomes 4 for 2.
        num_heads, project, coefficient_norm, scale, qk_channels, out_channels: as in
            :class:`KroneckerAttention`.
        grid: the keys' grid before pooling, for "batch_per_key" alone.

    Shape:
        query (N, channels, *grid), and key and value (N, channels, *other_grid) where given, to
        (N, out_channels, *grid); ``residual``, of that shape, is added to the result.

    Example:
        >>> DenseAttention(64, pool=2)(torch.randn(2, 64, 7, 9)).shape
        torch.Size([2, 64, 7, 9])
    """

    def __init__(
        self,
        channels: int,
        *,
        pool: int | None = None,
        num_heads: int = 1,
        project: str = "v",
        coefficient_norm: str | None = "batch",
        scale: float = 1.0,
        qk_channels: int | None = None,
        out_channels: int | None = None,
        grid: Sequence[int] | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            channels,
            num_heads=num_heads,
            project=project,
            coefficient_norm=coefficient_norm,
            scale=scale,
            qk_channels=qk_channels,
            out_channels=out_channels,
            num_keys=None if grid is None else math.prod(-(-size // (pool or 1)) for size in grid),
            device=device,
            dtype=dtype,
        )
        self.pool = pool

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *, residual: Tensor | None = None
    ) -> Tensor:
        value_is_key, residual_is_query = value is None or value is key, residual is query
        query, key, value = check_layer_input(
            query, key, value, channels=self.channels, dtype=self._map_dtype(), owner="DenseAttention"
        )
        residual = query if residual_is_query else residual
        if self.pool is not None:
            key = pool_grid(key, self.pool)
            value = key if value_is_key else pool_grid(value, self.pool)
        queries = map_positions(self.query_map, query)
        keys, values = (
            map_positions(linear, x).flatten(2).transpose(1, 2)
            for linear, x in ((self.key_map, key), (self.value_map, value))
        )
        keys, moments = stages.scaled(keys, self.scale, self.num_heads), None
        if self.uses_batch_statistics:
            moments = dense_moments(queries, keys, self.num_heads, self.coefficient_norm == "batch_per_key")
        keys, bias = self._normalised(keys, moments)
        if self.observer is not None:
            self.observer(self, Mixed(queries, keys, bias, values), query.shape[2:], key.shape[2:])
        residual = check_residual(residual, query, values)
        return dense_attention(queries, keys, values, bias, residual, self.num_heads)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pool={self.pool}"


@leaf_function
def optionally(function: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor:
    """function(x), or ``x`` where there is no function."""
    return x if function is None else function(x)


@leaf_function
def dense_moments(queries: Tensor, keys: Tensor, num_heads: int, per_key: bool) -> Any:
    """Batch statistics of the coefficients of (N, C, *grid) queries and (N, S, C) keys."""
    with without_autocast(queries):
        return torch_backend.moments(queries, keys, num_heads=num_heads, per_key=per_key)


@leaf_function
def dense_attention(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, residual: Tensor | None, num_heads: int
) -> Tensor:
    """Attention of every position of (N, C, *grid) to (N, S, C) keys with (N, S, P) values."""
    return torch_backend.spread(queries, keys, values, num_heads=num_heads, key_bias=bias, residual=residual)
