"""Random combinations of the layer's options and masks against the reference, as tests/nn/test_options.py has them."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import torch

from kronattn.ops.plan import override_plan
from tests.nn.options import LayerCase, expected, gradients, kept_keys, shortest_vector
from tests.soak.comparing import described, errors
from tests.soak.layers import TOLERANCE
from tests.soak.part import OnPoisonedMemory, Outcome, shapes_of


class Options(OnPoisonedMemory):
    """Positions, cosines, a softmax for each axis, products, gates, dropout, masks: all at once or some."""

    def run(self, number: int) -> Outcome:
        draw = Random(number)
        interpreted = self.device.type == "cpu" and draw.random() < 0.004
        case = _drawn(draw, shapes_of(number, draw, self.device), number)
        backends = {"torch": {"pool": "torch", "spread": "torch"}}
        if interpreted or self.device.type == "cuda":
            kernels = {"triton": {"pool": "triton", "spread": "triton"}}
            backends = kernels if interpreted else backends | kernels
        dtype = torch.float32 if "triton" in backends else draw.choice([torch.float64, torch.float32])
        exact, inputs, masks = _exact(case, dtype, self.device)
        outcome = Outcome()
        labels = {"mode": case.mode, "axes": len(case.grid), "training": case.training, "masked": case.masked}
        labels |= {"residual": case.residual, "own keys": case.key_grid is not None, **case.options}
        labels.pop("grid", None)
        tolerance = TOLERANCE[dtype]
        if case.options["coefficient_norm"] == "cosine":
            # A vector of hardly any length has hardly a direction: rounding grows with one over it, for everyone.
            shortest = shortest_vector(case.layer().double(), [x.detach().double() for x in inputs], masks)
            tolerance *= max(1.0, 0.2 / shortest)
        for backend, stages in backends.items():
            layer = case.layer().to(self.device, dtype)
            leaves = [x.detach().to(self.device, dtype).requires_grad_() for x in inputs]
            torch.manual_seed(case.seed)
            with override_plan(**stages):
                there = {name: mask.to(self.device) for name, mask in masks.items()}
                output = layer(*leaves, residual=leaves[0] if case.residual else None, **there)
            actual = _named(layer, output, leaves)
            tried = {"backend": backend, "dtype": str(dtype).removeprefix("torch."), **labels}
            outcome.tried.append(tried)
            found = errors(
                {name: x.cpu() for name, x in actual.items()},
                exact,
                {name: 0.1 if name == "output" else None for name in exact},
            )
            if max(found.values()) > tolerance:
                outcome.wrong.append(f"{described(found, tolerance)}: {tried}, {case}")
        return outcome


def _drawn(draw: Random, shape: Random, number: int) -> LayerCase:
    axes = shape.choice([1, 2, 2, 3, 4])
    most = {1: 7, 2: 5, 3: 3, 4: 2}[axes]
    grid = tuple(shape.randint(1, most) for _ in range(axes))
    grid = (grid[0] + 1, *grid[1:])
    key_grid = shape.choice([None, None, tuple(size + 1 for size in reversed(grid))])
    mode = draw.choice(["kv", "qkv"])
    options: dict[str, Any] = {
        "num_heads": shape.choice([1, 2]),
        "project": shape.choice(["v", "qkv"]),
        "coefficient_norm": draw.choice(["batch", "cosine", "sample", None]),
        "scale": draw.choice([1.0, 0.4]),
        "softmax": draw.choice(["joint", "per_axis"]),
        "gate": draw.choice([False, True]),
        "dropout": draw.choice([0.0, 0.4]),
        "layer_scale": draw.choice([None, 0.5]),
    }
    if draw.random() < 0.5:
        options |= {"positions": "learned", "grid": tuple(draw.randint(1, 4) for _ in range(axes))}
    if mode == "qkv" and axes > 1 and draw.random() < 0.5:
        options["combine"] = "product"
    elif mode == "qkv":
        options["mean"] = draw.choice(["once", "each"])
    return LayerCase(
        mode,
        grid,
        key_grid,
        options,
        training=draw.random() < 0.5,
        masked=draw.random() < 0.5,
        residual=draw.random() < 0.5,
        seed=number % 2**31,
    )


def _exact(
    case: LayerCase, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
    """The reference's results, the inputs, and the masks."""
    layer = case.layer()
    inputs, masks = case.inputs()
    for name, xs in (("mask", inputs[:1]), ("key_mask", inputs[1:])):
        for x in xs if name in masks else ():
            # Whatever stands where nothing is must not matter.
            x[(~masks[name]).unsqueeze(1).expand_as(x)] = 100.0
    leaves = [x.requires_grad_() for x in inputs]
    dropped = copy.deepcopy(layer).to(device)
    output = expected(layer, leaves, masks, kept_keys(dropped, case, dtype, str(device)))
    if case.residual:
        output = output + (leaves[0] if "mask" not in masks else leaves[0] * masks["mask"].unsqueeze(1))
    return _named(layer, output, leaves), inputs, masks


def _named(layer: Any, output: Any, leaves: list[Any]) -> dict[str, Any]:
    names = [*("query", "key", "value")[: len(leaves)], *(name for name, _ in layer.named_parameters())]
    found = gradients(layer, output, leaves)
    named = {f"gradient of {name}": gradient for name, gradient in zip(names, found, strict=True)}
    return {"output": output.detach()} | {name: x.detach() for name, x in named.items()}


PART = Options
