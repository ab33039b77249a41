"""The attention modules: Kronecker attention and regular attention, as layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.nn.context_layer import add_residual
from kronattn.nn.grid_attention import GridAttention, Mixed, map_positions, map_tokens
from kronattn.nn.layer_scale import LayerScale
from kronattn.nn.plain import is_plain
from kronattn.nn.positions import AxisPositions
from kronattn.ops import stages, torch_backend
from kronattn.ops.attention import pool_grid
from kronattn.ops.checks import check_grid, check_options, check_positive_int, check_residual
from kronattn.ops.fx import is_captured, leaf_function
from kronattn.ops.masks import NO_MASKS, Masks, apply_masks, cleared
from kronattn.ops.plan import Plan, make_plan

__all__ = ["DenseAttention", "KroneckerAttention"]

# Rows and columns of a feature map that one would put Kronecker attention on.
_TYPICAL_KEYS = 128
# That axes of an image have vectors for: the size of feature maps where attention usually stands.
_PLACES = (16, 16)


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
            (needs ``grid``), "cosine" (queries and keys of length one, and a learned scale), "sample" (each sample by
            itself, from its keys), or None.
        scale: of the coefficients.
        qk_channels: that q and k are mapped to; ``channels`` by default.
        out_channels: that v is mapped to; ``channels`` by default.
        grid: the keys' grid, for "batch_per_key"; for ``positions``, how many places each axis has vectors for, 16 by
            16 if it is not given.
        positions: "learned" for a vector for each place of each axis, added to queries and keys, interpolated to grids
            of any size; or None.
        softmax: over all keys, "joint", or for the keys of each axis by themselves, "per_axis", with equal parts of the
            weight for each axis.
        combine: what a position of mode "qkv" receives of its row and its column: their "sum", or their "product",
            scaled so that a constant grid comes out as it would of the sum.
        gate: y = x · σ(attention): what comes out is the input, with a gate for each channel of each position.
        dropout: how often a key is left out in training, of each sample and head by itself, for all queries alike.
        layer_scale: a gain for each channel of the output, learned, that starts at this number. At 0 a new layer with a
            residual leaves a pretrained network exactly as it was, and learns from there.

    Shape:
        query (N, channels, *grid), and key and value (N, channels, *other_grid) where given, to
        (N, out_channels, *grid); ``residual``, of that shape, is added to the result. ``map_values`` is applied to the
        (N, S, out_channels) values: a linear map of the output, without a bias and of a layer with one head, costs
        h + w vectors there instead of h·w. ``mask``, (N, *grid), and ``key_mask``, (N, *other_grid), are true where
        there is data: averages and statistics are of that, empty rows and columns take no part, and the output is zero
        where nothing is. See :func:`kronattn.pad_batch`.

    Example:
        >>> layer = KroneckerAttention(64, mode="qkv")
        >>> layer(torch.randn(2, 64, 28, 28)).shape
        torch.Size([2, 64, 28, 28])
    """

    has_few_keys = True

    def __init__(
        self,
        channels: int,
        mode: str = "kv",
        *,
        num_heads: int = 1,
        mean: str = "once",
        project: str = "v",
        coefficient_norm: str | None = "batch",
        scale: float | Tensor = 1.0,
        qk_channels: int | None = None,
        out_channels: int | None = None,
        grid: Sequence[int] | None = None,
        positions: str | None = None,
        softmax: str = "joint",
        combine: str = "sum",
        gate: bool = False,
        dropout: float = 0.0,
        layer_scale: float | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_options(mode, mean, softmax, combine)
        if positions not in (None, "learned"):
            raise ValueError(f"positions must be 'learned' or None, not {positions!r}")
        if combine == "product" and mean == "each":
            raise ValueError('combine="product" excludes mean="each": the mean is counted in sums alone')
        if not isinstance(gate, bool):
            raise TypeError(f"gate must be True or False, not {gate!r}")
        if gate and (out_channels not in (None, channels) or "v" not in project):
            wrong = f"project={project!r}" if "v" not in project else f"out_channels={out_channels}"
            raise ValueError(
                f"gate=True excludes {wrong}: the input is gated by its attention's map, channel by channel"
            )
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a number from 0 up and below 1, not {dropout!r}")
        if grid is not None:
            check_grid(grid)
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
        self.grid = None if grid is None else tuple(grid)
        self.mode = mode
        self.mean = mean
        self.softmax = softmax
        self.combine = combine
        self.gate = gate
        self.dropout = nn.Dropout1d(dropout) if dropout else None
        self.positions: AxisPositions | None = None
        if positions is not None:
            self.positions = AxisPositions(self.qk_channels, grid or _PLACES, device, dtype)
        self.layer_scale = None if layer_scale is None else LayerScale(self.out_channels, layer_scale, device, dtype)

    @property
    def is_linear_in_values(self) -> bool:
        """Whether a linear map of the values is one of the output."""
        return not self.gate and self.combine == "sum"

    def plan(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *, masked: bool = False
    ) -> Plan:
        """What would run each stage of a call, with a mask or without, and why.

        Example:
            >>> print(KroneckerAttention(8).plan(torch.randn(2, 8, 5, 6)))
            pool: torch, mix: PyTorch, spread: torch (query is on cpu: the kernels need a CUDA device)
        """
        query, key, value = self._checked(query, key, value)
        return self._plan(query, key, value, (masked or None,))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        map_values: Callable[[Tensor], Tensor] | None = None,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        key_is_query, value_is_key = key is None or key is query, value is None or value is key
        residual_is_query = residual is query
        query, key, value = self._checked(query, key, value)
        plan, masks = self._plan(query, key, value, (mask, key_mask)), NO_MASKS
        if mask is not None or key_mask is not None:
            if self.coefficient_norm == "batch_per_key" and not isinstance(mask, fx.Proxy):
                raise ValueError('coefficient_norm="batch_per_key" excludes mask: use coefficient_norm="batch"')
            query, key, value, masks = apply_masks(query, key, value, mask, key_mask)

        # Pool. Maps take tokens in the network's dtype, which may be narrower than averages are.
        maps_all = self.key_map is not None and self.value_map is not None
        key_tokens, handed_on = stages.pool(key, plan, masks.key_shares, rounded=maps_all)
        query = handed_on if key_is_query else query
        value_tokens = key_tokens if value_is_key else stages.pool(value, plan, masks.key_shares)[0]
        if maps_all and value_is_key:
            key_tokens = value_tokens = key_tokens.to(query.dtype)
        query_tokens = key_tokens if key_is_query else None
        if query_tokens is None and self.mode == "qkv":
            query_tokens = stages.pool(query, plan, masks.shares)[0]

        # Mix.
        keys, places = map_tokens(self.key_map, key_tokens, query), None
        if self.positions is not None:
            key_places = self.positions(key, masks.key_shares)
            keys = keys + key_places.to(keys.dtype)
            places = key_places if key_is_query else self.positions(query, masks.shares)
        keys = self._scaled(keys, masks.key_shares)
        values = self._values(value_tokens, query)
        mixed, query = self._mix(query, query_tokens, keys, values, places, plan, masks)
        if map_values is not None:
            # After the layer's own modules, as counters of parameters expect.
            mixed = mixed._replace(values=self._mapped(map_values, mixed.values))
        if self.observer is not None:
            self.observer(self, mixed, query.shape[2:], key.shape[2:])

        # Spread.
        residual = check_residual(query if residual_is_query else residual, query, mixed.values.shape[2])
        if self.is_linear_in_values:
            y = self._spread(mixed, query, key, plan, residual)
        else:
            y = self._spread(mixed, query, key, plan, None)
            y = query * y.sigmoid() if self.gate else y
            y = y if self.layer_scale is None else map_positions(self.layer_scale, y)
            y = add_residual(y, residual)
        return y if mask is None else cleared(y, mask)

    def _values(self, tokens: Tensor, like: Tensor) -> Tensor:
        """(N, S, P) values of (N, S, C) tokens."""
        values = map_tokens(self.value_map, tokens, like)
        if self.layer_scale is not None and self.is_linear_in_values:
            # A gain for each channel of the output is one for each channel of the values, of which there are few.
            values = self.layer_scale(values)
        if self.dropout is not None:
            # Coefficients times a number for each key and head are values times that number.
            vectors = values.unflatten(2, (self.num_heads, -1)).flatten(1, 2)
            values = self.dropout(vectors).unflatten(1, (-1, self.num_heads)).flatten(2)
        return values

    def _mapped(self, map_values: Any, values: Tensor) -> Any:
        if isinstance(map_values, fx.Proxy):
            # Traced by itself, the layer has a placeholder here, for what may be given or not.
            return optionally(map_values, values)
        if not self.is_linear_in_values:
            option = "gate=True" if self.gate else 'combine="product"'
            raise ValueError(f"map_values excludes {option}: the output is not linear in the values")
        return map_values(values)

    def _mix(
        self,
        query: Tensor,
        query_tokens: Tensor | None,
        keys: Tensor,
        values: Tensor,
        places: Tensor | None,
        plan: Plan,
        masks: Masks,
    ) -> tuple[Mixed, Tensor]:
        """Queries, and keys with the norm of the coefficients multiplied in; and the query to go on with.

        ``query_tokens`` are the averages of the query where they are at hand, ``places`` the vectors of its positions.
        """
        if self.mode == "qkv":
            assert query_tokens is not None
            queries = map_tokens(self.query_map, query_tokens, query)
            queries = self._unit(queries if places is None else queries + places.to(queries.dtype), 2).transpose(1, 2)
        else:
            queries, keys = self._ask_everywhere(query, keys, places, plan)
        asks_itself = queries is query
        if self._norms_coefficients(plan):
            return self._mix_materialised(queries, keys, values, plan), query
        moments = None
        if self.uses_batch_statistics:
            moments, queries, keys = stages.moments(
                queries,
                keys,
                plan,
                num_heads=self.num_heads,
                per_key=self.coefficient_norm == "batch_per_key",
                like=query if self.mode == "qkv" else None,
                query_tokens=query_tokens if asks_itself else None,
                masks=masks,
            )
        keys, bias = self._normalised(keys, moments, plan)
        bias = bias if masks is NO_MASKS else stages.masked_bias(bias, masks.key_shares, self.num_heads)
        return Mixed(queries, keys, bias, values, masks=masks), queries if asks_itself else query

    def _ask_everywhere(self, query: Tensor, keys: Tensor, places: Tensor | None, plan: Plan) -> tuple[Tensor, Tensor]:
        """KAO_KV's queries, (N, C, *grid), and the keys that they are for."""
        queries = query
        if self.query_map is not None:
            if self._folds_query_map(keys, plan):
                keys = keys @ self.query_map.weight.to(keys.dtype)
            else:
                queries = map_positions(self.query_map, query)
        if places is not None:
            places = places.to(queries.dtype).expand(queries.shape[0], -1, -1)
            queries = stages.combine_tokens(places, queries, plan, residual=queries)
        return self._unit(queries, 1), keys

    def _spread(self, mixed: Mixed, query: Tensor, key: Tensor, plan: Plan, residual: Tensor | None) -> Tensor:
        """What the last stage makes of what the middle stage gave; for KAO_QKV, attention belongs to it too."""
        queries, keys, bias, values, weights, masks = mixed
        added = residual if self.mode == "kv" else None
        if weights is not None:
            y = stages.spread_coefficients(weights, values, queries, residual=added)
        else:
            axes = key.shape[2:] if self.softmax == "per_axis" else None
            y = stages.spread(
                queries, keys, values, plan, num_heads=self.num_heads, key_bias=bias, residual=added, axes=axes
            )
        if self.mode == "kv":
            return y
        tokens, options = y.transpose(1, 2), {"mean": self.mean, "combine": self.combine}
        return stages.combine_tokens(tokens, query, plan, shares=masks.shares, residual=residual, **options)

    def _norms_coefficients(self, plan: Plan) -> bool:
        """Whether materialised coefficients are normed in place of keys; never while tracing, without a plan yet."""
        if self.num_heads > 1 or self.coefficient_norm != "batch" or self.softmax == "per_axis":
            return False
        return isinstance(plan, Plan) and plan.spread == "matrix_products"

    def _mix_materialised(self, queries: Tensor, keys: Tensor, values: Tensor, plan: Plan) -> Mixed:
        """The same for wide layers: the coefficients are materialised once, for their statistics and to go on with."""
        assert isinstance(self.norm, CoefficientNorm)
        coefficients, moments, count = stages.coefficients(queries, keys, plan), None, keys.shape[1]
        if self.uses_batch_statistics:
            moments, coefficients = stages.moments_of_coefficients(coefficients, count, plan)
        if self.observer is not None:
            keys = keys * self.norm.scale_and_bias(moments)[0]
        # What multiplies the keys multiplies the coefficients.
        weights, _ = self.norm(coefficients, moments, plan, softmax_of=count)
        return Mixed(queries, keys, None, values, weights)

    def _folds_query_map(self, keys: Tensor, plan: Plan) -> bool:
        """Whether the few keys are mapped back instead of all queries: k·(Wq) = (Wᵀk)·q.

        Worth it as long as there are few keys: attention then has all channels. The torch backend's statistics take the
        square of the number of channels. Never while symbolic tracing, which records the call of the map.
        """
        if self.num_heads > 1 or self.query_map is None or not is_plain(self.query_map) or not isinstance(plan, Plan):
            return False
        if self.positions is not None or self.coefficient_norm in ("cosine", "sample"):
            return False  # the mapped queries are needed, or the keys that are for them
        if self.uses_batch_statistics and plan.spread == "torch":
            return False
        count = _TYPICAL_KEYS if is_captured() else keys.shape[1]
        return count * (self.channels - self.qk_channels) <= self.channels * self.qk_channels

    def _plan(self, query: Tensor, key: Tensor, value: Tensor, masks: Sequence[object] = ()) -> Plan:
        return make_plan(
            query,
            key,
            value,
            mode=self.mode,
            num_heads=self.num_heads,
            per_key=self.coefficient_norm == "batch_per_key" or self.softmax == "per_axis",
            masks=masks,
            channels=max(self.channels, self.qk_channels, self.out_channels),
            has_parameters=True,
        )

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"mode={self.mode!r}"]
        if self.mode == "qkv":
            parts.append(f"mean={self.mean!r}" if self.combine == "sum" else f"combine={self.combine!r}")
        if self.softmax != "joint":
            parts.append(f"softmax={self.softmax!r}")
        return ", ".join([*parts, "gate=True"] if self.gate else parts)


class DenseAttention(GridAttention):
    """Regular attention over a whole grid as a layer; with ``pool``, keys and values are max-pooled first.

    Args:
        channels: of the input.
        pool: the factor that keys and values are pooled by along every axis (Attn+Pool); 7 becomes 4 for 2.
        grid: the keys' grid before pooling, for "batch_per_key" alone.
        num_heads, project, coefficient_norm, scale, qk_channels, out_channels: as in :class:`KroneckerAttention`.

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
        grid: Sequence[int] | None = None,
        num_heads: int = 1,
        project: str = "v",
        coefficient_norm: str | None = "batch",
        scale: float | Tensor = 1.0,
        qk_channels: int | None = None,
        out_channels: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if pool is not None:
            check_positive_int("pool", pool)
        if grid is not None:
            check_grid(grid)
        num_keys = None if grid is None else math.prod(-(-size // (pool or 1)) for size in grid)
        super().__init__(
            channels,
            num_heads=num_heads,
            project=project,
            coefficient_norm=coefficient_norm,
            scale=scale,
            qk_channels=qk_channels,
            out_channels=out_channels,
            num_keys=num_keys,
            device=device,
            dtype=dtype,
        )
        self.grid = None if grid is None else tuple(grid)
        self.pool = pool

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *, residual: Tensor | None = None
    ) -> Tensor:
        value_is_key, residual_is_query = value is None or value is key, residual is query
        query, key, value = self._checked(query, key, value)
        residual = query if residual_is_query else residual
        if self.pool is not None:
            key = pool_grid(key, self.pool)
            value = key if value_is_key else pool_grid(value, self.pool)
        queries = self._unit(map_positions(self.query_map, query), 1)
        keys, values = (
            map_positions(linear, x).flatten(2).transpose(1, 2)
            for linear, x in ((self.key_map, key), (self.value_map, value))
        )
        keys, moments = self._scaled(keys), None
        if self.uses_batch_statistics:
            moments = torch_backend.moments(
                queries, keys, num_heads=self.num_heads, per_key=self.coefficient_norm == "batch_per_key"
            )
        keys, bias = self._normalised(keys, moments)
        if self.observer is not None:
            self.observer(self, Mixed(queries, keys, bias, values), query.shape[2:], key.shape[2:])
        residual = check_residual(residual, query, self.out_channels)
        return torch_backend.spread(queries, keys, values, num_heads=self.num_heads, key_bias=bias, residual=residual)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pool={self.pool}"


@leaf_function
def optionally(function: Any, x: Any) -> Any:
    """function(x), or ``x`` where there is no function."""
    return x if function is None else function(x)
