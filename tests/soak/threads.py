"""Sixteen threads at once: one layer, one network and the planner have to answer each as if it were alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import torch

from kronattn import kronecker_attention, record_coefficients
from kronattn.nn import KroneckerAttention
from kronattn.ops.plan import explain_plan, override_plan
from tests.soak.part import Outcome

THREADS = 16


class Threads:
    """What threads share: a layer's weights, the plan's overrides, recorders, caches of block sizes."""

    def __init__(self, folder: Path, device: str) -> None:
        self.device = torch.device(device)

    def close(self) -> Mapping[str, Any]:
        return {"threads": THREADS}

    def run(self, number: int) -> Outcome:
        draw = Random(number)
        torch.manual_seed(number)
        mode = draw.choice(["kv", "qkv"])
        layer = KroneckerAttention(8, mode, num_heads=draw.choice([1, 2]), project=draw.choice(["v", "qkv"]))
        layer = layer.to(self.device).eval()
        what = [draw.choice(["layer", "gradients", "operator", "plan", "recorded"]) for _ in range(THREADS)]
        inputs = [
            torch.randn(2, 8, draw.choice([3, 7, 14]), draw.choice([3, 7, 14]), device=self.device)
            for _ in range(THREADS)
        ]
        alone = [
            self._answer(kind, copy.deepcopy(layer), x, mode, index)
            for index, (kind, x) in enumerate(zip(what, inputs, strict=True))
        ]
        together = threading.Barrier(THREADS)

        def visit(index: int) -> Any:
            # A recorder listens to one layer, so those who record have one of their own.
            own = copy.deepcopy(layer) if what[index] == "recorded" else layer
            together.wait()
            return self._answer(what[index], own, inputs[index], mode, index)

        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(visit, range(THREADS)))
        outcome = Outcome([{"call": kind, "mode": mode} for kind in what])
        for kind, one, other in zip(what, alone, found, strict=True):
            if not _same(one, other):
                outcome.wrong.append(f"{kind} in mode {mode} has another answer beside {THREADS - 1} other threads")
        return outcome

    def _answer(self, kind: str, layer: Any, x: torch.Tensor, mode: str, index: int) -> Any:
        if kind == "layer":
            with torch.no_grad():
                return layer(x)
        if kind == "gradients":
            leaf = x.clone().requires_grad_()
            y = layer(leaf, residual=leaf)
            return torch.autograd.grad(y.square().sum(), [leaf, layer.value_map.weight])
        if kind == "operator":
            return kronecker_attention(x, mode=mode, num_heads=2)
        if kind == "recorded":
            with record_coefficients(layer) as recorded, torch.no_grad():
                layer(x)
            return recorded[0].coefficients
        # An override holds for the thread that made it, and for no other.
        if index % 2:
            with override_plan(spread="matrix_products"):
                return str(explain_plan(x, mode=mode))
        return str(explain_plan(x, mode=mode))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, str):
        return one == other
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


PART = Threads
