"""Batches as large as fit: what does not fit into a GPU's memory is done in two halves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["in_parts"]


def in_parts(function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """``function(batch)``, of halves, quarters and so on where the whole does not fit; (N, ...) to (N, ...).

    Example:
        >>> in_parts(torch.sqrt, torch.tensor([4.0, 9.0]))
        tensor([2., 3.])
    """
    try:
        return function(batch)
    except torch.cuda.OutOfMemoryError:
        if len(batch) < 2:
            raise
    # Outside of the handler: the error holds on to the tensors of the attempt.
    torch.cuda.empty_cache()
    return torch.cat([in_parts(function, half) for half in batch.chunk(2)])
