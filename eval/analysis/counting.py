"""Counts of (label, expert) pairs, what chance makes of them, and how sure a value is.

Two nulls stand beside every specialisation:

- **shuffled**: which experts a token got is dealt at random among the tokens (or the labels among whole units). Loads,
  fan-outs and label counts stay, so that what a small sample alone shows is in it.
- **frequency-matched**: dealt among tokens whose input ids are about equally frequent (octaves of the count on the
  tape). What is beyond it is more than "this expert takes frequent tokens".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DEALS, DRAWS = 20, 100
INTERVAL = 0.95


@dataclass(frozen=True)
class Assignments:
    """Who took which token, as pairs.

    Attributes:
        token_A, expert_A: of each pair, in order of tokens.
        num_tokens: T.
        num_experts: E.
    """

    token_A: np.ndarray
    expert_A: np.ndarray
    num_tokens: int
    num_experts: int

    @classmethod
    def of(cls, assigned_TE: np.ndarray) -> Assignments:
        """From a mask."""
        token_A, expert_A = np.nonzero(assigned_TE)
        return cls(token_A, expert_A, *assigned_TE.shape)

    @classmethod
    def of_top(cls, top_T: np.ndarray, num_experts: int) -> Assignments:
        """Each token's first expert; tokens without one (-1) have no pair."""
        token_A = np.flatnonzero(top_T >= 0)
        return cls(token_A, top_T[token_A].astype(np.int64), len(top_T), num_experts)


def label_counts(
    label_T: np.ndarray, assignments: Assignments, num_labels: int, weight_T: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Counts by label.

    Args:
        label_T: int, from 0; tokens with a negative label are left out.
        assignments: of the same tokens.
        num_labels: M.
        weight_T: how often each token counts; once where not given.

    Returns:
        float64 (M, E) pairs of each label and expert, and (M,) tokens of each label.
    """
    label_A, expert_A, experts = label_T[assignments.token_A], assignments.expert_A, assignments.num_experts
    used_A, used_T = label_A >= 0, label_T >= 0
    weight_A = None if weight_T is None else weight_T[assignments.token_A][used_A]
    place_A = label_A[used_A].astype(np.int64) * experts + expert_A[used_A]
    counts_ME = np.bincount(place_A, weight_A, num_labels * experts).reshape(num_labels, experts).astype(np.float64)
    weight_T = None if weight_T is None else weight_T[used_T]
    return counts_ME, np.bincount(label_T[used_T], weight_T, num_labels).astype(np.float64)


Statistic = Callable[[np.ndarray, np.ndarray], float]  # of (M, E) counts and (M,) tokens


@dataclass(frozen=True)
class Measured:
    """A value with its interval and its nulls.

    Attributes:
        value: found.
        low, high: bounds of its 95% bootstrap interval over units.
        null_mean, null_95: of the shuffled null.
        matched_mean, matched_95: of the frequency-matched null; nan where there is none.
        units: resampled.
    """

    value: float
    low: float
    high: float
    null_mean: float
    null_95: float
    matched_mean: float
    matched_95: float
    units: int

    @property
    def beyond_null(self) -> bool:
        """Above the 95th percentile of the shuffled null."""
        return bool(self.value > self.null_95)

    @property
    def beyond_matched(self) -> bool | None:
        """Above that of the frequency-matched null; None where there is none."""
        return None if np.isnan(self.matched_95) else bool(self.value > self.matched_95)

    @property
    def excess(self) -> float:
        """Value less the mean of the shuffled null."""
        return self.value - self.null_mean


def measure(
    statistic: Statistic,
    label_T: np.ndarray,
    assignments: Assignments,
    unit_T: np.ndarray,
    stratum_T: np.ndarray | None = None,
    deal_units: bool = False,
    seed: int = 0,
) -> Measured:
    """Evaluate a statistic of label counts, with both nulls and a bootstrap interval.

    Args:
        statistic: of the counts.
        label_T: from 0; negative ones are left out of the statistic.
        assignments: of the same tokens.
        unit_T: what is resampled as a whole: the tokens of one text resemble each other.
        stratum_T: of the frequency-matched null (see `octaves`); None leaves it out.
        deal_units: the shuffled null deals labels to whole units (each has one), not experts to tokens: for labels,
            such as domains, that all tokens of a unit share.
        seed: of all draws.
    """
    generator = np.random.default_rng(seed)
    labels = int(label_T.max(initial=-1)) + 1
    if labels == 0 or not len(assignments.token_A):
        return Measured(*(float("nan"),) * 7, 0)

    def of(labels_T: np.ndarray, weight_T: np.ndarray | None = None) -> float:
        return statistic(*label_counts(labels_T, assignments, labels, weight_T))

    value = of(label_T)
    used_T = np.flatnonzero(label_T >= 0)
    unit_number_T = np.unique(unit_T, return_inverse=True)[1]
    units = int(unit_number_T.max()) + 1
    null = []
    for _ in range(DEALS):
        if deal_units:
            label_R = np.zeros(units, dtype=label_T.dtype)
            label_R[unit_number_T] = label_T
            null.append(of(generator.permutation(label_R)[unit_number_T]))
        else:
            dealt_T = label_T.copy()
            dealt_T[used_T] = generator.permutation(label_T[used_T])
            null.append(of(dealt_T))
    matched = []
    if stratum_T is not None:
        for _ in range(DEALS):
            dealt_T = label_T.copy()
            dealt_T[used_T] = deal_within(label_T[used_T], stratum_T[used_T], generator)
            matched.append(of(dealt_T))
    drawn = []
    for _ in range(DRAWS if units > 1 else 0):
        weight_R = np.bincount(generator.integers(units, size=units), minlength=units).astype(np.float64)
        drawn.append(of(label_T, weight_R[unit_number_T]))
    low, high = interval(value, np.array(drawn))
    return Measured(value, low, high, *_summary(null), *_summary(matched), units=units)


def deal_within(value_T: np.ndarray, stratum_T: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """`value_T` with the values of each stratum in random order."""
    dealt_T = np.empty_like(value_T)
    # Ordered by stratum, and at random within: both orders list the strata alike.
    dealt_T[np.argsort(stratum_T, kind="stable")] = value_T[np.lexsort((generator.random(len(value_T)), stratum_T))]
    return dealt_T


def interval(value: float, drawn_X: np.ndarray) -> tuple[float, float]:
    """95% bounds from bootstrap draws, moved so that their mean is the value.

    Statistics such as information rise with every resampling, because a resampled sample looks less varied than it is;
    without the move the interval could lie wholly above the value.
    """
    drawn_X = drawn_X[np.isfinite(drawn_X)]
    if not drawn_X.size:
        return float("nan"), float("nan")
    low, high = np.quantile(drawn_X, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2]) - drawn_X.mean() + value
    return float(low), float(high)


def octaves(token_T: np.ndarray) -> np.ndarray:
    """int64 (T,): floor(log2) of how often each token's id occurs among them."""
    count_V = np.bincount(token_T)
    return np.log2(count_V[token_T]).astype(np.int64)


def frequent(label_T: np.ndarray, least: int) -> np.ndarray:
    """int64 (T,): labels renumbered from 0, those that occur fewer than `least` times replaced by -1."""
    _, number_T, count_M = np.unique(label_T, return_inverse=True, return_counts=True)
    new_M = np.where(count_M >= least, np.cumsum(count_M >= least) - 1, -1)
    return new_M[number_T]


def _summary(values: list[float]) -> tuple[float, float]:
    return (float(np.mean(values)), float(np.quantile(values, 0.95))) if values else (float("nan"), float("nan"))
