"""Attention operators beside a copy of their input, on a GPU: python benchmarks/operators.py results/operators.json 3.

The same as ``kronattn bench operators``, for machines without the command's dependencies, repeated as often as is said:
the file holds medians, and beside them every run's times over the copy's. Two shapes are measured with the torch
backend compiled as well, once. Further arguments are the only operators to measure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kronattn.bench.operators import OPERATORS, SHAPES, bench_operators, median_costs, over_copy, to_json

COMPILED_SHAPES = ((512, 64, 14, 14), (64, 64, 56, 56))


def main(output: str, repeats: str = "3", *only: str) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    names = [name for name in OPERATORS if name in only or not only]
    plain = [name for name in names if not OPERATORS[name].compiled]
    compiled = [name for name in names if OPERATORS[name].compiled]
    runs = [bench_operators(plain, SHAPES, device=device, dtype=dtype, seconds=0.05) for _ in range(int(repeats))]
    costs = median_costs(runs)
    if compiled:
        costs += bench_operators(compiled, COMPILED_SHAPES, device=device, dtype=dtype, seconds=0.05)
    costs.sort(key=lambda cost: (SHAPES.index(cost.shape), list(OPERATORS).index(cost.operator)))
    found = to_json(costs, device=device, dtype=dtype, channels_last=True)
    found["runs"] = [over_copy(run) for run in runs]
    Path(output).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
