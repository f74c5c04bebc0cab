"""How soon a router's choices are those it ends with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Agreement:
    """How alike two routings of the same tokens are.

    Attributes:
        overlap: mean of |E_t and E'_t| / |E'_t| over tokens with an expert in the second: 1 when equal; k/E when
            unrelated and balanced.
        jaccard: mean of |E_t and E'_t| / |E_t or E'_t| over tokens with an expert in either.
        null_overlap, null_jaccard: the same when the first routing's rows are dealt among the tokens.
    """

    overlap: float
    jaccard: float
    null_overlap: float
    null_jaccard: float


def agreement(first_TE: np.ndarray, second_TE: np.ndarray, seed: int = 0) -> Agreement:
    """Compare two routings.

    Where tokens have varying numbers of experts (expert choice, thresholds), Jaccard is the symmetric measure; where
    all have k, overlap is the usual saturation (Muennighoff et al. 2024, section 5.1).

    Args:
        first_TE: of one checkpoint.
        second_TE: of a later one, on the same tokens.
        seed: of the null.
    """
    dealt_TE = np.random.default_rng(seed).permutation(first_TE)
    return Agreement(*_compare(first_TE, second_TE), *_compare(dealt_TE, second_TE))


def varies(assigned_TE: np.ndarray) -> bool:
    """Whether tokens have different numbers of experts."""
    fan_out_T = assigned_TE.sum(1)
    return bool(fan_out_T.size and fan_out_T.min() != fan_out_T.max())


def _compare(first_TE: np.ndarray, second_TE: np.ndarray) -> tuple[float, float]:
    both_T = (first_TE & second_TE).sum(1)
    either_T, second_T = (first_TE | second_TE).sum(1), second_TE.sum(1)
    return _mean_ratio(both_T, second_T), _mean_ratio(both_T, either_T)


def _mean_ratio(part_T: np.ndarray, whole_T: np.ndarray) -> float:
    used_T = whole_T > 0
    return float((part_T[used_T] / whole_T[used_T]).mean()) if used_T.any() else math.nan
