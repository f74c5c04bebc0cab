"""The adjusted Rand index against values worked out by hand."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from eval.clustering import adjusted_rand_index, contingency


def test_contingency_counts_a_token_once_for_each_of_its_experts() -> None:
    assigned_TE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]], dtype=bool)
    counts_ME = contingency([0, 0, 1, 2, 2], assigned_TE, num_clusters=3)
    assert counts_ME.tolist() == [[2, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0]]
    assert counts_ME.sum() == assigned_TE.sum()


def test_experts_that_are_the_clusters_score_one_under_any_names() -> None:
    assert adjusted_rand_index(np.diag([5, 2, 9])) == 1
    assert adjusted_rand_index([[0, 0, 5, 0], [2, 0, 0, 0], [0, 9, 0, 0]]) == 1  # one expert takes nothing


def test_a_table_worked_out_by_hand() -> None:
    # Six items. Pairs together in both 1 + 1 + 0 = 2; by cluster 3 + 3 = 6; by expert 1 + 1 + 1 = 3; all 15.
    # Expected 6 * 3 / 15 = 1.2; (2 - 1.2) / (4.5 - 1.2) = 8 / 33.
    assert adjusted_rand_index([[2, 1, 0], [0, 1, 2]]) == pytest.approx(8 / 33)


def test_less_agreement_than_chance_is_negative() -> None:
    # Together in both 0; by cluster 2, by expert 2, all 6: (0 - 2/3) / (2 - 2/3).
    assert adjusted_rand_index([[1, 1], [1, 1]]) == pytest.approx(-0.5)


def test_one_expert_that_takes_all_scores_zero() -> None:
    assert adjusted_rand_index([[7, 0], [4, 0], [1, 0]]) == pytest.approx(0)


def test_an_expert_for_each_token_scores_zero() -> None:
    assert adjusted_rand_index([[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]) == 0


def test_equal_trivial_partitions_score_one() -> None:
    assert adjusted_rand_index([[7]]) == 1
    assert adjusted_rand_index(np.eye(4)) == 1


def test_independent_partitions_score_zero_on_average() -> None:
    generator = np.random.default_rng(0)
    cluster_T = generator.choice(3, 60, p=[0.6, 0.3, 0.1])
    values = []
    for _ in range(400):
        assigned_TE = np.eye(4, dtype=bool)[generator.choice(4, 60, p=[0.4, 0.3, 0.2, 0.1])]
        values.append(adjusted_rand_index(contingency(cluster_T, assigned_TE, 3)))
    assert abs(np.mean(values)) < 4 * np.std(values) / math.sqrt(400)
    assert np.std(values) > 0.005


def test_rows_and_columns_may_come_in_any_order_and_change_places() -> None:
    generator = np.random.default_rng(1)
    counts_ME = generator.integers(0, 9, (3, 5))
    value = adjusted_rand_index(counts_ME)
    assert value != 0
    assert adjusted_rand_index(counts_ME[[2, 0, 1]][:, [3, 1, 4, 0, 2]]) == pytest.approx(value)
    assert adjusted_rand_index(counts_ME.T) == pytest.approx(value)


def test_it_agrees_with_counting_pairs_one_by_one() -> None:
    generator = np.random.default_rng(2)
    cluster_T, expert_T = generator.integers(0, 3, 25), generator.integers(0, 4, 25)
    expert_T[cluster_T == 2] = 1  # some agreement
    pairs = list(combinations(range(25), 2))
    by_cluster = [cluster_T[i] == cluster_T[j] for i, j in pairs]
    by_expert = [expert_T[i] == expert_T[j] for i, j in pairs]
    both = sum(a and b for a, b in zip(by_cluster, by_expert, strict=True))
    expected = sum(by_cluster) * sum(by_expert) / len(pairs)
    value = (both - expected) / ((sum(by_cluster) + sum(by_expert)) / 2 - expected)
    assert adjusted_rand_index(contingency(cluster_T, np.eye(4)[expert_T], 3)) == pytest.approx(value)


def test_a_second_expert_that_says_nothing_lowers_it() -> None:
    cluster_T = np.repeat([0, 1, 2], [30, 20, 10])
    assigned_TE = np.eye(5, dtype=bool)[cluster_T]
    first = adjusted_rand_index(contingency(cluster_T, assigned_TE, 3))
    assigned_TE[np.arange(60), 3 + np.arange(60) % 2] = True
    assert adjusted_rand_index(contingency(cluster_T, assigned_TE, 3)) < 0.6 < first


def test_without_a_pair_there_is_nothing_to_say() -> None:
    assert math.isnan(adjusted_rand_index(np.zeros((2, 3))))
    assert math.isnan(adjusted_rand_index([[1, 0], [0, 0]]))
