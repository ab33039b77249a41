"""Random calls of the operators, on every backend that takes them: forward and every gradient against float64.

Memory that they allocate is full of NaN beforehand, so that whatever is left out shows.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from kronattn import attention, kronecker_attention
from kronattn.ops import native
from kronattn.ops.plan import BACKENDS, kernels_unsupported_reason
from tests.ops.cases import LAYOUTS, TOLERANCE, lay_out
from tests.soak.comparing import described, errors
from tests.soak.part import OnPoisonedMemory, Outcome, shapes_of

SIZES = {1: (1, 2, 5, 16, 33, 70), 2: (1, 2, 3, 5, 7, 14, 28), 3: (1, 2, 3, 5, 7), 4: (1, 2, 3, 4)}
KEY_SIZES = (1, 2, 3, 5, 7)
HEAD_CHANNELS = (1, 3, 8, 16, 40)


class Operators(OnPoisonedMemory):
    """``kronecker_attention`` and ``attention``.

    Where coefficients are large, results that are further off than their tolerance are judged again, and counted: an
    output by a rounding of the largest coefficient, gradients by the size of the terms that cancel in them. As fused
    attention computes it, a coefficient's gradient P∘(dP - rowsum(dY∘Y)) leaves the roundings of both terms where the
    softmax saturates.
    """

    def run(self, number: int) -> Outcome:
        draw = Random(number)
        # The interpreter takes a thousand times as long as anything else here: seldom, and with little to do.
        interpreted = self.device.type == "cpu" and draw.random() < 0.004
        case = _drawn(draw, shapes_of(number, draw, self.device), small=interpreted)
        dtype = draw.choice(list(TOLERANCE))
        generator = torch.Generator(self.device).manual_seed(number)
        tensors = [
            lay_out(torch.randn(shape, generator=generator, device=self.device).to(dtype), case["layout"])
            for shape in case["shapes"]
        ]
        options = dict(case["options"])
        if case["scale"] == "tensor":
            scales = torch.randn(options["num_heads"], generator=generator, device=self.device)
            # Numbers of the dtype, as the backend reads them.
            options["scale"] = scales.to(dtype)
        operator = kronecker_attention if case["operator"] == "kronecker_attention" else attention
        exact = _results(operator, [x.double() for x in tensors], options, dtype, "reference")
        floors = _floors(exact, tensors[0])
        outcome = Outcome()
        for backend in self._backends(tensors, options, dtype, draw, interpreted):
            actual = _results(operator, tensors, options, dtype, backend)
            tried = {"backend": backend, "dtype": str(dtype).removeprefix("torch."), **case["labels"]}
            tried["judged"] = "by its tolerance"
            outcome.tried.append(tried)
            if actual["output"].dtype != dtype:
                outcome.wrong.append(f"the output is {actual['output'].dtype}: {tried}, {case['shapes']}")
                continue
            expected = {name: exact[name] for name in actual}
            found = errors(actual, expected, floors)
            if not found or max(found.values()) <= TOLERANCE[dtype]:
                continue
            tried["judged"] = "by its coefficients"
            found = errors(actual, expected, floors | _floors_by_coefficients(exact, tensors, options["scale"]))
            if max(found.values()) > TOLERANCE[dtype]:
                outcome.wrong.append(f"{described(found, TOLERANCE[dtype])}: {tried}, {case['shapes']}")
        return outcome

    def _backends(
        self, tensors: list[Tensor], options: dict[str, Any], dtype: torch.dtype, draw: Random, interpreted: bool
    ) -> list[str]:
        query, key, value = tensors[0], tensors[min(1, len(tensors) - 1)], tensors[-1]
        takes_kernels = kernels_unsupported_reason(query, key, value, options["num_heads"]) is None
        if interpreted:
            return ["triton"] if takes_kernels else []
        backends = ["auto", "torch"] if self.device.type == "cuda" else [draw.choice(["auto", "torch"])]
        if draw.random() < 0.1:
            backends.append("reference")
        if self.device.type == "cuda" and takes_kernels:
            backends.append("triton")
        with torch.no_grad():
            if options["num_heads"] == 1 and native.unsupported_reason(query, key, value) is None:
                backends.append("native")
        assert set(backends) <= {"auto", *BACKENDS}
        return backends


def _floors(exact: dict[str, Tensor], query: Tensor) -> dict[str, float | None]:
    """What errors are measured against, at least; see :func:`errors`.

    The scale multiplies the coefficients of every query, so its gradient is a sum of products of queries with their
    gradients, of either sign: it is measured against the root of the sum of their squares, as roundings add up.
    """
    floors: dict[str, float | None] = {name: 0.1 if name == "output" else None for name in exact}
    if "gradient of scale" in exact and query.numel():
        sizes = query.double().norm(dim=1) * exact["gradient of query"].norm(dim=1)
        floors["gradient of scale"] = max(0.1, float(sizes.norm()))
    return floors


def _floors_by_coefficients(exact: dict[str, Tensor], tensors: list[Tensor], scale: float | Tensor) -> dict[str, float]:
    """For the output what a rounding of the largest coefficient s·(q·k) may do to it; for gradients the terms
    s·(dY·v)·k that may cancel in those of queries and keys, and their products with a query in the scale's."""
    query, key, value = (tensors[min(at, len(tensors) - 1)].double() for at in range(3))
    dtype, factor = tensors[0].dtype, float(torch.as_tensor(scale).abs().max())
    coefficient = factor * query.norm(dim=1).max() * key.norm(dim=1).max()
    rounding = float(coefficient) * torch.finfo(dtype).eps / 2
    term = float(_weights(exact["output"], dtype).norm(dim=1).max() * value.norm(dim=1).max())
    term *= float(max(query.abs().max(), key.abs().max()))
    floors = {name: term * factor for name in exact if name.startswith("gradient")}
    if "gradient of scale" in floors:
        floors["gradient of scale"] = term * float(query.norm())
    return floors | {"output": float(value.abs().max()) * rounding / TOLERANCE[dtype]}


def _weights(output: Tensor, dtype: torch.dtype) -> Tensor:
    """What gradients are those of a sum of outputs times these: numbers of ``dtype``, the same for both sides."""
    generator = torch.Generator(output.device).manual_seed(1)
    return torch.randn(output.shape, generator=generator, device=output.device).to(dtype).to(output.dtype)


def _drawn(draw: Random, shape: Random, small: bool) -> dict[str, Any]:
    operator = shape.choice(["kronecker_attention"] * 3 + ["attention"])
    axes = shape.choice([1, 2, 2, 2, 3, 4])
    sizes = KEY_SIZES if small or operator == "attention" else SIZES[axes]
    most = {1: 70, 2: 28, 3: 7, 4: 4}[axes] if not small else {1: 7, 2: 5, 3: 3, 4: 2}[axes]
    grid = tuple(min(shape.choice(sizes), most) for _ in range(axes))
    heads = shape.choice([1, 1, 2, 3])
    channels = shape.choice(HEAD_CHANNELS[:3] if small or operator == "attention" else HEAD_CHANNELS)
    batch = shape.choice([0, 1, 2, 3] if shape.random() < 0.05 else [1, 2, 3])
    shapes = [(batch, heads * channels, *grid)]
    given = shape.choice(["query", "query", "query, key", "query, key, value"])
    if given != "query":
        key_grid = tuple(shape.choice(KEY_SIZES[:4]) for _ in range(shape.choice([1, 2, 3])))
        shapes.append((batch, heads * channels, *key_grid))
    if given == "query, key, value":
        shapes.append((batch, heads * shape.choice([1, 4, 8]), *key_grid))
    scale = draw.choice([1.0, 0.35, -1.5, 2.0, "tensor"])
    options: dict[str, Any] = {"num_heads": heads, "scale": scale}
    labels = {"operator": operator, "axes": axes, "given": given, "num_heads": heads, "scale": scale}
    if operator == "kronecker_attention":
        options |= {"mode": draw.choice(["kv", "qkv"]), "mean": draw.choice(["once", "each"])}
        labels |= {"mode": options["mode"], "mean": options["mean"]}
    else:
        options["pool"] = draw.choice([None, None, 2, 3])
        labels["pool"] = options["pool"]
    layout = draw.choice(LAYOUTS)
    return {
        "operator": operator,
        "shapes": shapes,
        "options": options,
        "scale": scale,
        "layout": layout,
        "labels": labels | {"layout": layout},
    }


def _results(operator: Any, tensors: list[Tensor], options: dict[str, Any], dtype: torch.dtype, backend: str) -> Any:
    """Output and gradients, of which one backend has none."""
    if backend == "native":
        with torch.no_grad():
            return {"output": operator(*tensors, backend=backend, **options)}
    leaves = {name: x.detach().requires_grad_() for name, x in zip(("query", "key", "value"), tensors, strict=False)}
    options = dict(options)
    wanted = dict(leaves)
    if isinstance(options["scale"], Tensor):
        wanted["scale"] = options["scale"] = options["scale"].to(tensors[0].dtype).detach().requires_grad_()
    output = operator(*leaves.values(), backend=backend, **options)
    gradients = torch.autograd.grad(output, list(wanted.values()), _weights(output, dtype))
    return {"output": output.detach()} | {f"gradient of {n}": g for n, g in zip(wanted, gradients, strict=True)}


PART = Operators
