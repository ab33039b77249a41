"""What attention modules over a grid share: linear maps and batch norm of the coefficients around an operator."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.ops import gpu
from kronattn.ops.checks import check_heads, check_scale, check_triple

__all__ = ["GridAttention", "aligned_rows", "map_channels", "weight_of"]

COEFFICIENT_NORMS = ("batch", "batch_per_key", None)


class GridAttention(nn.Module):
    """A module with maps of Q, K and V, and the norm of the coefficients; what attends is its subclasses'."""

    def __init__(
        self,
        channels: int,
        *,
        num_heads: int,
        project: str,
        coefficient_norm: str | None,
        scale: float,
        qk_channels: int | None,
        out_channels: int | None,
        num_keys: int | None,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        if not isinstance(channels, int):
            raise TypeError(f"channels must be an int, not {type(channels).__name__}")
        if channels < 1:
            raise ValueError(f"channels must be at least 1, not {channels}")
        if len(set(project)) != len(project) or not set(project) <= set("qkv"):
            raise ValueError(f'project must name which of q, k, v are mapped, like "", "v" or "qkv", not {project!r}')
        if coefficient_norm not in COEFFICIENT_NORMS:
            known = ", ".join(repr(known) for known in COEFFICIENT_NORMS)
            raise ValueError(f"coefficient_norm must be one of {known}, not {coefficient_norm!r}")
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
        self.scale = scale
        self.qk_channels = qk_channels or channels
        self.out_channels = out_channels or channels

        def linear(name: str, out: int) -> nn.Linear | None:
            return nn.Linear(channels, out, bias=False, device=device, dtype=dtype) if name in project else None

        self.query_map = linear("q", self.qk_channels)
        self.key_map = linear("k", self.qk_channels)
        self.value_map = linear("v", self.out_channels)
        self.norm: CoefficientNorm | None = None
        if coefficient_norm is not None:
            self.norm = CoefficientNorm(
                num_heads, num_keys=num_keys if coefficient_norm == "batch_per_key" else None
            ).to(device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier's initialisation of the maps, as in the paper."""
        for linear in (self.query_map, self.key_map, self.value_map):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
        if self.norm is not None:
            self.norm.reset_parameters()

    def _checked(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = check_triple(query, key, value, 1, 1.0)
        if query.shape[1] != self.channels or value.shape[1] != self.channels:
            name, x = ("query", query) if query.shape[1] != self.channels else ("value", value)
            raise ValueError(
                f"{type(self).__name__} was built for {self.channels} channels, but {name} has {x.shape[1]}"
            )
        return query, key, value

    def _normalised(self, query: Tensor, key: Tensor, query_mean: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(N, C, n) keys with the scale and the norm of the coefficients multiplied in, and each key's bias."""
        if self.scale != 1:
            key = key * self.scale
        if self.norm is None:
            return key, None
        heads = (self.num_heads, -1)
        if query_mean is not None:
            query_mean = query_mean.unflatten(1, heads)
        if self.num_heads == 1:
            scale, bias = self.norm(query.flatten(2).unsqueeze(1), key.unsqueeze(1), query_mean)
            return key * scale, bias
        key = key.unflatten(1, heads)
        scale, bias = self.norm(query.flatten(2).unflatten(1, heads), key, query_mean)
        return (key * scale).flatten(1, 2), bias

    def extra_repr(self) -> str:
        parts = [f"{self.channels}"]
        if self.out_channels != self.channels:
            parts.append(f"out_channels={self.out_channels}")
        if self.qk_channels != self.channels:
            parts.append(f"qk_channels={self.qk_channels}")
        parts.append(f"num_heads={self.num_heads}, project={self.project!r}")
        parts.append(f"coefficient_norm={self.coefficient_norm!r}, scale={self.scale}")
        return ", ".join(parts)


def weight_of(linear: nn.Linear | None) -> Tensor | None:
    """A map's (out, in) matrix, where there is a map."""
    return None if linear is None else linear.weight


def map_channels(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Apply a map to the channels of (N, C, *positions), keeping them side by side where they are."""
    if weight is None:
        return x
    outputs = weight.shape[0]
    if gpu.multiplies_rows(x):
        weight, bias = aligned_rows(weight), None if bias is None else aligned_rows(bias)
    # Averages are in float32 also where a network's weights are in half precision.
    weight = weight if weight.dtype == x.dtype else weight.to(x.dtype)
    columns = x if x.dim() == 3 else x.flatten(2)
    if x.stride(1) == 1:
        bias = None if bias is None else bias.to(x.dtype)
        mapped = F.linear(columns.transpose(1, 2), weight, bias).transpose(1, 2)
    else:
        # A product for each sample: matmul would get there too, by way of copies.
        mapped = torch.bmm(weight.expand(x.shape[0], -1, -1), columns)
        mapped = mapped if bias is None else mapped + bias[:, None].to(mapped.dtype)
    mapped = mapped if weight.shape[0] == outputs else mapped[:, :outputs]
    return mapped if x.dim() == 3 else mapped.unflatten(2, x.shape[2:])


def aligned_rows(x: Tensor) -> Tensor:
    """Weights for a few outputs more than asked for, all zeros, so that a GPU takes its fast products."""
    more = gpu.aligned(x.shape[0]) - x.shape[0]
    return F.pad(x, (*[0, 0] * (x.dim() - 1), 0, more)) if more else x
