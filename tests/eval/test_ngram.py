"""The baselines are proper distributions, fitted on exactly what was given."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from eval import ngram
from eval.ngram import Bigram, PairCounts, Unigram, fit, kneser_ney_discounts


def fitted(token: list[int], label: list[int], vocabulary_size: int) -> tuple[Unigram, Bigram]:
    return fit([(torch.tensor([token]), torch.tensor([label]))], vocabulary_size)


def test_a_unigram_adds_a_half_to_each_count() -> None:
    unigram, _ = fitted([2, 2, 2], [0, 0, 1], 3)
    assert unigram.probability_V == pytest.approx(np.array([2.5, 1.5, 0.5]) / 4.5)
    assert unigram.nats([[2]], [[1]])[0, 0] == pytest.approx(-math.log(1.5 / 4.5))


def test_a_bigram_worked_out_by_hand() -> None:
    # Pairs 0-1, 0-2, 1-2, once each: D(1) = 0.75, and of three distinct pairs one ends in 1 and two end in 2.
    _, bigram = fitted([0, 0, 1], [1, 2, 2], 3)
    continuation = np.array([0.5, 1.5, 2.5]) / 4.5
    assert bigram.probability(np.array([0]), np.array([1])) == pytest.approx(0.25 / 2 + 1.5 / 2 * continuation[1])
    assert bigram.probability(np.array([0]), np.array([0])) == pytest.approx(1.5 / 2 * continuation[0])
    # 2 was never a context: all the weight goes to the continuations.
    assert bigram.probability(np.full(3, 2), np.arange(3)) == pytest.approx(continuation)


def test_discounts_follow_the_counts_of_counts() -> None:
    # n1..n4 = 4, 2, 1, 1: Y = 4 / 8.
    assert kneser_ney_discounts(np.array([1, 1, 1, 1, 2, 2, 3, 4])) == pytest.approx((0.5, 1.25, 1.0))
    assert kneser_ney_discounts(np.array([5, 5])) == ngram.DEFAULT_DISCOUNTS
    # Estimates outside the possible: 1 - 2Y n2/n1 stays above 0, and no discount exceeds its count.
    low, _, high = kneser_ney_discounts(np.array([1] + [2] * 100 + [3] * 50 + [4] * 1))
    assert low >= ngram.SMALLEST_DISCOUNT and high <= 3


@pytest.mark.parametrize("tokens", [1, 7, 5000])
def test_probabilities_sum_to_one_in_every_context(tokens: int) -> None:
    size = 23
    generator = np.random.default_rng(tokens)
    # Zipf-like, so that counts of 1, 2, 3 and 4 all occur; the last ids never do.
    text = np.minimum(generator.zipf(1.6, tokens + 1), 19) - 1
    unigram, bigram = fit([(text[None, :-1], text[None, 1:])], size)
    assert unigram.probability_V.sum() == pytest.approx(1)
    everything = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    probability = bigram.probability(everything[0].ravel(), everything[1].ravel()).reshape(size, size)
    assert (probability > 0).all()
    assert probability.sum(1) == pytest.approx(np.ones(size))


def test_a_vocabulary_of_65536_needs_no_square_of_memory() -> None:
    size = 65_536
    generator = np.random.default_rng(0)
    text = generator.integers(0, size, 3001)
    _, bigram = fit([(text[None, :-1], text[None, 1:])], size)
    total = bigram.probability(np.full(size, text[5]), np.arange(size)).sum()
    assert total == pytest.approx(1)


def test_counting_in_pieces_is_counting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(0).integers(0, 13, (40, 9))
    at_once = PairCounts(13)
    at_once.add(text[:, :-1], text[:, 1:])
    monkeypatch.setattr(ngram, "PENDING_PAIRS", 17)
    pieces = PairCounts(13)
    for row in text:
        pieces.add(row[None, :-1], row[None, 1:])
    for found, expected in zip(pieces.pairs(), at_once.pairs(), strict=True):
        assert (found == expected).all()
    assert pieces.tokens == at_once.tokens == 320


def test_padding_is_neither_counted_nor_scored() -> None:
    with_padding = fitted([0, 1, 0, 0], [1, 2, -100, -100], 3)
    without = fitted([0, 1], [1, 2], 3)
    for padded, plain in zip(with_padding, without, strict=True):
        assert padded.nats([[0, 1]], [[1, -100]]) == pytest.approx(plain.nats([[0, 1]], [[1, -100]]))
        assert padded.nats([[0, 1]], [[1, -100]])[0, 1] == 0


def test_a_row_that_comes_again_is_counted_once() -> None:
    first, second = torch.tensor([[0, 1, 2]]), torch.tensor([[2, 1, 0]])
    labels = torch.tensor([[1, 2, 0]])
    once = fit([(first, labels), (second, labels)], 3)[1]
    twice = fit([(torch.cat([first, second]), torch.cat([labels, labels])), (first, labels)], 3)[1]
    context, label = np.repeat(np.arange(3), 3), np.tile(np.arange(3), 3)
    assert (once.probability(context, label) == twice.probability(context, label)).all()


def test_the_bigram_learns_what_the_unigram_cannot() -> None:
    cycle = np.arange(1001) % 10
    unigram, bigram = fit([(cycle[None, :-1], cycle[None, 1:])], 10)
    assert unigram.nats([[3]], [[4]])[0, 0] == pytest.approx(math.log(10), abs=0.01)
    assert bigram.nats([[3]], [[4]])[0, 0] < 0.05


def test_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match="no .token, label. pair"):
        fit([], 5)
    with pytest.raises(ValueError, match="ids from 0 to 5 .* 0 to 4"):
        fitted([0, 1], [1, 5], 5)
    with pytest.raises(ValueError, match="one label for each token"):
        PairCounts(5).add([[1, 2]], [[1]])
    with pytest.raises(ValueError, match="vocabulary_size is 0"):
        PairCounts(0)
