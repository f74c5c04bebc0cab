"""Intervals against scipy, and the correction for many comparisons against a hand calculation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from ablations.intervals import Interval, paired
from eval.intervals import corrected_p_values

A = {0: 2.31, 1: 2.36, 2: 2.28, 5: 2.40}
B = {0: 2.30, 1: 2.33, 2: 2.29, 5: 2.35, 7: 9.0}


def test_the_interval_of_a_mean_is_student_s() -> None:
    values = list(A.values())
    found = Interval.of(values)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (found.low, found.high, found.values) == (pytest.approx(low), pytest.approx(high), 4)


def test_a_paired_difference_is_scipy_s_paired_t_test_over_the_seeds_that_both_have() -> None:
    found = paired(A, B)
    assert found is not None
    test = stats.ttest_rel([A[s] for s in A], [B[s] for s in A])
    low, high = test.confidence_interval(0.95)
    assert found.p == pytest.approx(test.pvalue)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.mean == pytest.approx(0.02) and found.values == 4


def test_pairing_removes_what_the_seed_does_to_both() -> None:
    seeds = dict(enumerate([1.0, 5.0, 9.0]))
    found = paired({s: v + 0.1 + 0.001 * s for s, v in seeds.items()}, seeds)
    assert found is not None and not found.contains_zero
    assert Interval.of([v + 0.1 for v in seeds.values()]).high > 10  # alone, the arms are not told apart


def test_a_hand_calculated_interval() -> None:
    """1, 2, 3: mean 2, standard error 1/sqrt(3), t(0.975, 2) = 4.3027."""
    found = Interval.of([1.0, 2.0, 3.0])
    assert found.high - 2 == pytest.approx(4.30265 / 3**0.5, rel=1e-5)
    assert found.text(2) == "2.00 [-0.48, 4.48]" and found.contains_zero


def test_one_value_has_no_interval_and_excludes_nothing() -> None:
    found = Interval.of([1.5])
    assert (found.low, found.high, found.p, found.contains_zero) == (None, None, None, True)
    assert found.text(3, sign=True) == "+1.500"


def test_equal_values_have_no_width() -> None:
    assert Interval.of([0.0, 0.0]).p == 1.0
    assert Interval.of([0.5, 0.5]) == Interval(0.5, 0.5, 0.5, 2, 0.0)


def test_no_common_seed_is_no_difference() -> None:
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_holm_by_hand() -> None:
    """Sorted .01 .02 .03 .04 times 4 3 2 1, never falling, in the given order."""
    assert corrected_p_values([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert corrected_p_values([0.5, 0.9]) == [1.0, 1.0]


def test_a_comparison_that_could_not_be_made_still_counts() -> None:
    assert corrected_p_values([None, 0.02, None]) == [None, pytest.approx(0.06), None]
