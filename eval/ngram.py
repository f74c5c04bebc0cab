"""Unigram and bigram models of the tokens a run was trained on: the least that a language model must beat.

The bigram is interpolated, modified Kneser-Ney (Chen & Goodman 1999, "An empirical study of smoothing techniques for
language modeling", section 3): the strongest of the classical count models, so that beating it means something.
Both are proper distributions over the whole vocabulary. Pairs are kept sparse, so a vocabulary of 65,536 needs memory
for the pairs that occur and not for 4 billion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from torch import Tensor

# Pairs that wait before they are merged into the sorted counts: bounds memory, and sorts rarely.
PENDING_PAIRS = 1 << 22
ADDED_COUNT = 0.5
# Where too few counts-of-counts are there to estimate them: the usual fixed discounts for counts 1, 2, and 3 or more.
DEFAULT_DISCOUNTS = (0.75, 1.0, 1.25)
SMALLEST_DISCOUNT = 0.05


class PairCounts:
    """How often each (token, next token) pair occurs.

    Attributes:
        vocabulary_size: V.
        tokens: pairs counted, repeats included.
    """

    def __init__(self, vocabulary_size: int) -> None:
        if not 1 <= vocabulary_size < 1 << 31:
            raise ValueError(f"vocabulary_size is {vocabulary_size}; allowed are 1 to {(1 << 31) - 1}")
        self.vocabulary_size = vocabulary_size
        self.tokens = 0
        self._key_P = np.empty(0, dtype=np.int64)
        self._count_P = np.empty(0, dtype=np.int64)
        self._waiting: list[np.ndarray] = []
        self._waiting_pairs = 0

    def add(self, token_BS: np.ndarray | Tensor, label_BS: np.ndarray | Tensor) -> None:
        """Count the pairs of a batch; a label below 0 (-100, padding) is no pair.

        Raises:
            ValueError: the shapes differ, or an id is outside the vocabulary.
        """
        token_T, label_T = _flat_pairs(token_BS, label_BS)
        kept_T = label_T >= 0
        token_T, label_T = token_T[kept_T], label_T[kept_T]
        if token_T.size == 0:
            return
        _require_ids(token_T, label_T, self.vocabulary_size)
        self._waiting.append(token_T * self.vocabulary_size + label_T)
        self._waiting_pairs += token_T.size
        self.tokens += token_T.size
        if self._waiting_pairs >= PENDING_PAIRS:
            self._merge()

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """(key_P, count_P): the P distinct pairs as rising keys token * V + label, and how often each occurs."""
        self._merge()
        return self._key_P, self._count_P

    def _merge(self) -> None:
        if not self._waiting:
            return
        new_key_P, new_count_P = np.unique(np.concatenate(self._waiting), return_counts=True)
        key_P = np.concatenate([self._key_P, new_key_P])
        count_P = np.concatenate([self._count_P, new_count_P])
        order_P = np.argsort(key_P, kind="stable")
        key_P, count_P = key_P[order_P], count_P[order_P]
        first_P = np.flatnonzero(np.concatenate([[True], key_P[1:] != key_P[:-1]]))
        self._key_P, self._count_P = key_P[first_P], np.add.reduceat(count_P, first_P)
        self._waiting, self._waiting_pairs = [], 0


class Unigram:
    """P(w) = (count(w) + 1/2) / (tokens + V/2).

    Attributes:
        probability_V: float64, sums to 1.
    """

    def __init__(self, counts: PairCounts) -> None:
        _require_some(counts)
        key_P, count_P = counts.pairs()
        count_V = np.bincount(key_P % counts.vocabulary_size, weights=count_P, minlength=counts.vocabulary_size)
        self.probability_V = _add_a_half(count_V)

    def nats(self, token_BS: np.ndarray | Tensor, label_BS: np.ndarray | Tensor) -> np.ndarray:
        """float64 (B, S): -ln P(label) of each position; 0 where the label is below 0."""
        _, label_T = _flat_pairs(token_BS, label_BS)
        nats_T = -np.log(self.probability_V[np.maximum(label_T, 0)])
        return np.where(label_T >= 0, nats_T, 0.0).reshape(np.shape(label_BS))


class Bigram:
    """Interpolated modified Kneser-Ney over one token of context.

    P(w | v) = max(c(v,w) - D(c(v,w)), 0) / c(v) + backoff(v) * P_continuation(w), where D has one value each for the
    counts 1, 2, and 3 or more, backoff(v) is what the discounts of v took away, and P_continuation(w) is the add-a-half
    share of distinct pairs that end in w. A context that never occurred has backoff 1.

    Attributes:
        discounts: D for the counts 1, 2, and 3 or more.
    """

    def __init__(self, counts: PairCounts) -> None:
        _require_some(counts)
        self.vocabulary_size = size = counts.vocabulary_size
        self._key_P, count_P = counts.pairs()
        context_P, label_P = np.divmod(self._key_P, size)
        self.discounts = kneser_ney_discounts(count_P)
        removed_P = np.asarray(self.discounts)[np.minimum(count_P, 3) - 1]
        total_V = np.bincount(context_P, weights=count_P, minlength=size)
        removed_V = np.bincount(context_P, weights=removed_P, minlength=size)
        self._backoff_V = np.where(total_V > 0, removed_V / np.maximum(total_V, 1), 1.0)
        self._kept_P = (count_P - removed_P) / total_V[context_P]
        self._continuation_V = _add_a_half(np.bincount(label_P, minlength=size).astype(np.float64))

    def probability(self, token_T: np.ndarray, label_T: np.ndarray) -> np.ndarray:
        """float64 (T,): P(label | token)."""
        key_T = token_T * self.vocabulary_size + label_T
        place_T = np.minimum(np.searchsorted(self._key_P, key_T), self._key_P.size - 1)
        kept_T = np.where(self._key_P[place_T] == key_T, self._kept_P[place_T], 0.0)
        return kept_T + self._backoff_V[token_T] * self._continuation_V[label_T]

    def nats(self, token_BS: np.ndarray | Tensor, label_BS: np.ndarray | Tensor) -> np.ndarray:
        """float64 (B, S): -ln P(label | token) of each position; 0 where the label is below 0."""
        token_T, label_T = _flat_pairs(token_BS, label_BS)
        nats_T = -np.log(self.probability(token_T, np.maximum(label_T, 0)))
        return np.where(label_T >= 0, nats_T, 0.0).reshape(np.shape(label_BS))


def fit(batches: Iterable[tuple[Tensor, Tensor]], vocabulary_size: int) -> tuple[Unigram, Bigram]:
    """Fit both models.

    A row that comes again is counted once: a second pass over the same text says nothing new about unseen pairs, but
    it would leave no pair with a count of 1 and so make the discounts too small.

    Args:
        batches: (token_BS, label_BS) of each batch: for a fair baseline, those that the run consumed.
        vocabulary_size: V.

    Raises:
        ValueError: no pair was given, or an id is outside the vocabulary.
    """
    counts = PairCounts(vocabulary_size)
    seen: set[bytes] = set()
    for token_BS, label_BS in batches:
        row_B = np.stack([np.asarray(token_BS), np.asarray(label_BS)], axis=1)  # (B, 2, S)
        digests = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in row_B]
        new = []
        for row, digest in zip(row_B, digests, strict=True):
            if digest not in seen:
                seen.add(digest)
                new.append(row)
        if new:
            counts.add(np.stack([row[0] for row in new]), np.stack([row[1] for row in new]))
    return Unigram(counts), Bigram(counts)


def kneser_ney_discounts(count_P: np.ndarray) -> tuple[float, float, float]:
    """Discounts for the counts 1, 2, and 3 or more (Chen & Goodman 1999, eq. 17).

    D_i = i - (i + 1) * Y * n_{i+1} / n_i with Y = n_1 / (n_1 + 2 n_2), n_i being the number of pairs that occur i
    times. Kept between 0.05 and i, so that every unseen pair has a probability above 0 and no seen one falls below 0.
    """
    n1, n2, n3, n4 = (int((count_P == times).sum()) for times in (1, 2, 3, 4))
    if min(n1, n2, n3, n4) == 0:
        return DEFAULT_DISCOUNTS
    y = n1 / (n1 + 2 * n2)
    raw = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    one, two, three = (min(max(d, SMALLEST_DISCOUNT), float(i)) for i, d in enumerate(raw, start=1))
    return one, two, three


def _add_a_half(count_V: np.ndarray) -> np.ndarray:
    return (count_V + ADDED_COUNT) / (count_V.sum() + ADDED_COUNT * count_V.size)


def _flat_pairs(token_BS: np.ndarray | Tensor, label_BS: np.ndarray | Tensor) -> tuple[np.ndarray, np.ndarray]:
    token_T, label_T = (np.asarray(x, dtype=np.int64).reshape(-1) for x in (token_BS, label_BS))
    if token_T.shape != label_T.shape:
        raise ValueError(f"{token_T.size} tokens and {label_T.size} labels: give one label for each token")
    return token_T, label_T


def _require_ids(token_T: np.ndarray, label_T: np.ndarray, vocabulary_size: int) -> None:
    low, high = min(token_T.min(), label_T.min()), max(token_T.max(), label_T.max())
    if low < 0 or high >= vocabulary_size:
        raise ValueError(
            f"ids from {low} to {high} were given; the vocabulary has 0 to {vocabulary_size - 1}: use the corpus' own "
            "vocabulary size"
        )


def _require_some(counts: PairCounts) -> None:
    if counts.tokens == 0:
        raise ValueError("no (token, label) pair was given: fit on at least one training batch")
