"""The tests of samples: right quantiles, right false-alarm rate, and power."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kronattn.distributions import statistics
from tests.distributions.oracle import spd


@given(freedom=st.integers(1, 20_000), exponent=st.floats(-12, -0.1))
def test_chi2_quantile_is_scipys(freedom, exponent):
    alpha = 10**exponent
    assert statistics.chi2_quantile(freedom, alpha) == pytest.approx(stats.chi2.isf(alpha, freedom), rel=1e-7)


def test_whitening_makes_independent_standard_normals():
    covariance = spd(4)
    sample = torch.linalg.cholesky(covariance).mT + 3  # rows are 3 + L e_i
    whitened = statistics.whiten(sample, torch.full((4,), 3.0, dtype=torch.float64), covariance)
    torch.testing.assert_close(whitened, torch.eye(4, dtype=torch.float64))


def test_shape_statistic_is_scipys():
    sample = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = stats.kstest(sample.square().sum(1).numpy(), stats.chi2(3).cdf).statistic
    assert statistics.shape_statistic(sample) == pytest.approx(expected, rel=1e-9)


def test_statistics_have_the_distribution_that_their_bounds_assume():
    """400 repetitions of each: compared with χ² by a Kolmogorov–Smirnov test that fails once in a million."""
    generator = torch.Generator().manual_seed(7)
    sets = [torch.randn(300, 5, generator=generator, dtype=torch.float64) for _ in range(400)]
    means = [statistics.mean_statistic(x) for x in sets]
    covariances = [statistics.covariance_statistic(x) for x in sets]
    scores = torch.cat([statistics.bartlett_scores(x) for x in sets])
    assert stats.kstest(means, stats.chi2(5).cdf).pvalue > 1e-6
    assert stats.kstest(covariances, stats.chi2(15).cdf).pvalue > 1e-6
    assert stats.kstest(scores.numpy(), stats.norm.cdf).pvalue > 1e-6
    # The same test does tell these apart from their neighbours.
    assert stats.kstest(means, stats.chi2(6).cdf).pvalue < 1e-6
    assert stats.kstest(covariances, stats.chi2(18).cdf).pvalue < 1e-6


def test_the_shape_bound_holds_as_often_as_it_says():
    generator = torch.Generator().manual_seed(7)
    exceeded = sum(
        statistics.shape_statistic(torch.randn(400, 3, generator=generator)) > statistics.shape_bound(400, 0.1)
        for _ in range(400)
    )
    # At most 10 % of 400, and five standard deviations more.
    assert exceeded <= 40 + 5 * math.sqrt(400 * 0.1 * 0.9)
    assert exceeded > 0


def test_the_covariance_statistic_does_not_blame_the_covariance_for_the_mean():
    sample = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert statistics.covariance_statistic(sample + 5) == pytest.approx(statistics.covariance_statistic(sample))
    assert statistics.mean_statistic(sample + 5) > statistics.chi2_quantile(3, 1e-9)
