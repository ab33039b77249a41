"""Random attention layers with random options, on every implementation of their stages, against the literal layer.

An option of a layer is one line in ``OPTIONS`` and what it means in ``layer_oracle.py``. An option that is in neither
is named in the results, as one that nobody tries.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.nn import DenseAttention, KroneckerAttention
from kronattn.nn.grid_attention import GridAttention
from kronattn.ops.plan import kernels_unsupported_reason, override_plan
from tests.ops.cases import LAYOUTS, lay_out
from tests.soak.comparing import described, errors
from tests.soak.layer_oracle import expected
from tests.soak.part import OnPoisonedMemory, Outcome, shapes_of

# As in tests/nn/test_attention_on_kernels.py: maps and norms are a few more roundings than an operator has. Half
# precision is that of autocast, with weights in float32.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 5e-2}

# What each option of the layers is drawn from; None leaves it at its default.
OPTIONS: dict[str, list[Any]] = {
    "mode": ["kv", "qkv"],
    "mean": ["once", "each"],
    "num_heads": [1, 1, 2, 3],
    "project": ["", "v", "v", "qk", "qkv", "qkv"],
    "coefficient_norm": ["batch", "batch", "batch_per_key", None],
    "scale": [1.0, 0.3],
    "qk_channels": [None, None, 6],
    "out_channels": [None, None, 12],
    "layer_scale": [None, 0.5],
    "pool": [None, 2],
}
# The first is given always, grid and num_keys follow from the input, and two are where and how weights are made.
_NOT_DRAWN = {"channels", "grid", "num_keys", "device", "dtype"}
# Those of options.py.
_DRAWN_THERE = {"positions", "softmax", "combine", "gate", "dropout"}

# Positions in a batch, for a norm of each key's coefficients in half precision.
_FEW = 16
# Options that decide about sizes.
_SHAPING = {"num_heads", "project", "qk_channels", "out_channels", "pool"}

SIZES = {1: (2, 5, 16, 33), 2: (1, 2, 3, 5, 7, 14), 3: (2, 3, 5), 4: (2, 3)}


class Layers(OnPoisonedMemory):
    """``KroneckerAttention`` and ``DenseAttention``."""

    def close(self) -> Mapping[str, Any]:
        super().close()
        known = {*OPTIONS, *_NOT_DRAWN, *_DRAWN_THERE}
        layers = (KroneckerAttention, DenseAttention, GridAttention)
        unknown = {name for layer in layers for name in _options_of(layer)} - known
        return {"options_not_tried": sorted(unknown)} if unknown else {}

    def run(self, number: int) -> Outcome:
        draw = Random(number)
        interpreted = self.device.type == "cpu" and draw.random() < 0.004
        kind = KroneckerAttention if interpreted or draw.random() < 0.85 else DenseAttention
        layer, inputs, residual, labels = self._drawn(draw, number, kind, small=interpreted)
        dtype = draw.choice([torch.float32, torch.bfloat16] if interpreted else list(TOLERANCE))
        if layer.training and layer.coefficient_norm == "batch_per_key" and inputs[0][:, 0].numel() < _FEW:
            # A variance of so few numbers may be next to nothing, and what is divided by it is all rounding.
            dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        if dtype == torch.bfloat16:
            # Numbers that autocast will not round: errors are those of the computation.
            inputs = [x.to(dtype).double() for x in inputs]
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.copy_(parameter.to(dtype))
        exact = _exact(layer, inputs, residual)
        outcome = Outcome()
        for name, stages in self._implementations(layer, inputs, dtype, interpreted):
            with override_plan(**stages):
                actual = _actual(layer, inputs, residual, dtype, labels["layout"])
            tried = {"backend": name, "dtype": str(dtype).removeprefix("torch."), **labels}
            outcome.tried.append(tried)
            found = errors(actual, exact, _floors(exact, layer))
            if found and max(found.values()) > TOLERANCE[dtype]:
                shapes = [tuple(x.shape) for x in inputs]
                outcome.wrong.append(f"{described(found, TOLERANCE[dtype])}: {tried}, {shapes}, {layer}")
        return outcome

    def _drawn(
        self, draw: Random, number: int, kind: Any, small: bool
    ) -> tuple[nn.Module, list[Tensor], str | None, dict[str, Any]]:
        shape = shapes_of(number, draw, self.device)
        axes = shape.choice([1, 2, 2, 2, 3, 4])
        most = {1: 5, 2: 5, 3: 3, 4: 2}[axes] if small else 33
        grid = tuple(min(shape.choice(SIZES[axes]), most) for _ in range(axes))
        own_keys = shape.random() < 0.25
        key_grid = tuple(shape.choice((2, 3, 5)) for _ in range(shape.choice([1, 2, 3]))) if own_keys else grid
        batch = shape.choice([2, 3])
        drawn_with = {name: shape if name in _SHAPING else draw for name in OPTIONS}
        options = {name: drawn_with[name].choice(OPTIONS[name]) for name in _options_of(kind) if name in OPTIONS}
        heads = options["num_heads"]
        channels = heads * shape.choice([2, 4] if small else [2, 4, 8, 16])
        if not {"q", "k"} <= set(options["project"]):
            options["qk_channels"] = None
        if "v" not in options["project"]:
            options["out_channels"] = None
        if options["coefficient_norm"] == "batch_per_key":
            options["grid"] = key_grid
        torch.manual_seed(number)
        layer = kind(channels, **options).double().to(self.device).train(draw.random() < 0.6)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if "map" not in name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
            if layer.norm is not None:
                layer.norm.running_mean.normal_()
                layer.norm.running_var.uniform_(0.5, 2.0)
        shapes = [(batch, channels, *grid)] + [(batch, channels, *key_grid)] * (draw.choice([1, 2]) if own_keys else 0)
        inputs = [torch.randn(shape, device=self.device).double() for shape in shapes]
        residual = draw.choice([None, "query", "another"])
        if residual == "query" and layer.out_channels != channels:
            residual = "another"
        labels = {
            "layer": kind.__name__,
            "axes": axes,
            "training": layer.training,
            "given": len(inputs),
            "residual": residual,
            "layout": draw.choice(LAYOUTS[:4]),
            **{name: value for name, value in options.items() if name != "grid"},
        }
        return layer, inputs, residual, labels

    def _implementations(
        self, layer: nn.Module, inputs: list[Tensor], dtype: torch.dtype, interpreted: bool
    ) -> list[tuple[str, dict[str, str]]]:
        if isinstance(layer, DenseAttention):
            return [("torch", {})]
        query, key, value = (x.to(dtype) for x in (inputs[0], inputs[min(1, len(inputs) - 1)], inputs[-1]))
        kernels = [("triton", {"pool": "triton", "spread": "triton"})]
        takes_kernels = kernels_unsupported_reason(query, key, value, layer.num_heads) is None
        if interpreted:
            return kernels if takes_kernels else []
        found = [("torch", {"pool": "torch", "spread": "torch"})]
        if self.device.type == "cuda":
            found += [("auto", {}), *(kernels if takes_kernels else [])]
        if layer.num_heads == 1 and layer.coefficient_norm != "batch_per_key":
            found.append(("matrix_products", {"spread": "matrix_products"}))
        return found


def _options_of(layer: type) -> list[str]:
    """What a layer takes, and what it hands on to the class that it is made from."""
    found: dict[str, None] = {}
    for made_from in layer.__mro__:
        if "__init__" in vars(made_from):
            taken = inspect.signature(made_from.__init__).parameters.values()
            found |= dict.fromkeys(one.name for one in taken if one.name != "self" and one.kind is not one.VAR_KEYWORD)
            if not any(one.kind is one.VAR_KEYWORD for one in taken):
                break
    return list(found)


def _floors(exact: Mapping[str, Tensor], layer: Any) -> dict[str, float | None]:
    """A mean of coefficients of either sign may be next to nothing: it is measured against their spread."""
    floors: dict[str, float | None] = {name: None if name.startswith("gradient") else 0.1 for name in exact}
    if "running_var" in exact:
        floors["running_mean"] = max(0.1, float(exact["running_var"].max()) ** 0.5)
    return floors


def _weights(output: Tensor) -> Tensor:
    generator = torch.Generator(output.device).manual_seed(1)
    weights = torch.randn(output.shape, generator=generator, device=output.device)
    return weights.to(torch.bfloat16).to(output.dtype)


def _gradients(output: Tensor, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(output, list(wanted.values()), _weights(output), allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted.values(), strict=True))
    return {f"gradient of {name}": g for name, g in zip(wanted, zeros, strict=True)}


def _leaves(layer: Any, inputs: list[Tensor], residual: str | None) -> tuple[dict[str, Tensor], Tensor | None]:
    leaves = {name: x.requires_grad_() for name, x in zip(("query", "key", "value"), inputs, strict=False)}
    if residual == "another":
        query = inputs[0]
        shape = (query.shape[0], layer.out_channels, *query.shape[2:])
        generator = torch.Generator(query.device).manual_seed(2)
        added = torch.randn(shape, generator=generator, device=query.device).to(torch.bfloat16).to(query.dtype)
        leaves["residual"] = added.requires_grad_()
    return leaves, leaves.get("residual", leaves["query"]) if residual else None


def _exact(layer: Any, inputs: list[Tensor], residual: str | None) -> dict[str, Tensor]:
    leaves, added = _leaves(layer, [x.detach().clone() for x in inputs], residual)
    query = leaves["query"]
    key = leaves.get("key", query)
    found = expected(layer, query, key, leaves.get("value", key), added)
    found |= _gradients(found["output"], leaves | dict(layer.named_parameters()))
    return {name: x.detach() for name, x in found.items()}


def _actual(
    layer: Any, inputs: list[Tensor], residual: str | None, dtype: torch.dtype, layout: str
) -> dict[str, Tensor]:
    half = dtype == torch.bfloat16
    layer = copy.deepcopy(layer).to(torch.float32 if half else dtype)
    inputs = [lay_out(x.detach().to(dtype), layout).detach() for x in inputs]
    leaves, added = _leaves(layer, inputs, residual)
    with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16, enabled=half):
        output = layer(*(leaves[name] for name in ("query", "key", "value") if name in leaves), residual=added)
    found = {"output": output} | _gradients(output, leaves | dict(layer.named_parameters()))
    if layer.norm is not None and layer.training:
        found |= {name: getattr(layer.norm, name) for name in ("running_mean", "running_var")}
    return {name: x.detach() for name, x in found.items()}


PART = Layers
