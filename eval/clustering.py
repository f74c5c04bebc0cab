"""Do experts take the clusters that are there? Agreement of a routing with known labels.

Shape suffixes beyond the project's legend: M clusters.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def contingency(cluster_T: Any, assigned_TE: Any, num_clusters: int) -> np.ndarray:
    """int64 (M, E): assignments of each cluster's tokens to each expert.

    A token counts once for each of its experts, and not at all without one: report the share of those beside
    (`eval.routing_metrics.zero_expert_fraction`).

    Args:
        cluster_T: whole numbers from 0 to M - 1.
        assigned_TE: bool.
        num_clusters: M.
    """
    counts_ME = np.zeros((num_clusters, np.shape(assigned_TE)[1]), dtype=np.int64)
    np.add.at(counts_ME, np.asarray(cluster_T), np.asarray(assigned_TE, dtype=np.int64))
    return counts_ME


def adjusted_rand_index(counts_ME: Any) -> float:
    """Agreement of two partitions of the same items, corrected for chance (Hubert and Arabie 1985, eq. 5).

    The items are assignments, one partition is by cluster and the other by expert. Of all pairs of items, let I be
    those together in both, a those together by cluster, b those together by expert and n all of them: the index is
    (I - ab/n) / ((a + b)/2 - ab/n).

    1: experts and clusters are the same up to names. 0: what independent partitions with these sizes give on average,
    and exactly what one expert that takes all gives. Negative (at least -0.5): less than chance. Splitting a cluster
    between experts and merging clusters in one both lower it; so does a second expert for each token when there is
    only one for each cluster. nan with fewer than two assignments.

    Args:
        counts_ME: whole numbers, from `contingency`; rows and columns in any order.
    """
    counts_ME = np.asarray(counts_ME, dtype=np.float64)
    pairs = _pairs(counts_ME.sum())
    if pairs == 0:
        return math.nan
    together, by_cluster, by_expert = _pairs(counts_ME), _pairs(counts_ME.sum(1)), _pairs(counts_ME.sum(0))
    expected, largest = by_cluster * (by_expert / pairs), (by_cluster + by_expert) / 2
    # Only where both partitions are one whole, or both all single items: they are equal.
    return 1.0 if largest == expected else (together - expected) / (largest - expected)


def _pairs(counts: Any) -> float:
    """Pairs of items within each count, summed."""
    return float((counts * (counts - 1) / 2).sum())
