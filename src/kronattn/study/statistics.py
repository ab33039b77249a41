"""What pairs of scores say: the mean difference, its 95% interval, its p-value, and Holm's correction for many."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kronattn.training.intervals import confidence_interval

__all__ = ["Difference", "holm", "paired_difference"]

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Difference:
    """Of paired scores: ``low`` and ``high`` bound the mean's 95% interval (Student's), ``p`` is two-sided; all three
    are unknown with a single pair."""

    mean: float
    low: float | None
    high: float | None
    p: float | None
    pairs: int

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def paired_difference(scores: Sequence[float], others: Sequence[float]) -> Difference:
    """The paired t-test of ``scores`` minus ``others``, pair by pair.

    Example:
        >>> found = paired_difference([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
        >>> found.mean, round(found.low, 3), round(found.high, 3), round(found.p, 3)
        (2.0, -0.484, 4.484, 0.074)
    """
    if len(scores) != len(others) or not scores:
        raise ValueError(f"pairs need as many scores on both sides, at least one, not {len(scores)} and {len(others)}")
    differences = [score - other for score, other in zip(scores, others, strict=True)]
    mean = statistics.fmean(differences)
    low, high = confidence_interval(differences)
    return Difference(mean, low, high, _p_value(differences, mean), len(differences))


def _p_value(differences: Sequence[float], mean: float) -> float | None:
    if len(differences) < 2:
        return None
    from scipy import stats

    spread = statistics.stdev(differences)
    if spread == 0:
        return 1.0 if mean == 0 else 0.0
    t = abs(mean) / (spread / len(differences) ** 0.5)
    return float(2 * stats.t.sf(t, len(differences) - 1))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P-values adjusted for being several (Holm's step-down): each below 0.05 keeps the chance of any false one there.

    Unknown ones stay unknown and do not count.

    Example:
        >>> holm([0.01, 0.04, None, 0.03])
        [0.03, 0.06, None, 0.06]
    """
    known = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, at) in enumerate(known):
        # Never below that of a smaller one.
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[at] = largest
    return adjusted
