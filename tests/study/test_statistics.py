"""Paired differences and Holm's correction, against scipy and against counts by hand."""

import numpy as np
import pytest
from scipy import stats

from kronattn.study.statistics import holm, paired_difference


@pytest.mark.parametrize("pairs", [2, 5, 12])
def test_the_paired_test_is_that_of_scipy(pairs):
    a, b = np.random.default_rng(pairs).normal(size=(2, pairs))
    found, expected = paired_difference(a.tolist(), b.tolist()), stats.ttest_rel(a, b)
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert (found.mean, found.pairs) == (pytest.approx((a - b).mean()), pairs)
    assert found.excludes_zero == (expected.pvalue < 0.05)


def test_a_single_pair_says_nothing():
    found = paired_difference([0.9], [0.1])
    assert (found.low, found.high, found.p, found.excludes_zero) == (None, None, None, False)


@pytest.mark.parametrize(("shift", "p"), [(0.0, 1.0), (0.5, 0.0)])
def test_equal_differences(shift, p):
    found = paired_difference([1 + shift, 2 + shift, 4 + shift], [1.0, 2.0, 4.0])
    assert found.p == p
    assert found.excludes_zero == (shift != 0)


def test_unequal_lengths():
    with pytest.raises(ValueError, match="as many scores on both sides, at least one, not 2 and 1"):
        paired_difference([1.0, 2.0], [1.0])


def test_holm_by_hand():
    assert holm([0.001, 0.02, 0.03, 0.5]) == pytest.approx([0.004, 0.06, 0.06, 0.5])
    assert holm([0.5, 0.001]) == pytest.approx([0.5, 0.002])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([None, 0.04]) == [None, 0.04]
    assert holm([]) == []


def test_holm_keeps_false_alarms_rare():
    """Twenty true null hypotheses: at most one study in twenty may claim anything, with room for chance."""
    generator = np.random.default_rng(0)
    claims = sum(min(holm(generator.uniform(size=20).tolist())) < 0.05 for _ in range(2000))
    # The expected 4.9% of 2,000, plus four standard deviations.
    assert claims < 98 + 4 * 9.7
