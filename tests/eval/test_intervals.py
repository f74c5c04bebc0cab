"""Intervals of a ratio over documents: against closed forms, and as often right as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.intervals import (
    IntervalUndefined,
    RatioBootstrap,
    bits_per_byte_intervals,
    bits_per_byte_strata,
    holm,
    interval_values,
)
from eval.likelihood import Likelihood


def sample(generator: np.random.Generator, documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits and bytes of documents of unequal size, with 2 bits a byte in the whole population."""
    x_M = np.ceil(np.exp(generator.normal(8, 0.5, documents)))
    return x_M * (2 + 0.4 * generator.standard_normal(documents)), x_M


def test_equal_sizes_give_the_standard_error_of_a_mean() -> None:
    y_M = np.array([1.0, 2.0, 4.0, 5.0, 9.0, 3.0])
    bootstrap = RatioBootstrap({"a": (y_M * 7, np.full(6, 7.0))})
    assert bootstrap.estimate == pytest.approx(4.0)
    assert bootstrap.standard_error == pytest.approx(y_M.std(ddof=1) / math.sqrt(6))
    assert bootstrap.degrees_of_freedom == pytest.approx(5)
    # The bootstrap's own spread is that of the sample without the correction for its size.
    assert bootstrap.draws_N.std() == pytest.approx(y_M.std() / math.sqrt(6), rel=0.03)


def test_large_documents_count_by_their_size() -> None:
    y_M, x_M = np.array([10.0, 10, 10, 10, 900]), np.array([10.0, 10, 10, 10, 300])
    assert RatioBootstrap({"a": (y_M, x_M)}).estimate == pytest.approx(940 / 340)  # not the mean of ratios, 1.4


def test_resampling_and_linearisation_agree_for_many_documents() -> None:
    bootstrap = RatioBootstrap({"a": sample(np.random.default_rng(0), 400)})
    assert bootstrap.draws_N.std() == pytest.approx(bootstrap.standard_error, rel=0.03)
    low, high = bootstrap.interval()
    assert (high - low) / 2 == pytest.approx(1.96 * bootstrap.standard_error, rel=0.05)


@pytest.mark.parametrize("documents", [5, 12, 40])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(documents: int) -> None:
    generator = np.random.default_rng(documents)
    hits = 0
    for _ in range(400):
        low, high = RatioBootstrap({"a": sample(generator, documents)}, draws=1000).interval()
        hits += low <= 2 <= high
    assert 0.89 <= hits / 400 <= 0.985  # three standard errors of 400 draws are 0.03


def test_domains_keep_their_share_when_documents_are_resampled() -> None:
    """What separates two domains does not widen the interval of both together."""
    inside = {"a": (np.array([1.0, 1, 1, 1]), np.ones(4)), "b": (np.array([9.0, 9, 9]), np.ones(3))}
    bootstrap = RatioBootstrap(inside)
    assert bootstrap.standard_error == pytest.approx(0, abs=1e-12)
    assert bootstrap.interval() == (pytest.approx(31 / 7), pytest.approx(31 / 7))


def test_a_domain_of_one_document_joins_the_smallest_other_one() -> None:
    parts = {"a": (np.arange(6.0), np.ones(6)), "b": (np.arange(3.0), np.ones(3)), "one": (np.array([7.0]), np.ones(1))}
    joined = {"a": parts["a"], "b and one": (np.array([0.0, 1, 2, 7]), np.ones(4))}
    assert RatioBootstrap(parts).standard_error == pytest.approx(RatioBootstrap(joined).standard_error)


def test_seeds_repeat_and_differ() -> None:
    strata = {"a": sample(np.random.default_rng(1), 9)}
    assert RatioBootstrap(strata, 3).interval() == RatioBootstrap(strata, 3).interval()
    assert RatioBootstrap(strata, 3).interval() != RatioBootstrap(strata, 4).interval()


@pytest.mark.parametrize(
    "y, x, reason",
    [
        ([1.0], [1.0], "1 document; an interval needs 5"),
        ([1.0] * 4, [1.0] * 4, "4 documents"),
        ([1.0] * 6, [0.0] * 6, "no bytes of text"),
        ([1.0] * 5 + [math.inf], [1.0] * 6, "probability 0"),
    ],
)
def test_without_an_interval_there_is_a_reason(y: list[float], x: list[float], reason: str) -> None:
    strata = {"a": (np.array(y), np.array(x))}
    with pytest.raises(IntervalUndefined, match=reason):
        RatioBootstrap(strata)
    values = interval_values(strata)
    assert values["half_width"] is None and reason in values["reason"]


def test_bits_per_byte_of_documents_adds_up() -> None:
    documents = {"a": {n: Likelihood(math.log(2) * n * 3, 5, n) for n in range(1, 8)}, "b": {0: Likelihood(1, 1, 1)}}
    assert bits_per_byte_strata(documents)["a"][0] == pytest.approx(3 * np.arange(1, 8))
    intervals = bits_per_byte_intervals(documents)
    assert intervals["domains"]["a"]["low"] == pytest.approx(3)
    assert intervals["domains"]["b"]["reason"] and intervals["total"]["documents"] == 8


def test_one_sided_p_values() -> None:
    y_M = np.array([0.2, 0.1, 0.3, 0.25, 0.15])
    bootstrap = RatioBootstrap({"a": (y_M, np.ones(5))})
    assert bootstrap.p_value_above(0.2) == pytest.approx(0.5)
    from scipy import stats

    assert bootstrap.p_value_above(0) == pytest.approx(stats.ttest_1samp(y_M, 0, alternative="greater").pvalue)


def test_holm_rejects_step_by_step() -> None:
    assert holm({"a": 0.01, "b": 0.03, "c": 0.04, "d": 0.005}, 0.05) == {"d", "a"}  # 0.03 is above 0.05 / 2
    assert holm({"a": 0.04, "b": 0.001}, 0.05) == {"a", "b"}  # Bonferroni would keep a
    assert holm({"a": 0.03, "b": 0.03}, 0.05) == set()
