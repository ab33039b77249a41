"""The checks of Theorem 1 for readers: as a table, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from kronattn.distributions import Check
from kronattn.present import Cell, Column, Table, tabulate

__all__ = ["theorem_table", "to_json"]


def theorem_table(checks: Sequence[Check], *, confidence: float, samples: int) -> Table:
    """Return the checks as a table, grouped by the paper's equations, a tick or a cross for each.

    >>> check = Check("mean of X", "Eq. 3", "exact", "relative error", 3e-16, 1e-12)
    >>> theorem_table([check], confidence=0.999, samples=20_000).groups[0].title
    'Eq. 3'
    """
    passed = sum(check.passed for check in checks)
    notes = [
        "exact: relative error against dense linear algebra in float64.",
        f"sampled: {samples:,} samples; true statements all pass together with a probability of {confidence:g} or "
        "more. χ²: squared distance from the claim; KS: gap between distribution functions.",
    ]
    columns: dict[str | Column, Callable[[Check], Cell | str]] = {
        "Check": lambda check: check.name,
        Column("How", numeric=False): lambda check: check.kind,
        Column("What is measured", numeric=False): lambda check: check.statistic,
        "Measured": lambda check: _number(check.measured),
        "Bound": lambda check: _number(check.bound),
        Column("", numeric=False): lambda check: Cell("✓", tone="good") if check.passed else Cell("✗", tone="bad"),
    }
    title = f"Theorem 1: {passed} of {len(checks)} checks pass"
    return tabulate(title, columns, checks, group=lambda check: check.equation, notes=notes)


def to_json(checks: Iterable[Check], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the checks as one JSON object.

    >>> check = Check("mean of X", "Eq. 3", "exact", "relative error", 3e-16, 1e-12)
    >>> to_json([check], {"seed": 0})["all_passed"]
    True
    """
    checks = list(checks)
    return {
        # JSON has no NaN and no infinity.
        "checks": [
            {**asdict(check), "measured": check.measured if math.isfinite(check.measured) else None}
            | {"passed": check.passed}
            for check in checks
        ],
        "all_passed": all(check.passed for check in checks),
        "settings": settings,
    }


def _number(value: float) -> str:
    return f"{value:.1e}" if value != 0 and abs(value) < 1e-3 else f"{value:.4g}"
