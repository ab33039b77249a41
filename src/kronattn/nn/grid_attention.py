"""What attention modules over a grid share: linear maps and batch norm of the coefficients around an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.nn.cosine_norm import CosineNorm, unit
from kronattn.nn.sample_norm import SampleNorm
from kronattn.ops import stages
from kronattn.ops.checks import check_choice, check_dtype, check_heads, check_positive_int, check_scale, check_triple
from kronattn.ops.coefficients import Moments
from kronattn.ops.fx import is_captured, leaf_function
from kronattn.ops.masks import NO_MASKS, Masks
from kronattn.ops.plan import Plan

__all__ = ["GridAttention", "Mixed", "check_layer_input", "map_positions", "map_tokens"]


class Mixed(NamedTuple):
    """What the middle stage gives: all that attention needs to know.

    Attributes:
        queries: (N, C, *grid) where every position asks, (N, C, M) where averages do.
        keys: (N, S, C), with the scale and the norm of the coefficients multiplied in.
        key_bias: (num_heads, S), or with a mask (N, num_heads, S), added to each key's coefficients before the
            softmax, or None.
        values: (N, S, P).
        weights: (N, m, S), the coefficients after their softmax, where they are materialised; see
            :mod:`kronattn.ops.matrix_products`.
        masks: what of it holds data; see :mod:`kronattn.ops.masks`.
    """

    queries: Tensor
    keys: Tensor
    key_bias: Tensor | None
    values: Tensor
    weights: Tensor | None = None
    masks: Masks = NO_MASKS


class GridAttention(nn.Module):
    """A module with maps of Q, K and V, and the norm of the coefficients; what attends is its subclasses'.

    ``observer``, where it is set, is called with the module, what the middle stage gave, and the grids of queries and
    keys: how :func:`kronattn.record_coefficients` sees what a layer attends to.
    """

    observer: Callable[[GridAttention, Mixed, Sequence[int], Sequence[int]], None] | None = None
    # The keys' grid, where each of them has a norm of its own.
    grid: tuple[int, ...] | None = None
    # Averages of axes, or all positions.
    has_few_keys = False
    # What regular attention is by KroneckerAttention's options.
    mode, mean, softmax, combine = "regular", "each", "joint", "sum"

    def __init__(
        self,
        channels: int,
        *,
        num_heads: int = 1,
        project: str = "v",
        coefficient_norm: str | None = "batch",
        scale: float | Tensor = 1.0,
        qk_channels: int | None = None,
        out_channels: int | None = None,
        num_keys: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_positive_int("channels", channels)
        for name, size in (("qk_channels", qk_channels), ("out_channels", out_channels)):
            if size is not None:
                check_positive_int(name, size)
        if not isinstance(project, str) or len(set(project)) != len(project) or not set(project) <= set("qkv"):
            raise ValueError(f'project must name which of q, k, v are mapped, like "", "v" or "qkv", not {project!r}')
        check_choice("coefficient_norm", coefficient_norm, ("batch", "batch_per_key", "cosine", "sample", None))
        if coefficient_norm == "batch_per_key" and num_keys is None:
            raise ValueError('coefficient_norm="batch_per_key" needs grid, the fixed size of the keys\' grid')
        if qk_channels not in (None, channels) and not set("qk") <= set(project):
            raise ValueError(f"qk_channels={qk_channels} needs maps of q and k: project must contain both")
        if out_channels not in (None, channels) and "v" not in project:
            raise ValueError(f'out_channels={out_channels} needs a map of v: project must contain "v"')
        check_heads(num_heads, qk_channels or channels, "query")
        check_heads(num_heads, out_channels or channels, "value")
        check_scale(scale, num_heads)
        self.channels = channels
        self.num_heads = num_heads
        self.project = project
        self.coefficient_norm = coefficient_norm
        self.scale: float | Tensor
        if isinstance(scale, Tensor) and not isinstance(scale, nn.Parameter):
            # It follows the layer to other devices.
            self.register_buffer("scale", scale, persistent=False)
        else:
            self.scale = scale
        self.qk_channels = qk_channels or channels
        self.out_channels = out_channels or channels

        def linear(name: str, out: int) -> nn.Linear | None:
            return nn.Linear(channels, out, bias=False, device=device, dtype=dtype) if name in project else None

        self.query_map = linear("q", self.qk_channels)
        self.key_map = linear("k", self.qk_channels)
        self.value_map = linear("v", self.out_channels)
        self.norm: CoefficientNorm | CosineNorm | SampleNorm | None = None
        if coefficient_norm == "cosine":
            self.norm = CosineNorm(num_heads, device, dtype)
        elif coefficient_norm == "sample":
            self.norm = SampleNorm(num_heads, few=self.has_few_keys, device=device, dtype=dtype)
        elif coefficient_norm is not None:
            num_keys = num_keys if coefficient_norm == "batch_per_key" else None
            self.norm = CoefficientNorm(num_heads, num_keys=num_keys, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier's initialisation of the maps, as in the paper."""
        for linear in (self.query_map, self.key_map, self.value_map):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
        if self.norm is not None:
            self.norm.reset_parameters()

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether the coefficients are normed by this batch's statistics, as in training."""
        norm = self.norm
        return isinstance(norm, CoefficientNorm) and norm.training

    def _checked(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dtype = None
        for linear in (self.value_map, self.key_map, self.query_map):
            weight = getattr(linear, "weight", None)
            if isinstance(weight, Tensor):  # quantised modules' are not, and have no dtype to compare with
                dtype = weight.dtype
                break
        grid = self.grid if self.coefficient_norm == "batch_per_key" else None
        return check_layer_input(query, key, value, self.channels, dtype, type(self).__name__, grid)

    def _unit(self, x: Tensor, dim: int) -> Tensor:
        """Queries or keys with channels along ``dim``, of length one where coefficients are cosines."""
        return unit(x, self.num_heads, dim) if self.coefficient_norm == "cosine" else x

    def _scaled(self, keys: Tensor, shares: Tensor | None = None) -> Tensor:
        """(N, S, C) keys with the scale, after what norms them by themselves; ``shares`` as in ``Masks``."""
        if isinstance(self.norm, SampleNorm):
            keys = self.norm(keys, shares)
        return stages.scaled(self._unit(keys, 2), self.scale, self.num_heads)

    def _normalised(
        self, keys: Tensor, moments: Moments | None, plan: Plan | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(N, S, C) keys with the norm of the coefficients multiplied in, and each key's bias."""
        norm = self.norm
        return (keys, None) if norm is None or isinstance(norm, SampleNorm) else norm(keys, moments, plan)

    def extra_repr(self) -> str:
        parts = [f"{self.channels}"]
        if self.out_channels != self.channels:
            parts.append(f"out_channels={self.out_channels}")
        if self.qk_channels != self.channels:
            parts.append(f"qk_channels={self.qk_channels}")
        parts.append(f"num_heads={self.num_heads}, project={self.project!r}")
        parts.append(f"coefficient_norm={self.coefficient_norm!r}, scale={self.scale}")
        return ", ".join(parts)


@leaf_function
def check_layer_input(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    channels: int,
    dtype: torch.dtype | None,
    owner: str,
    grid: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a layer called ``owner``, whose maps are of ``dtype``, and whose keys have to have that
    ``grid`` where one is given; in autocast's dtype where that is on."""
    query, key, value = check_triple(query, key, value, 1, 1.0)
    name, x = ("query", query) if query.shape[1] != channels else ("value", value)
    if x.shape[1] != channels:
        raise ValueError(f"{owner} was built for {channels} channels, but {name} has {x.shape[1]}")
    if grid is not None and not is_captured() and tuple(key.shape[2:]) != grid:
        raise ValueError(
            f"{owner} was built for keys of the grid {grid}, but they have {tuple(key.shape[2:])}; "
            f'use coefficient_norm="batch" for input of any size'
        )
    check_dtype(query, "query", dtype, owner)
    return query, key, value


def map_tokens(linear: nn.Module | None, tokens: Tensor, like: Tensor) -> Tensor:
    """Apply a map to (N, S, C) tokens, in ``like``'s dtype: averages are wider than a network in half precision."""
    return tokens if linear is None else linear(tokens.to(like.dtype))


def map_positions(linear: nn.Module | None, x: Tensor) -> Tensor:
    """Apply a map to every position of (N, C, *grid); channels come out side by side."""
    return x if linear is None else linear(x.movedim(1, -1)).movedim(-1, 1)
