"""How sure a mean is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["CONFIDENCE", "confidence_interval"]

CONFIDENCE = 0.95


def confidence_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean's 95% confidence interval after Student; unknown for a single value.

    Example:
        >>> low, high = confidence_interval([1.0, 2.0, 3.0])
        >>> round(low, 3), round(high, 3)
        (-0.484, 4.484)
    """
    if len(values) < 2:
        return None, None
    from scipy import stats

    mean = statistics.mean(values)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return mean - float(half), mean + float(half)
