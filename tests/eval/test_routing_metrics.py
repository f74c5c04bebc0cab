"""Each metric against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval import routing_metrics as metrics


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


def test_the_information_of_nothing_is_nan() -> None:
    assert math.isnan(metrics.mutual_information(np.zeros((2, 3))))
