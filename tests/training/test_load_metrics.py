"""Each metric against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from training import load_metrics as metrics


def test_max_violation() -> None:
    assert metrics.max_violation([5, 5, 5]) == 0
    assert metrics.max_violation([9, 0, 0]) == pytest.approx(2)  # E - 1
    assert metrics.max_violation([7, 7, 0, 0, 0, 0]) == pytest.approx(6 / 2 - 1)  # E/k - 1
    assert metrics.max_violation([1, 2, 3]) == pytest.approx(0.5)


def test_batches_violate_more_than_their_sum() -> None:
    counts_XE = [[4, 0], [0, 4], [3, 1]]
    assert metrics.batch_max_violation(counts_XE) == pytest.approx((1 + 1 + 0.5) / 3)
    assert metrics.global_max_violation(counts_XE) == pytest.approx(7 / 6 - 1)


def test_coefficient_of_variation() -> None:
    assert metrics.coefficient_of_variation([3, 3, 3]) == 0
    assert metrics.coefficient_of_variation([0, 0, 6, 0, 0]) == pytest.approx(2)  # sqrt(E - 1)
    assert metrics.coefficient_of_variation([1, 3]) == pytest.approx(0.5)


def test_load_entropy() -> None:
    assert metrics.load_entropy([2, 2, 2]) == pytest.approx(1)
    assert metrics.load_entropy([0, 8, 0]) == 0
    assert metrics.load_entropy([1, 1, 2, 0]) == pytest.approx(1.5 * math.log(2) / math.log(4))
    assert metrics.load_entropy([4]) == 0


def test_fan_out() -> None:
    assigned_TE = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=bool)
    histogram = metrics.fan_out_histogram(assigned_TE)
    assert histogram.tolist() == [2, 0, 1, 1]
    assert metrics.fan_out_mean(histogram) == pytest.approx(5 / 4)
    assert metrics.zero_expert_fraction(histogram) == pytest.approx(0.5)
    # The last token is padding.
    assert metrics.fan_out_histogram(assigned_TE, [True, True, True, False]).tolist() == [1, 0, 1, 1]


def test_independent_experts_leave_a_tenth_of_tokens_without_one() -> None:
    shares = metrics.binomial_fan_out(8, 2)
    assert shares[0] == pytest.approx(0.75**8)
    assert shares.sum() == pytest.approx(1)
    assert metrics.fan_out_mean(shares) == pytest.approx(2)


def test_ratios_of_nothing_are_nan() -> None:
    nothing = np.zeros(4)
    for function in (
        metrics.max_violation,
        metrics.coefficient_of_variation,
        metrics.load_entropy,
        metrics.fan_out_mean,
        metrics.zero_expert_fraction,
    ):
        assert math.isnan(function(nothing))
