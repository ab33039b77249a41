"""Random layers with options, and what the reference says that they compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from kronattn.nn import KroneckerAttention, grid_attention
from kronattn.ops import reference


@dataclass(frozen=True)
class LayerCase:
    """One call of a layer: everything needed to make it and its input again."""

    mode: str
    grid: tuple[int, ...]
    key_grid: tuple[int, ...] | None
    options: dict[str, Any] = field(hash=False)
    training: bool
    masked: bool
    residual: bool
    seed: int

    def layer(self, channels: int = 4) -> KroneckerAttention:
        torch.manual_seed(self.seed)
        layer = KroneckerAttention(channels, self.mode, **self.options).double().train(self.training)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if "positions" in name or "layer_scale" in name:
                    nn.init.normal_(parameter)
            if isinstance(getattr(layer.norm, "running_var", None), Tensor):
                layer.norm.running_var.fill_(0.7)
        return layer

    def inputs(self, channels: int = 4) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Query, and key and value where they have a grid of their own; masks by name."""
        generator = torch.Generator().manual_seed(self.seed)
        grids = [self.grid] if self.key_grid is None else [self.grid, self.key_grid, self.key_grid]
        tensors = [torch.randn(3, channels, *grid, generator=generator, dtype=torch.float64) for grid in grids]
        masks = {}
        if self.masked:
            for name, grid in zip(("mask", "key_mask"), grids, strict=False):
                masks[name] = torch.rand(3, *grid, generator=generator) < 0.6
                masks[name][0] = True
        return tensors, masks


@st.composite
def layer_cases(draw: st.DrawFn, masks: bool = True) -> LayerCase:
    axes = draw(st.sampled_from((1, 2, 2, 3, 4)))
    sizes = st.integers(1, {1: 7, 2: 5, 3: 3, 4: 2}[axes])
    grid = tuple(draw(sizes) for _ in range(axes))
    # One coefficient has no variance.
    grid = (grid[0] + 1, *grid[1:])
    key_grid = draw(st.sampled_from((None, None, tuple(size + 1 for size in reversed(grid)))))
    mode = draw(st.sampled_from(("kv", "qkv")))
    options: dict[str, Any] = {
        "num_heads": draw(st.sampled_from((1, 2))),
        "project": draw(st.sampled_from(("v", "qkv"))),
        "coefficient_norm": draw(st.sampled_from(("batch", "cosine", "sample", None))),
        "scale": draw(st.sampled_from((1.0, 0.4))),
        "softmax": draw(st.sampled_from(("joint", "per_axis"))),
        "gate": draw(st.booleans()),
        "dropout": draw(st.sampled_from((0.0, 0.4))),
        "layer_scale": draw(st.sampled_from((None, 0.5))),
    }
    if draw(st.booleans()):
        options |= {"positions": "learned", "grid": tuple(draw(st.integers(1, 4)) for _ in range(axes))}
    if mode == "qkv" and axes > 1 and draw(st.booleans()):
        options["combine"] = "product"
    elif mode == "qkv":
        options["mean"] = draw(st.sampled_from(("once", "each")))
    return LayerCase(
        mode,
        grid,
        key_grid,
        options,
        training=draw(st.booleans()),
        masked=masks and draw(st.booleans()),
        residual=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def shortest_vector(layer: KroneckerAttention, tensors: list[Tensor], masks: dict[str, Tensor]) -> float:
    """The least length, but for nothing, that cosines of a call divide by: rounding errors grow with one over it."""
    lengths = [float("inf")]
    real = grid_attention.unit

    def measuring(x: Tensor, num_heads: int, dim: int) -> Tensor:
        found = x.detach().unflatten(dim, (num_heads, -1)).norm(dim=dim + 1)
        lengths.extend(found[found > 0].tolist())
        return real(x, num_heads, dim)

    with mock.patch.object(grid_attention, "unit", measuring), torch.no_grad():
        layer(*tensors, **masks)
    return min(lengths)


def expected(layer: KroneckerAttention, tensors: list[Tensor], masks: dict[str, Tensor], kept: Tensor | None) -> Tensor:
    """The layer by the reference: maps of whole grids, and every coefficient materialised."""

    def mapped(linear: Any, x: Tensor) -> Tensor:
        return x if linear is None else (x.movedim(1, -1) @ linear.weight.t()).movedim(-1, 1)

    x = tensors[0]
    query, key, value = tensors if len(tensors) == 3 else tensors * 3
    mask = masks.get("mask")
    scale: Any = layer.scale
    options: dict[str, Any] = {}
    if layer.coefficient_norm == "cosine":
        options["cosine"], scale = True, scale * layer.norm.weight
    elif layer.coefficient_norm == "sample":
        options["sample_norm"] = layer.norm.weight
    elif layer.coefficient_norm == "batch" and layer.training:
        options["norm"] = layer.norm.weight
    elif layer.coefficient_norm == "batch":
        scale = scale * layer.norm.weight * torch.rsqrt(layer.norm.running_var + layer.norm.eps)
    if layer.positions is not None:
        grid = layer.positions.grid
        options["positions"] = layer.positions.vectors.split(list(reversed(grid)))[::-1]
    y = reference.kronecker_attention(
        mapped(layer.query_map, query),
        mapped(layer.key_map, key),
        mapped(layer.value_map, value),
        mode=layer.mode,
        num_heads=layer.num_heads,
        scale=scale,
        mean=layer.mean,
        softmax=layer.softmax,
        combine=layer.combine,
        mask=mask,
        key_mask=masks.get("key_mask", mask if len(tensors) == 1 else None),
        kept=kept,
        **options,
    )
    if layer.gate:
        y = x * torch.sigmoid(y)
    if layer.layer_scale is not None:
        y = y * layer.layer_scale.gain.view(-1, *[1] * (x.dim() - 2))
    return y if mask is None else y * mask.unsqueeze(1)


def kept_keys(layer: KroneckerAttention, case: LayerCase, dtype: torch.dtype, device: str) -> Tensor | None:
    """What dropout multiplies each key's coefficients by, (N, num_heads, S), in the call after the same seed."""
    if layer.dropout is None:
        return None
    torch.manual_seed(case.seed)
    keys, channels = sum(case.key_grid or case.grid), 4 // layer.num_heads
    kept = layer.dropout(torch.ones(3, keys * layer.num_heads, channels, dtype=dtype, device=device))
    return kept[..., 0].unflatten(1, (-1, layer.num_heads)).transpose(1, 2).double().cpu()


def gradients(layer: KroneckerAttention, output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Of a weighted sum of the output, for inputs and parameters."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [*leaves, *layer.parameters()]
    found = torch.autograd.grad((output * weights.to(output)).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)]
