"""What a routing looks like in numbers: pure functions of counts and masks.

Every function states its definition and its value for known cases. Arrays may be numpy's, torch's on the CPU, or
lists; results are float64. A ratio of nothing (no assignment, no token) is nan, so that a report can show it as
missing.

Shape suffixes beyond the project's legend: X batches, R rows (sequences), M domains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    return _mean([max_violation(counts_E) for counts_E in np.atleast_2d(_counts(counts_XE))])


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
    return 0.0 if counts_E.size == 1 else _entropy(counts_E / total) / math.log(counts_E.size)


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


def domain_specialisation(counts_ME: Any, tokens_M: Any) -> np.ndarray:
    """float64 (M, E): N_{e,D} / N_D, the share of the tokens of domain D that expert e takes.

    With no specialisation and balanced experts every entry is k/E (k the experts of a token on average); rows sum to
    the domain's mean fan-out. A domain without tokens is nan.

    Args:
        counts_ME: assignments of each domain's tokens to each expert.
        tokens_M: valid tokens of each domain.
    """
    counts_ME, tokens_M = _counts(counts_ME), _counts(tokens_M)
    return np.divide(counts_ME, tokens_M[:, None], out=np.full_like(counts_ME, np.nan), where=tokens_M[:, None] > 0)


def mutual_information(counts_ME: Any) -> float:
    """Mutual information in bits between the domain and the expert of an assignment, from counts (plug-in estimate).

    0 when all domains load the experts alike, at most log2 min(M, E). Sampling alone makes it positive: compare it
    with `mutual_information_null`.
    """
    counts_ME = _counts(counts_ME)
    total = counts_ME.sum()
    if total == 0:
        return math.nan
    joint_ME = counts_ME / total
    nats = _entropy(joint_ME.sum(0)) + _entropy(joint_ME.sum(1)) - _entropy(joint_ME)
    return max(nats, 0.0) / math.log(2)


def independent_bias(counts_ME: Any) -> float:
    """What `mutual_information` is expected to show, in bits, when domain and expert are independent.

    (M - 1)(E - 1) / (2 N ln 2) for N independent assignments, rows and columns without any left out (Miller 1955). The
    tokens of one text are not independent, so this is the least there is: `mutual_information_null` finds the rest.
    """
    counts_ME = _counts(counts_ME)
    domains, experts = int((counts_ME.sum(1) > 0).sum()), int((counts_ME.sum(0) > 0).sum())
    total = counts_ME.sum()
    return max(domains - 1, 0) * max(experts - 1, 0) / (2 * total * math.log(2)) if total else math.nan


def mutual_information_null(
    counts_RE: Any, domain_R: Any, num_domains: int, permutations: int = 50, seed: int = 0
) -> tuple[float, float]:
    """Mutual information when the domains are dealt to whole rows at random: (mean, 95th percentile), in bits.

    Rows are dealt whole because the tokens of one text resemble each other: shuffling single tokens would make any
    difference between texts look like one between domains. A value above the 95th percentile is specialisation at the
    one-sided 5% level, if rows are independent: the rows of one long document are not, so that a held-out set of few
    documents calls for caution.

    Args:
        counts_RE: assignments of each row to each expert.
        domain_R: each row's domain.
        num_domains: M.
        permutations: how many deals.
        seed: of the deals.
    """
    counts_RE, domain_R = _counts(counts_RE), np.asarray(domain_R)
    generator = np.random.default_rng(seed)
    values = [
        mutual_information(sum_by_domain(counts_RE, generator.permutation(domain_R), num_domains))
        for _ in range(permutations)
    ]
    return _mean(values), float(np.quantile(values, 0.95))


def sum_by_domain(values_RX: Any, domain_R: Any, num_domains: int) -> np.ndarray:
    """float64 (M, ...): rows summed by their domain."""
    values_RX = _counts(values_RX)
    sums_MX = np.zeros((num_domains, *values_RX.shape[1:]))
    np.add.at(sums_MX, np.asarray(domain_R), values_RX)
    return sums_MX


def _entropy(probability: np.ndarray) -> float:
    """In nats; 0 ln 0 is 0."""
    positive = probability[probability > 0]
    return float(-(positive * np.log(positive)).sum())


def _counts(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
