"""How even a load is, in numbers: pure functions of counts and masks.

A run records them while it trains; analysis uses the same definitions through `eval/routing_metrics.py`.

Every function states its definition and its value for known cases. Arrays may be numpy's, torch's on the CPU, or
lists; results are float64. A ratio of nothing (no assignment, no token) is nan, so that a report can show it as
missing.

Shape suffix beyond the project's legend: X batches.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def max_violation(counts_E: Any) -> float:
    """MaxVio of one load: max_e n_e / mean_e n_e - 1 (Wang et al. 2024, "Auxiliary-loss-free load balancing").

    0 when all experts take the same number, E - 1 when one takes all, E/k - 1 when all tokens take the same k.
    """
    counts_E = _counts(counts_E)
    mean = counts_E.mean()
    return float(counts_E.max() / mean - 1) if mean > 0 else math.nan


def batch_max_violation(counts_XE: Any) -> float:
    """Mean over batches of each batch's MaxVio. Never below `global_max_violation` of equally large batches."""
    return float(np.mean([max_violation(counts_E) for counts_E in np.atleast_2d(_counts(counts_XE))]))


def global_max_violation(counts_XE: Any) -> float:
    """MaxVio of the counts summed over batches: imbalance that differs from batch to batch cancels."""
    return max_violation(np.atleast_2d(_counts(counts_XE)).sum(0))


def coefficient_of_variation(counts_E: Any) -> float:
    """Population standard deviation over mean: 0 when uniform, sqrt(E - 1) when one expert takes all."""
    counts_E = _counts(counts_E)
    mean = counts_E.mean()
    return float(counts_E.std() / mean) if mean > 0 else math.nan


def load_entropy(counts_E: Any) -> float:
    """Entropy of the experts' shares of assignments over ln E: 1 when uniform, 0 when one takes all (or E = 1)."""
    counts_E = _counts(counts_E)
    total = counts_E.sum()
    if total == 0:
        return math.nan
    return 0.0 if counts_E.size == 1 else entropy(counts_E / total) / math.log(counts_E.size)


def fan_out_histogram(assigned_TE: Any, valid_T: Any = None) -> np.ndarray:
    """int64 (E + 1,): how many valid tokens have 0, 1, ..., E experts."""
    assigned_TE = np.asarray(assigned_TE, dtype=bool)
    fan_out_T = assigned_TE.sum(1)
    if valid_T is not None:
        fan_out_T = fan_out_T[np.asarray(valid_T, dtype=bool)]
    return np.bincount(fan_out_T, minlength=assigned_TE.shape[1] + 1)


def fan_out_mean(histogram: Any) -> float:
    """Experts of a token, on average. Expert choice gives exactly the configured number; thresholds hit it roughly."""
    histogram = _counts(histogram)
    total = histogram.sum()
    return float((histogram * np.arange(histogram.size)).sum() / total) if total else math.nan


def zero_expert_fraction(histogram: Any) -> float:
    """Share of tokens that no expert takes; they pass on the residual (and a shared expert, if there is one)."""
    histogram = _counts(histogram)
    total = histogram.sum()
    return float(histogram[0] / total) if total else math.nan


def binomial_fan_out(num_experts: int, experts_per_token: float) -> np.ndarray:
    """float64 (E + 1,): the fan-out shares if every expert took each token with probability c/E, independently.

    The null of a fan-out histogram; its share of tokens without expert is (1 - c/E)^E: 0.100 at E = 8, c = 2.
    """
    p = experts_per_token / num_experts
    return np.array([math.comb(num_experts, n) * p**n * (1 - p) ** (num_experts - n) for n in range(num_experts + 1)])


def entropy(probability: Any) -> float:
    """Of a distribution of any shape, in nats; 0 ln 0 is 0."""
    probability = np.asarray(probability, dtype=np.float64)
    positive = probability[probability > 0]
    return float(-(positive * np.log(positive)).sum())


def _counts(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)
