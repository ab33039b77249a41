"""The matrix-variate normal with Kronecker-sum covariance, and Theorem 1 of the paper about it, checked.

>>> from kronattn.distributions import check_theorem, draw_samples, random_setting
>>> setting = random_setting(3, 4)
>>> checks = check_theorem(setting, draw_samples(setting, 5000), confidence=0.999)
>>> all(check.passed for check in checks)
True
"""

from kronattn.distributions.claims import Claims, Normal, Setting, paper_claims, random_setting
from kronattn.distributions.derivation import derived_claims
from kronattn.distributions.figure import draw_theorem
from kronattn.distributions.kronecker_sum_normal import KroneckerSumNormal
from kronattn.distributions.mean_figure import draw_means
from kronattn.distributions.samples import Samples, draw_samples
from kronattn.distributions.theorem import Check, check_theorem

__all__ = [
    "Check",
    "Claims",
    "KroneckerSumNormal",
    "Normal",
    "Samples",
    "Setting",
    "check_theorem",
    "derived_claims",
    "draw_means",
    "draw_samples",
    "draw_theorem",
    "paper_claims",
    "random_setting",
]
