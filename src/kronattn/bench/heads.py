"""What segmentation heads cost by themselves, beyond the features: at 321², 513² and 1025²."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kronattn.tables.segmentation import HEADS, Case, HeadCosts, draw_heads, measure_heads
from kronattn.tables.segmentation.measurement import WORKS
from kronattn.tables.segmentation.render import cost_rows_to_json, head_table

__all__ = ["HEADS", "SIZES", "WORKS", "Case", "draw_heads", "head_table", "measure_heads", "parse_sizes", "to_json"]

SIZES = (321, 513, 1025)


def parse_sizes(given: str) -> list[int]:
    """Sizes of images from "321,513".

    Example:
        >>> parse_sizes("321, 513")
        [321, 513]
    """
    try:
        sizes = [int(size) for size in given.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must be whole numbers from 1 up with commas between, like 321,513, not {given!r}")
    return sizes


def to_json(costs: HeadCosts, *, dtype: torch.dtype, channels_last: bool, sizes: Sequence[int]) -> dict[str, Any]:
    """The costs as one JSON object, with how they were measured."""
    settings = {
        "sizes": list(sizes),
        "dtype": str(dtype).removeprefix("torch."),
        "channels_last": channels_last,
    }
    return cost_rows_to_json(costs) | {"settings": settings}
