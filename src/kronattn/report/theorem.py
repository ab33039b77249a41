"""The report's section on Theorem 1 and the equations before it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kronattn.distributions import Check, check_theorem, draw_samples, draw_theorem, random_setting
from kronattn.report.section import Content, Drawing, Highlight, Settings
from kronattn.tables.rendering import Cell, Column, Group, Table

__all__ = ["build", "theorem_table"]

_CONFIDENCE = 0.999
_INTRODUCTION = (
    "The paper models a feature map X as matrix-variate normal with a Kronecker-sum covariance and shows that the "
    "averages of its rows and columns, spread out again as X̃, keep its mean structure with a fraction of its "
    "variance. Each statement is checked: exactly, against dense linear algebra, where that is possible, and on "
    "samples."
)


def build(settings: Settings) -> Content:
    """Check the theorem at one random setting and return the table of checks and the figure."""
    height, width, count = (3, 4, 2_000) if settings.quick else (5, 7, 20_000)
    setting = random_setting(height, width)
    samples = draw_samples(setting, count, track=lambda blocks: settings.track(blocks, "Sampling"))
    checks = check_theorem(setting, samples, confidence=_CONFIDENCE)
    passed = sum(check.passed for check in checks)
    drawing = Drawing(
        draw_theorem(setting, samples),
        f"What the paper says beside what {count:,} samples of {height}×{width} feature maps say.",
        "Covariances and variances according to the paper and to samples, and how well the two fit.",
    )
    return Content(
        _INTRODUCTION,
        [theorem_table(checks, count)],
        [drawing],
        [Highlight(f"{passed} of {len(checks)}", "checks of Theorem 1 and its equations pass")],
        passed=passed == len(checks),
    )


def theorem_table(checks: Sequence[Check], samples: int) -> Table:
    """Return the checks as a table, grouped by the paper's equations.

    >>> check = Check("mean of X", "Eq. 3", "exact", "largest relative difference", 3e-16, 1e-12)
    >>> theorem_table([check], 20_000).groups[0].title
    'Eq. 3'
    """
    columns = [
        Column("Check", numeric=False),
        Column("How", numeric=False),
        Column("What is measured", numeric=False),
        Column("Measured"),
        Column("Bound"),
        Column("", numeric=False),
    ]
    groups = [
        Group(equation, [_cells(check) for check in group])
        for equation, group in groupby(checks, key=lambda check: check.equation)
    ]
    passed = sum(check.passed for check in checks)
    note = (
        f"exact: float64 against dense linear algebra. sampled: {samples:,} samples; if the theorem is true, all "
        f"of these stay within their bounds together with a probability of {_CONFIDENCE}."
    )
    return Table(f"Theorem 1: {passed} of {len(checks)} checks pass", columns, groups, [note])


def _cells(check: Check) -> list[Cell]:
    return [
        Cell(check.name),
        Cell(check.kind),
        Cell(check.statistic),
        Cell(_number(check.measured)),
        Cell(_number(check.bound)),
        Cell("✓", tone="good") if check.passed else Cell("✗", tone="bad"),
    ]


def _number(value: float) -> str:
    return f"{value:.1e}" if value != 0 and abs(value) < 1e-3 else f"{value:.4g}"
