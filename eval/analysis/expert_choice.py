"""What is particular to expert choice and thresholds: tokens with no expert, one, or many."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from eval.analysis.counting import DEALS, DRAWS, interval


@dataclass(frozen=True)
class Correlation:
    """A rank correlation over tokens.

    Attributes:
        value: Spearman's: from -1 to 1, 0 without any monotone relation.
        low, high: bounds of the 95% bootstrap interval over units.
        null_95: 95th percentile of its absolute value when one side is dealt among the tokens.
    """

    value: float
    low: float
    high: float
    null_95: float

    @property
    def beyond_null(self) -> bool:
        """Its interval leaves out 0, and it is larger than chance among tokens makes it."""
        return bool(abs(self.value) > self.null_95 and (self.low > 0 or self.high < 0))


def rank_correlation(a_T: np.ndarray, b_T: np.ndarray, unit_T: np.ndarray, seed: int = 0) -> Correlation:
    """Spearman's correlation; ties share their mean rank.

    Ranks are those of the whole sample in every bootstrap draw.

    Args:
        a_T: values of each token.
        b_T: others.
        unit_T: documents or rows, resampled whole.
        seed: of the draws.
    """
    if len(a_T) < 2 or np.ptp(a_T) == 0 or np.ptp(b_T) == 0:
        return Correlation(*[math.nan] * 4)
    a_T, b_T = rankdata(a_T), rankdata(b_T)
    generator = np.random.default_rng(seed)
    unit_number_T = np.unique(unit_T, return_inverse=True)[1]
    units = int(unit_number_T.max()) + 1
    # Each unit's sums are all that a draw needs.
    sums_RX = np.stack(
        [np.bincount(unit_number_T, v, units) for v in (np.ones_like(a_T), a_T, b_T, a_T * a_T, b_T * b_T, a_T * b_T)],
        axis=1,
    )
    value = _pearson(sums_RX.sum(0))
    drawn = [_pearson(sums_RX[generator.integers(units, size=units)].sum(0)) for _ in range(DRAWS if units > 1 else 0)]
    null = [abs(float(np.corrcoef(a_T, generator.permutation(b_T))[0, 1])) for _ in range(DEALS)]
    low, high = interval(value, np.array(drawn))
    return Correlation(value, low, high, float(np.quantile(null, 0.95)))


def mean_by_bin(bin_T: np.ndarray, value_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bins that occur, mean value in each, tokens in each)."""
    bins, number_T, count_X = np.unique(bin_T, return_inverse=True, return_counts=True)
    return bins, np.bincount(number_T, value_T) / count_X, count_X


def left_out(label_T: np.ndarray, zero_T: np.ndarray, least: int) -> list[tuple[int, int, float]]:
    """(label, tokens, share without expert) of labels with at least `least` tokens, largest share first.

    Args:
        label_T: ids, domains or other numbers from 0.
        zero_T: bool, tokens that no expert takes.
        least: tokens that a label needs.
    """
    count_M = np.bincount(label_T)
    zero_M = np.bincount(label_T[zero_T], minlength=len(count_M))
    labels = np.flatnonzero(count_M >= least)
    # Equal shares: the commoner one first, then the smaller number.
    order = np.lexsort((labels, -count_M[labels], -zero_M[labels] / count_M[labels]))
    return [(int(m), int(count_M[m]), float(zero_M[m] / count_M[m])) for m in labels[order]]


def _pearson(sums_X: np.ndarray) -> float:
    n, a, b, aa, bb, ab = sums_X
    spread = (n * aa - a * a) * (n * bb - b * b)
    return float((n * ab - a * b) / math.sqrt(spread)) if spread > 0 else math.nan
