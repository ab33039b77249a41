"""Random cases for the operators: shapes, dtypes, memory layouts, modes, heads, and how far off is too far."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _device

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Largest error over the largest entry of the float64 reference. Half precision: a few roundings of the result
# and of the averaged keys, whose error the softmax multiplies by the size of the coefficients.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}

# Whether tests run with --hypothesis-profile=large.
LARGE = settings.default.max_examples > 100

LAYOUTS = ("contiguous", "channels_last", "transposed", "sliced", "expanded")


@dataclass(frozen=True)
class Case:
    """One call of an operator: everything needed to make its input again."""

    grid: tuple[int, ...]
    key_grid: tuple[int, ...] | None
    batch: int
    heads: int
    head_channels: int
    value_channels: int | None
    mode: str
    scale: float
    layout: str
    seed: int

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """query, and key and value where they are given, in this case's memory layout."""
        generator = torch.Generator().manual_seed(self.seed)
        channels = self.heads * self.head_channels
        shapes = [(self.batch, channels, *self.grid)]
        if self.key_grid is not None:
            shapes.append((self.batch, channels, *self.key_grid))
            if self.value_channels is not None:
                shapes.append((self.batch, self.heads * self.value_channels, *self.key_grid))

        return [
            lay_out(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype), self.layout)
            for shape in shapes
        ]


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout."""
    if layout == "channels_last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        room = x.new_empty(*x.shape[:-1], 2 * x.shape[-1] + 1)
        room[..., 1::2] = x
        return room[..., 1::2]
    if layout == "expanded" and x.shape[0] > 1:
        return x[:1].expand(x.shape)
    return x.contiguous()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = st.sampled_from((1, 2, 3, 4, 5, 7, 9, 13))
    axes = draw(st.sampled_from((1, 2, 2, 2, 3, 4)))
    limit = {1: 13, 2: 13, 3: 7, 4: 4}[axes]
    grid = tuple(min(draw(sizes), limit) for _ in range(axes))
    key_axes = draw(st.sampled_from((None, None, 1, 2, 3)))
    key_grid = None if key_axes is None else tuple(min(draw(sizes), 7) for _ in range(key_axes))
    return Case(
        grid=grid,
        key_grid=key_grid,
        batch=draw(st.sampled_from((0, 1, 2, 3))),
        heads=draw(st.sampled_from((1, 1, 2, 3))),
        head_channels=draw(st.sampled_from((1, 2, 5, 8))),
        value_channels=draw(st.sampled_from((None, 1, 3, 4))),
        mode=draw(st.sampled_from(("kv", "qkv"))),
        scale=draw(st.sampled_from((1.0, 0.35, -1.5, 2.0))),
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 2**31)),
    )


def random_cases(few: int) -> settings:
    """Settings for so many cases, or for all of those of ``--hypothesis-profile=large``."""
    count = max(few, settings.default.max_examples) if LARGE else few
    return settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def relative_error(actual: Tensor, expected: Tensor, floor: float = 1e-30) -> float:
    """Largest difference over the largest expected entry (at least ``floor``); NaN is an infinite error."""
    assert actual.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    error = (difference / expected.double().abs().max().clamp_min(floor)).item()
    return float("inf") if error != error else error


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every torch.empty and torch.empty_strided come full of NaN, so that what a kernel leaves out shows."""
    # PyTorch notes once which functions make tensors, for torch.device as a context: these are not to be noted.
    _device._device_constructors()
    for name in ("empty", "empty_strided"):
        real = getattr(torch, name)

        def poisoned(*args, real=real, **kwargs):
            x = real(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() and not torch.compiler.is_compiling() else x

        monkeypatch.setattr(torch, name, poisoned)
