"""The smallest kernel: whether Triton can compile and launch anything on this machine."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["probe"]


@triton.jit
def probe_kernel(x):
    tl.store(x, tl.load(x) + 1)


def probe() -> None:
    """Run it; raises whatever goes wrong."""
    x = torch.zeros(1, device="cuda")
    probe_kernel[(1,)](x)
    if x.item() != 1:
        raise RuntimeError("a kernel ran and gave a wrong result")
