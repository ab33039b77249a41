"""Fused kernels for Kronecker attention, in Triton: forward and backward, for one axis to four.

Nothing here imports Triton before it is needed: the rest of the library works without it. :mod:`.rules` says where
the kernels can run and where they are worth it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kronattn.ops.triton.rules import refuses, worth_it

__all__ = [
    "attend_averages",
    "attention",
    "attention_layer",
    "attention_layer_built",
    "axis_averages",
    "kronecker_attention",
    "refuses",
    "worth_it",
]


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """Regular attention through the kernel that attends to a list of keys; shapes as in :func:`kronattn.attention`."""
    from kronattn.ops.triton.operators import attend_positions

    query, key, value = args
    keys = key.flatten(2)
    return attend_positions(query, keys, keys if value is key else value.flatten(2), **kwargs)


def kronecker_attention(*args: Any, **kwargs: Any) -> Tensor:
    """KAO_KV and KAO_QKV; shapes as in :func:`kronattn.kronecker_attention`."""
    from kronattn.ops.triton.operators import kronecker_attention

    return kronecker_attention(*args, **kwargs)


def axis_averages(x: Tensor) -> Tensor:
    """Averages of (N, C, *grid) over all axes but one, the last axis first: (N, C, sum(grid)) in float32."""
    from kronattn.ops.triton.operators import axis_averages

    return axis_averages(x)


def attend_averages(*args: Any, **kwargs: Any) -> Tensor:
    """The second half of Kronecker attention, as :func:`kronattn.ops.plain.attend_averages`."""
    from kronattn.ops.triton.operators import attend_averages

    return attend_averages(*args, **kwargs)


def attention_layer(*args: Any, **kwargs: Any) -> Tensor | None:
    """All of a self-attention layer at once; None where the kernels cannot do that."""
    from kronattn.ops.triton.layer import attention_layer

    return attention_layer(*args, **kwargs)


def attention_layer_built(*args: Any, **kwargs: Any) -> Tensor | None:
    """The same for a layer too wide for that, with its coefficients built."""
    from kronattn.ops.triton.built_layer import self_attention

    return self_attention(*args, **kwargs)
