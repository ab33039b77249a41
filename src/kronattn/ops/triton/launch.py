"""Launching kernels: as Triton does, and from the second time on without asking it which compiled kernel to start.

``kernel[grid](...)`` looks at every argument to find the kernel that was compiled for its like. What it gives back is
that compiled kernel, and ``compiled[grid](...)`` starts it straight away: the way of Triton's own tutorial on fused
softmax. Sizes repeat from step to step, so the second call is found by its numbers as they are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

from torch import Tensor

from kronattn.ops.triton.availability import interpreted

__all__ = ["launch"]

_INTERPRETED = interpreted()
# Sizes that differ from call to call (a detector's images, say) must not fill the memory.
_MOST_KINDS = 8192
_starters: dict[Any, Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor, ...], numbers: tuple[float, ...], *constants: Any,
    **options: Any,
) -> None:  # fmt: skip
    """``kernel[grid](*tensors, *numbers, *constants, **options)``.

    Args:
        kernel: decorated by ``triton.jit``, with its parameters in this order.
        grid: one to three numbers of programs.
        tensors: on the current device.
        numbers: that the kernel takes as they come.
        constants: that it is compiled for.
        options: ``num_warps`` and the like.
    """
    if _INTERPRETED:
        kernel[grid](*tensors, *numbers, *constants, **options)
        return
    # Triton compiles anew for other dtypes, and for pointers that are not multiples of 16 bytes.
    kinds = [(x.dtype, x.data_ptr() % 16) for x in tensors]
    key = (id(kernel), tensors[0].get_device(), grid, *kinds, numbers, constants, *options.values())
    start = _starters.get(key)
    if start is not None:
        start(*tensors, *numbers, *constants)
        return
    if len(_starters) >= _MOST_KINDS:
        _starters.clear()
    _starters[key] = kernel[grid](*tensors, *numbers, *constants, **options)[(*grid, 1, 1)[:3]]
