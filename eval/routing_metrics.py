"""What a routing looks like in numbers: pure functions of counts and masks.

Every function states its definition and its value for known cases. Arrays may be numpy's, torch's on the CPU, or
lists; results are float64. A ratio of nothing (no assignment, no token) is nan, so that a report can show it as
missing.

Those of a load are defined in `training/load_metrics.py`, since a run records them while it trains; they are here too,
so that an analysis needs one import.

Shape suffixes beyond the project's legend: X anything, R rows (sequences), M domains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from training.load_metrics import (
    batch_max_violation,
    binomial_fan_out,
    coefficient_of_variation,
    entropy,
    fan_out_histogram,
    fan_out_mean,
    global_max_violation,
    load_entropy,
    max_violation,
    zero_expert_fraction,
)

__all__ = [
    "batch_max_violation",
    "binomial_fan_out",
    "coefficient_of_variation",
    "domain_specialisation",
    "fan_out_histogram",
    "fan_out_mean",
    "global_max_violation",
    "independent_bias",
    "load_entropy",
    "max_violation",
    "mutual_information",
    "mutual_information_null",
    "sum_by_domain",
    "zero_expert_fraction",
]


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
    nats = entropy(joint_ME.sum(0)) + entropy(joint_ME.sum(1)) - entropy(joint_ME)
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


def _counts(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
