"""Each metric against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval import routing_metrics as metrics


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


def test_domain_specialisation() -> None:
    share_ME = metrics.domain_specialisation([[10, 10], [30, 10], [0, 0]], [10, 20, 0])
    assert share_ME[:2].tolist() == [[1.0, 1.0], [1.5, 0.5]]  # rows sum to the fan-out of 2; the null is k/E = 1
    assert np.isnan(share_ME[2]).all()


def test_mutual_information() -> None:
    assert metrics.mutual_information([[5, 15], [10, 30]]) == pytest.approx(0)  # same shares
    assert metrics.mutual_information([[7, 0], [0, 7]]) == pytest.approx(1)  # the expert tells the domain
    assert metrics.mutual_information([[3, 0, 3, 0], [0, 3, 0, 3]]) == pytest.approx(1)  # at most log2 M
    # p = 3/8, 1/8, 1/8, 3/8: 1 - H(1/4).
    assert metrics.mutual_information([[3, 1], [1, 3]]) == pytest.approx(1 - (0.25 * 2 + 0.75 * math.log2(4 / 3)))


def test_bias_of_independent_counts() -> None:
    assert metrics.independent_bias(np.full((3, 5), 20)) == pytest.approx(2 * 4 / (2 * 300 * math.log(2)))
    assert metrics.independent_bias([[9, 1, 0]]) == 0  # one domain


def test_the_null_of_independent_tokens_is_the_known_bias() -> None:
    generator = np.random.default_rng(1)
    counts_RE = generator.multinomial(40, np.full(6, 1 / 6), size=60)
    domain_R = np.arange(60) % 3
    mean, limit = metrics.mutual_information_null(counts_RE, domain_R, 3, permutations=200)
    expected = metrics.independent_bias(metrics.sum_by_domain(counts_RE, domain_R, 3))
    assert mean == pytest.approx(expected, rel=0.15)
    assert limit > mean


def test_texts_that_differ_are_not_mistaken_for_domains_that_differ() -> None:
    # Each row uses one expert only, whatever its domain: a null that shuffled tokens would be far too small.
    generator = np.random.default_rng(2)
    counts_RE = 50 * np.eye(8, dtype=int)[generator.integers(0, 8, 24)]
    domain_R = np.arange(24) % 2
    found = metrics.mutual_information(metrics.sum_by_domain(counts_RE, domain_R, 2))
    mean, limit = metrics.mutual_information_null(counts_RE, domain_R, 2, permutations=200)
    assert found > 10 * metrics.independent_bias(metrics.sum_by_domain(counts_RE, domain_R, 2))
    assert found < limit
    assert mean > 0


def test_real_domains_exceed_the_null() -> None:
    counts_RE = np.array([[9, 1]] * 10 + [[1, 9]] * 10)
    domain_R = np.repeat([0, 1], 10)
    found = metrics.mutual_information(metrics.sum_by_domain(counts_RE, domain_R, 2))
    assert found > metrics.mutual_information_null(counts_RE, domain_R, 2)[1]


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
    assert math.isnan(metrics.mutual_information(np.zeros((2, 3))))
