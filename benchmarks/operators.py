"""Attention operators beside a copy of their input, on a GPU: python benchmarks/operators.py results/operators.json.

The same as ``kronattn bench operators``, for machines without the command's dependencies; two shapes are measured
with the torch backend compiled as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kronattn.bench.operators import OPERATORS, SHAPES, bench_operators, to_json

COMPILED_SHAPES = ((512, 64, 14, 14), (64, 64, 56, 56))


def main(output: str) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    plain = [name for name, operator in OPERATORS.items() if not operator.compiled]
    compiled = [name for name, operator in OPERATORS.items() if operator.compiled]
    costs = bench_operators(plain, SHAPES, device=device, dtype=dtype, seconds=0.05)
    costs += bench_operators(compiled, COMPILED_SHAPES, device=device, dtype=dtype, seconds=0.05)
    costs.sort(key=lambda cost: (SHAPES.index(cost.shape), list(OPERATORS).index(cost.operator)))
    found = to_json(costs, device=device, dtype=dtype, channels_last=True)
    Path(output).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
