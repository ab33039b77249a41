"""The attention modules: Kronecker attention and regular attention, as layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kronattn.nn.fx import traced_as_one_node
from kronattn.nn.grid_attention import GridAttention, aligned_rows, map_channels, weight_of
from kronattn.ops import built, gpu
from kronattn.ops.attend import at_least_float32, is_captured
from kronattn.ops.attention import pool_grid
from kronattn.ops.autocast import without_autocast
from kronattn.ops.backends import Backend, axis_averages, choose_backend
from kronattn.ops.checks import check_mode
from kronattn.ops.grid import spread
from kronattn.ops.plain import attend_positions

__all__ = ["DenseAttention", "KroneckerAttention"]

# Rows and columns of a feature map that one would put Kronecker attention on.
_TYPICAL_KEYS = 128


class KroneckerAttention(GridAttention):
    """Kronecker attention as a layer: global context for a feature map of any size.

    The maps of keys and values work on the few averages rather than on all positions (an average of mapped
    vectors is the mapped average).

    Args:
        channels: of the input.
        mode: "kv" (every position asks) or "qkv" (rows and columns ask).
        num_heads: divides the channels.
        project: which of q, k, v get a linear map: "", "v", "qkv", ...
        coefficient_norm: "batch" (one scale for a head's coefficient matrix: any input size), "batch_per_key"
            (needs ``grid``), or None.
        scale: of the coefficients.
        qk_channels: that q and k are mapped to; ``channels`` by default.
        out_channels: that v is mapped to; ``channels`` by default.
        grid: the keys' grid, for "batch_per_key" alone.

    Shape:
        query (N, channels, *grid), and key and value (N, channels, *other_grid) where given, to
        (N, out_channels, *grid); ``added``, of that shape, is added to the result (a skip connection).
        With ``read_out``, (K, out_channels), the result is that linear map of the output, (N, K, *grid): a classifier
        of every position, say. It is applied to the values where it can be, which are fewer, and the output never has
        more than K channels. ``skip``, a weight (K, channels) or that of a 1×1 convolution, and a bias (K,) or None,
        adds such a map of the query itself. Where the kernels can, the query is read once for both.

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
        project: str = "v",
        coefficient_norm: str | None = "batch",
        scale: float = 1.0,
        qk_channels: int | None = None,
        out_channels: int | None = None,
        grid: Sequence[int] | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_mode(mode)
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

    @traced_as_one_node
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        added: Tensor | None = None,
        read_out: Tensor | None = None,
        skip: tuple[Tensor, Tensor | None] | None = None,
    ) -> Tensor:
        query, key, value = self._checked(query, key, value)
        reads_values = read_out is None or self._reads_out_values(read_out)
        if skip is not None:
            self._check_skip(*skip, self.out_channels if read_out is None else read_out.shape[0])
        if reads_values and query is key and key is value:
            output = self._built_at_once(query, read_out, skip)
            if output is not None:
                return output if added is None else output + added
        if skip is not None:
            skipped = map_channels(query, skip[0].flatten(1), skip[1])
            added = skipped if added is None else added + skipped
        if read_out is None:
            return self._attend(query, key, value, added, self._value_weight(None))
        if reads_values:
            # Fused attention, too, wants the channels of its values in eights.
            weight = aligned_rows(read_out) if gpu.on_gpu(query) else read_out
            output = self._attend(query, key, value, None, self._value_weight(weight))
            output = output if weight is read_out else output[:, : read_out.shape[0]]
        else:
            output = map_channels(self._attend(query, key, value, None, self._value_weight(None)), read_out)
        return output if added is None else output + added

    def _reads_out_values(self, read_out: Tensor) -> bool:
        """Whether a linear map of the output is taken of the values instead: they are averaged with weights alone.

        Not with several heads, each of which would have all of the map's channels.
        """
        if read_out.dim() != 2 or read_out.shape[1] != self.out_channels:
            raise ValueError(
                f"read_out must be (K, {self.out_channels}), a map of the output, not of shape {tuple(read_out.shape)}"
            )
        return self.num_heads == 1 and read_out.shape[0] <= self.out_channels

    def _check_skip(self, weight: Tensor, bias: Tensor | None, outputs: int) -> None:
        if weight.dim() < 2 or weight.shape[:2] != (outputs, self.channels) or math.prod(weight.shape[2:]) != 1:
            raise ValueError(
                f"skip's weight must be ({outputs}, {self.channels}), a map of the input to as many channels as the "
                f"result has, not of shape {tuple(weight.shape)}"
            )
        if bias is not None and bias.shape != (outputs,):
            raise ValueError(f"skip's bias must be ({outputs},), not of shape {tuple(bias.shape)}")

    def _value_weight(self, read_out: Tensor | None) -> Tensor | None:
        """The map that values get: their own and, where they are read out, both in one."""
        weight = weight_of(self.value_map)
        if read_out is None or weight is None:
            return weight if read_out is None else read_out
        # A GPU multiplies half precision at its best as it is; elsewhere nothing is gained by rounding the product.
        return read_out @ weight if gpu.on_gpu(weight) else at_least_float32(read_out) @ at_least_float32(weight)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, value_weight: Tensor | None
    ) -> Tensor:
        backend = choose_backend("auto", query, key, value, operator=self.mode, num_heads=self.num_heads)
        if backend.layer is not None and query is key and key is value:
            output = self._at_once(backend.layer, query, added, value_weight)
            if output is not None:
                return output
        if self._builds_coefficients(query, key):
            with without_autocast(query):
                output = self._attend_built(backend, query, key, value, value_weight)
            return output if added is None else output + added
        return self._attend_fused(backend, query, key, value, added, value_weight)

    def _attend_fused(
        self,
        backend: Backend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        added: Tensor | None,
        value_weight: Tensor | None,
    ) -> Tensor:
        """By a backend that never builds the coefficients."""
        key_averages = axis_averages(key, backend)
        value_averages = key_averages if value is key else axis_averages(value, backend)
        query_averages = key_averages if query is key else None
        query_weight = weight_of(self.query_map)
        keys, values = map_channels(key_averages, weight_of(self.key_map)), map_channels(value_averages, value_weight)
        if self.mode == "qkv":
            if query_averages is None:
                query_averages = axis_averages(query, backend)
            queries = map_channels(query_averages, query_weight)
            keys, bias = self._normalised(queries, keys)
        else:
            queries = None
            query_mean = self._mean_query(query_averages, query.shape[-1])
            # Batch statistics take the square of the number of channels that queries and keys have.
            if query_weight is not None and not self._uses_batch_statistics and self._maps_keys_instead(keys.shape[-1]):
                keys = map_channels(keys, query_weight.t())
            else:
                query = map_channels(query, query_weight)
            keys, bias = self._normalised(query, keys, query_mean)
        return backend.attend_averages(
            query, keys, values, queries=queries, num_heads=self.num_heads, key_bias=bias, added=added
        )

    def _builds_coefficients(self, query: Tensor, key: Tensor) -> bool:
        if self.num_heads > 1 or self.coefficient_norm == "batch_per_key":
            return False
        grid = query.shape[2:]
        return gpu.builds_coefficients(query, sum(grid) if self.mode == "qkv" else math.prod(grid), sum(key.shape[2:]))

    def _attend_built(
        self, backend: Backend, query: Tensor, key: Tensor, value: Tensor, value_weight: Tensor | None
    ) -> Tensor:
        """With the coefficients built, in the features' own precision; see :mod:`kronattn.ops.built`."""
        grid, count = query.shape[2:], sum(key.shape[2:])
        key_columns = _deviations(key, backend)
        value_columns = key_columns if value is key else _deviations(value, backend)
        keys = map_channels(key_columns, weight_of(self.key_map))
        values = built.restored(map_channels(value_columns, value_weight), count)
        query_weight = weight_of(self.query_map)
        if self.mode == "qkv":
            query_columns = key_columns if query is key else _deviations(query, backend)
            queries = at_least_float32(built.restored(map_channels(query_columns, query_weight), sum(grid)))
            # Of rows and columns there are so few that their coefficients need not be rounded.
            keys, values = at_least_float32(keys), at_least_float32(values)
        else:
            queries = query.flatten(2)
        if self.scale != 1:
            keys = keys * self.scale
        if self.norm is not None and not self._uses_batch_statistics:
            keys = (keys * self.norm(queries.unsqueeze(1), keys.unsqueeze(1))[0]).to(keys.dtype)
        if self.mode == "kv" and query_weight is not None and self._maps_keys_instead(count):
            keys = map_channels(keys, query_weight.t())
        elif self.mode == "kv":
            queries = map_channels(queries, query_weight)
        apart, shared = built.coefficients(queries, keys, count)
        scale = None
        if self.norm is not None and self._uses_batch_statistics:
            moments = built.built_moments(apart, shared)
            scale, _ = self.norm(queries.unsqueeze(1), keys.unsqueeze(1), moments=moments)
        output = built.attend(apart, values, scale)
        if self.mode == "qkv":
            return spread(output, grid, query.dtype)
        return output.to(query.dtype).unflatten(2, grid)

    def _built_layer(self, x: Tensor) -> Callable[..., Tensor | None] | None:
        """What does all of an image's self-attention with its coefficients built, where settings and input allow it."""
        if x.dim() != 4 or self.scale != 1 or not self._builds_coefficients(x, x):
            return None
        if self.norm is not None and self.norm.state() is None:
            return None
        if self.mode == "kv" and self.query_map is not None and not self._maps_keys_instead(sum(x.shape[2:])):
            return None
        # It starts with averages, of each channel by itself: like so many heads of one channel.
        return choose_backend("auto", x, x, x, operator=self.mode, num_heads=self.channels).built_layer

    def _built_at_once(
        self, x: Tensor, read_out: Tensor | None, skip: tuple[Tensor, Tensor | None] | None
    ) -> Tensor | None:
        layer = None if skip is not None and read_out is None else self._built_layer(x)
        if layer is None:
            return None
        weights = weight_of(self.query_map), weight_of(self.key_map), weight_of(self.value_map)
        state = None if self.norm is None else self.norm.state()
        skip_weight, skip_bias = (None, None) if skip is None else skip
        with without_autocast(x):
            return layer(
                x, *weights, state, mode=self.mode, read_out=read_out, skip_weight=skip_weight, skip_bias=skip_bias
            )

    def _at_once(
        self, layer: Callable[..., Tensor | None], x: Tensor, added: Tensor | None, value_weight: Tensor | None
    ) -> Tensor | None:
        """The output by a backend that has the whole layer as one operator, where its settings allow that."""
        if self.query_map is not None or self.key_map is not None:
            return None
        state = None if self.norm is None else self.norm.state()
        if self.norm is not None and state is None:
            return None
        return layer(x, value_weight, state, added, mode=self.mode, num_heads=self.num_heads, scale=self.scale)

    def _mean_query(self, averages: Tensor | None, width: int) -> Tensor | None:
        """(N, C, 1), from averages that are at hand and where batch statistics ask for it: saves a pass.

        The mean of all queries is that of the last axis's averages, which stand first.
        """
        if averages is None or not self._uses_batch_statistics:
            return None
        return map_channels(averages[..., :width].mean(dim=-1, keepdim=True), weight_of(self.query_map))

    @property
    def _uses_batch_statistics(self) -> bool:
        return self.norm is not None and self.norm.uses_batch_statistics

    def _maps_keys_instead(self, count: int) -> bool:
        """Whether (WQ)ᵀK is cheaper as Qᵀ(WᵀK): it leaves the full tensor alone and touches only the averages.

        Not with several heads, whose keys would each grow to all channels.
        """
        if self.num_heads > 1:
            return False
        # A captured graph is made for sizes it has yet to see, and must not be tied to those of the example.
        count = _TYPICAL_KEYS if is_captured() else count
        return self.channels * count <= self.qk_channels * (self.channels + count)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


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
        (N, out_channels, *grid); ``added``, of that shape, is added to the result (a skip connection).

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

    @traced_as_one_node
    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *, added: Tensor | None = None
    ) -> Tensor:
        query, key, value = self._checked(query, key, value)
        if self.pool is not None:
            pooled = pool_grid(key, self.pool)
            value = pooled if value is key else pool_grid(value, self.pool)
            key = pooled
        query = map_channels(query, weight_of(self.query_map))
        keys = map_channels(key, weight_of(self.key_map)).flatten(2)
        values = map_channels(value, weight_of(self.value_map)).flatten(2)
        keys, bias = self._normalised(query, keys)
        return attend_positions(query, keys, values, num_heads=self.num_heads, key_bias=bias, added=added)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pool={self.pool}"


def _deviations(x: Tensor, backend: Backend) -> Tensor:
    """Averages of (N, C, *grid) as :func:`kronattn.ops.built.deviations`, in x's dtype."""
    return built.deviations(axis_averages(x, backend)).to(x.dtype)
