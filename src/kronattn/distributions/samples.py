"""Samples of everything that Theorem 1 talks about, made from samples of X and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronattn.distributions.claims import Setting, seeded
from kronattn.distributions.kronecker_sum_normal import KroneckerSumNormal

__all__ = ["Samples", "draw_samples"]

# A block of this many numbers, 16 MiB, is drawn at a time.
_BLOCK = 2**21
# Four arrays of this many numbers are kept: 1.6 GB at most.
_MAX_NUMBERS = 50_000_000
# Beyond one per entry, so that the tests' scatter matrices are far from singular.
_SPARE = 1000
# The setting is drawn from the seed itself; the samples are not to repeat its numbers.
_STREAM = 0x1E3779B97F4A7C15


@dataclass(frozen=True)
class Samples:
    """n samples of X with general factors, and of [r₁ … r_h]ᵀ and [c₁ … c_w] with diagonal ones: (n, h, w) each.

    >>> from kronattn.distributions import draw_samples, random_setting
    >>> draw_samples(random_setting(2, 3), 2000).tilde.shape
    torch.Size([2000, 2, 3])
    """

    model: Tensor
    stacked_rows: Tensor
    stacked_columns: Tensor

    @property
    def tilde(self) -> Tensor:
        """X̃ = [r₁ … r_h]ᵀ + [c₁ … c_w]: (n, h, w)."""
        return self.stacked_rows + self.stacked_columns

    @property
    def count(self) -> int:
        """The number of samples, n."""
        return self.model.shape[0]


def draw_samples(
    setting: Setting,
    count: int = 20_000,
    *,
    seed: int = 0,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> Samples:
    """Draw ``count`` samples; every rᵢ and cⱼ is the average of an X of its own, as the theorem assumes.

    ``track`` may wrap the loop over blocks, in a progress bar for instance. torch's own random state is left as
    it was.

    >>> from kronattn.distributions import random_setting
    >>> draw_samples(random_setting(2, 3), 2000, seed=1).model.shape
    torch.Size([2000, 2, 3])
    """
    height, width = setting.height, setting.width
    least, most = height * width + _SPARE, _MAX_NUMBERS // (height * width)
    if not least <= count <= most:
        raise ValueError(f"samples must be from {least} to {most} for {height}x{width} matrices, got {count}")
    general, diagonal = (KroneckerSumNormal(s.mu, s.upsilon, s.omega, s.psi) for s in (setting, setting.diagonal()))
    block = max(1, _BLOCK // (height * width * (height + width)))
    model, rows, columns = (setting.mu.new_empty(count, height, width) for _ in range(3))
    start = seeded((seeded(seed).initial_seed() + _STREAM) % 2**63).initial_seed()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(start)
        for first in track(range(0, count, block)):
            last = min(first + block, count)
            size = last - first
            model[first:last] = general.sample((size,))
            rows[first:last] = diagonal.sample((size, height)).mean(-2)
            columns[first:last] = diagonal.sample((size, width)).mean(-1).mT
    return Samples(model, rows, columns)
