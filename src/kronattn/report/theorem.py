"""The report's section on Theorem 1 and the equations before it."""

from __future__ import annotations

from kronattn.distributions import check_theorem, draw_means, draw_samples, draw_theorem, random_setting
from kronattn.report.section import Content, Drawing, Highlight, Settings
from kronattn.tables.theorem import theorem_table

__all__ = ["build"]

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
    means = Drawing(
        draw_means(setting, count),
        "The mean of X̃ is that of X under the theorem's normalisation (lower row). Without it (upper row) the mean is "
        "counted twice; kronattn's layers count it once, which agrees in both.",
        "Means of X and of X̃ with and without the normalisation, and entries of X̃ against those of X.",
    )
    return Content(
        _INTRODUCTION,
        [theorem_table(checks, confidence=_CONFIDENCE, samples=count)],
        [drawing, means],
        [Highlight(f"{passed} of {len(checks)}", "checks of Theorem 1 and its equations pass")],
        passed=passed == len(checks),
    )
