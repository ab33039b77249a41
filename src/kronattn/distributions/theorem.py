"""Theorem 1 of the paper and each equation before it, checked: exactly where possible, by sampling where not.

Equations have the paper's numbers. Eq. 1 is the attention operator; the model of X is Eq. 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from kronattn.distributions import statistics
from kronattn.distributions.claims import Claims, Normal, Setting, paper_claims
from kronattn.distributions.derivation import derived_claims
from kronattn.distributions.kronecker_sum_normal import KroneckerSumNormal
from kronattn.distributions.samples import Samples

__all__ = ["Check", "check_theorem"]

# Sums and products of a few thousand float64 numbers of like size are good to about 1e-14 of the largest.
EXACT_BOUND = 1e-12
_DENSITIES = 100


@dataclass(frozen=True)
class Check:
    """One statement, what was measured of it, and the bound up to which it counts as true.

    >>> Check("mean of X", "Eq. 3", "exact", "relative error", 3e-16, 1e-12).passed
    True
    """

    name: str
    equation: str
    kind: str  # "exact" or "sampled"
    statistic: str  # "relative error", "χ² 35 df", or "KS" for the Kolmogorov–Smirnov distance
    measured: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the measurement is within its bound; NaN is not."""
        return self.measured <= self.bound


def check_theorem(
    setting: Setting, samples: Samples, *, confidence: float = 0.999, claims: Claims | None = None
) -> list[Check]:
    """Check Theorem 1 and the equations that lead to it at one setting, and return one result for each statement.

    Exact checks compare the paper's closed forms with dense linear algebra in float64. Sampled ones test
    ``samples`` against the paper's distributions; if all statements are true, then all sampled checks pass
    together with a probability of at least ``confidence`` (Bonferroni). ``claims`` replaces the paper's formulas,
    which is how to see that a wrong one is found.

    >>> from kronattn.distributions import draw_samples, random_setting
    >>> setting = random_setting(3, 4)
    >>> all(check.passed for check in check_theorem(setting, draw_samples(setting, 5000)))
    True
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, both excluded, got {confidence}")
    claims = paper_claims(setting) if claims is None else claims
    sampled = list(_sampled(samples, claims))
    alpha = (1 - confidence) / len(sampled)
    checks = [*_exact(setting, samples, claims), *(test(alpha) for test in sampled)]
    # In the paper's order; sorting is stable, so an equation's exact checks come before its sampled ones.
    return sorted(checks, key=lambda check: _ORDER.index(check.equation))


_ORDER = (
    "Eq. 2",
    "Eq. 3",
    "Sec. 3.2",
    "Eq. 4",
    "Eq. 5",
    "Eq. 8",
    "Eq. 9",
    "Eqs. 6, 10",
    "Eq. 11",
    "Eqs. 7, 12",
    "after Eq. 7",
    "Eq. 13",
)


def _exact(setting: Setting, samples: Samples, claims: Claims) -> Iterable[Check]:
    derived = derived_claims(setting)

    def check(name: str, equation: str, *pairs: tuple[Tensor | float, Tensor | float]) -> Check:
        difference = max(_relative_difference(*pair) for pair in pairs)
        return Check(name, equation, "exact", "relative error", difference, EXACT_BOUND)

    def both(name: str, equation: str, claimed: Iterable[Normal], dense: Iterable[Normal]) -> Check:
        pairs = list(zip(claimed, dense, strict=True))
        return check(
            name,
            equation,
            *((one.mean, other.mean) for one, other in pairs),
            *((one.covariance, other.covariance) for one, other in pairs),
        )

    yield check("covariance of X: Ω ⊕ Ψ", "Eq. 2", (claims.model.covariance, derived.model.covariance))
    yield check("density of X from the factors", "Eq. 2", _log_densities(setting, samples, claims))
    yield check("mean of X: outer sum of μ, υ", "Eq. 3", (claims.model.mean, derived.model.mean))
    yield both("each row", "Sec. 3.2", claims.rows, derived.rows)
    yield both("each column", "Sec. 3.2", claims.columns, derived.columns)
    yield both("row average", "Eq. 4", [claims.row_average], [derived.row_average])
    yield both("column average", "Eq. 5", [claims.column_average], [derived.column_average])
    yield both("[r₁ … r_h]ᵀ", "Eq. 8", [claims.stacked_rows], [derived.stacked_rows])
    yield both("[c₁ … c_w]", "Eq. 9", [claims.stacked_columns], [derived.stacked_columns])
    yield check("mean of X̃", "Eqs. 6, 10", (claims.tilde.mean, derived.tilde.mean))
    yield check("covariance of X̃", "Eqs. 6, 10", (claims.tilde.covariance, derived.tilde.covariance))
    yield check("trace for X, h = w", "Eq. 11", (claims.square_trace, derived.square_trace))
    yield check(
        "trace for X̃: 2/h of it, h = w",
        "Eqs. 7, 12",
        (claims.square_trace_ratio, derived.square_trace_ratio),
    )
    yield check("trace for X̃, any h and w", "after Eq. 7", (claims.trace_ratio, derived.trace_ratio))
    yield check("mean of X̃ if μ̄ + ῡ = 0", "Eq. 13", (claims.normalised_mean, derived.normalised_mean))


def _sampled(samples: Samples, claims: Claims) -> Iterable[Callable[[float], Check]]:
    """Yield one test for each sampled statement, to be called with its share of the risk of a false alarm."""
    rows, columns = samples.stacked_rows, samples.stacked_columns
    yield partial(_test_covariance, "covariance of X", "Eq. 2", samples.model, claims.model)
    yield partial(_test_shape, "X is normal", "Eq. 2", [samples.model], [claims.model])
    yield partial(_test_mean, "mean of X", "Eq. 3", samples.model, claims.model)
    yield partial(_test_shape, "each row is normal", "Sec. 3.2", samples.model.unbind(1), claims.rows)
    yield partial(_test_shape, "each column is normal", "Sec. 3.2", samples.model.unbind(2), claims.columns)
    yield partial(_test_mean, "mean of the row average", "Eq. 4", rows[:, 0], claims.row_average)
    yield partial(_test_covariance, "covariance of the row average", "Eq. 4", rows[:, 0], claims.row_average)
    yield partial(_test_mean, "mean of the column average", "Eq. 5", columns[..., 0], claims.column_average)
    yield partial(_test_covariance, "covariance of the column average", "Eq. 5", columns[..., 0], claims.column_average)
    yield partial(_test_mean, "mean of [r₁ … r_h]ᵀ", "Eq. 8", rows, claims.stacked_rows)
    yield partial(_test_covariance, "covariance of [r₁ … r_h]ᵀ", "Eq. 8", rows, claims.stacked_rows)
    yield partial(_test_mean, "mean of [c₁ … c_w]", "Eq. 9", columns, claims.stacked_columns)
    yield partial(_test_covariance, "covariance of [c₁ … c_w]", "Eq. 9", columns, claims.stacked_columns)
    tilde = samples.tilde
    yield partial(_test_mean, "mean of X̃", "Eqs. 6, 10", tilde, claims.tilde)
    yield partial(_test_covariance, "covariance of X̃", "Eqs. 6, 10", tilde, claims.tilde)
    yield partial(_test_shape, "X̃ is normal", "Eqs. 6, 10", [tilde], [claims.tilde])


def _test_mean(name: str, equation: str, sample: Tensor, claim: Normal, alpha: float) -> Check:
    measured = statistics.mean_statistic(_whiten(sample, claim))
    bound = statistics.chi2_quantile(claim.size, alpha)
    return Check(name, equation, "sampled", f"χ² {claim.size} df", measured, bound)


def _test_covariance(name: str, equation: str, sample: Tensor, claim: Normal, alpha: float) -> Check:
    freedom = claim.size * (claim.size + 1) // 2
    measured = statistics.covariance_statistic(_whiten(sample, claim))
    bound = statistics.chi2_quantile(freedom, alpha)
    return Check(name, equation, "sampled", f"χ² {freedom} df", measured, bound)


def _test_shape(name: str, equation: str, samples: Iterable[Tensor], claims: Iterable[Normal], alpha: float) -> Check:
    pairs = list(zip(samples, claims, strict=True))
    measured = max(statistics.shape_statistic(_whiten(sample, claim)) for sample, claim in pairs)
    bound = statistics.shape_bound(pairs[0][0].shape[0], alpha / len(pairs))
    return Check(name, equation, "sampled", "KS", measured, bound)


def _whiten(sample: Tensor, claim: Normal) -> Tensor:
    return statistics.whiten(sample.flatten(1), claim.mean, claim.covariance)


def _relative_difference(one: Tensor | float, other: Tensor | float) -> float:
    first, second = (torch.as_tensor(x, dtype=torch.float64) for x in (one, other))
    scale = float(second.abs().max())
    difference = float((first - second).abs().max())
    return difference / scale if scale > 0 and math.isfinite(scale) else difference


def _log_densities(setting: Setting, samples: Samples, claims: Claims) -> tuple[Tensor, Tensor]:
    x = samples.model[:_DENSITIES]
    dense = MultivariateNormal(claims.model.mean, claims.model.covariance)
    structured = KroneckerSumNormal(setting.mu, setting.upsilon, setting.omega, setting.psi)
    return structured.log_prob(x), dense.log_prob(x.flatten(1))
