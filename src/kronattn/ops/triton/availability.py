"""Whether Triton works on this machine. This file does not import Triton before it has to."""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch

from kronattn.ops.compat import assume_constant, without_modes

__all__ = ["broken_reason", "has_room", "interpreted"]

# Bytes of shared memory that the blocks were chosen for; an A100 has 163 KB for a block of threads, an H200 227.
_ROOM = 160 * 1024


def interpreted() -> bool:
    """Whether Triton runs kernels in Python, on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@assume_constant
def broken_reason() -> str | None:
    """Why Triton does not work here, found out once; None where it does."""
    return None if interpreted() else _tried()


@assume_constant
def has_room() -> bool:
    """Whether a block of threads has the shared memory that the kernels' blocks were chosen for."""
    return _room(torch.cuda.current_device())


@cache
def _room(device: int) -> bool:
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= _ROOM


@cache
def _tried() -> str | None:
    reason = _try()
    if reason is not None:
        warnings.warn(f"{reason}; the torch backend serves instead", RuntimeWarning, stacklevel=2)
    return reason


def _try() -> str | None:
    try:
        if torch.cuda.get_device_capability() < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
        from kronattn.ops.triton.blocks import probe

        # Fake tensors would make it fail, for good.
        with without_modes():
            probe()
    except Exception as error:  # whatever is wrong with a Triton installation, the torch backend works
        lines = str(error).splitlines() or [""]
        return f"Triton does not work here: {type(error).__name__}: {lines[0]}"
    return None
