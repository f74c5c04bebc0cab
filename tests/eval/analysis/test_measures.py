"""Every measure gives its known value on a known routing, and its null where nothing is there to find."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from eval.analysis import coactivation, expert_choice, identity, saturation, similarity, specialisation
from eval.analysis import paths as ways
from eval.analysis.counting import Assignments, deal_within, frequent, interval, label_counts, measure, octaves


def random_top_k(tokens: int, experts: int, k: int, seed: int = 0) -> np.ndarray:
    """bool (T, E): k experts a token, all alike."""
    rank_TE = np.random.default_rng(seed).random((tokens, experts)).argsort(1).argsort(1)
    return rank_TE < k


def one_hot(expert_T: np.ndarray, experts: int) -> np.ndarray:
    return np.eye(experts, dtype=bool)[expert_T]


def test_label_counts_are_those_of_a_loop() -> None:
    generator = np.random.default_rng(1)
    label_T, assigned_TE = generator.integers(-1, 3, 40), generator.random((40, 5)) < 0.3
    weight_T = generator.integers(0, 4, 40).astype(float)
    expected_ME, tokens_M = np.zeros((3, 5)), np.zeros(3)
    for label, assigned_E, weight in zip(label_T, assigned_TE, weight_T, strict=True):
        if label >= 0:
            expected_ME[label] += weight * assigned_E
            tokens_M[label] += weight
    counts_ME, found_M = label_counts(label_T, Assignments.of(assigned_TE), 3, weight_T)
    np.testing.assert_array_equal(counts_ME, expected_ME)
    np.testing.assert_array_equal(found_M, tokens_M)


def test_experts_that_follow_the_label_are_found_and_others_are_not() -> None:
    label_T = np.arange(600) % 4
    unit_T = np.arange(600) // 10
    found = measure(specialisation.information, label_T, Assignments.of(one_hot(label_T, 4)), unit_T)
    assert found.value == pytest.approx(2) and found.beyond_null and found.beyond_matched is None
    random = measure(specialisation.information, label_T, Assignments.of(random_top_k(600, 4, 1, 5)), unit_T)
    assert not random.beyond_null and abs(random.excess) < 0.02
    assert random.low <= random.value <= random.high


def test_a_frequency_match_explains_experts_that_only_take_frequent_tokens() -> None:
    generator = np.random.default_rng(2)
    token_T = np.where(generator.random(4000) < 0.5, generator.integers(0, 2, 4000), generator.integers(2, 202, 4000))
    label_T = frequent(token_T, 10)
    by_frequency = Assignments.of(one_hot((token_T < 2).astype(int), 2))
    unit_T = np.arange(4000) // 50
    found = measure(specialisation.information, label_T, by_frequency, unit_T, octaves(token_T))
    assert found.beyond_null
    assert found.matched_mean == pytest.approx(found.value, rel=1e-6)
    by_id = Assignments.of(one_hot(token_T % 2, 2))
    assert measure(specialisation.information, label_T, by_id, unit_T, octaves(token_T)).beyond_matched


def test_domains_dealt_to_whole_units_do_not_take_single_texts_for_domains() -> None:
    """Each text keeps to one expert, drawn at random: that is no specialisation by domain."""
    unit_T = np.repeat(np.arange(12), 100)
    expert_T = np.random.default_rng(3).integers(0, 4, 12)[unit_T]
    label_T = unit_T % 2
    assignments = Assignments.of(one_hot(expert_T, 4))
    by_token = measure(specialisation.information, label_T, assignments, unit_T)
    by_unit = measure(specialisation.information, label_T, assignments, unit_T, deal_units=True)
    assert by_token.beyond_null and not by_unit.beyond_null


def test_dealing_within_strata_keeps_each_stratum() -> None:
    value_T, stratum_T = np.arange(50), np.arange(50) % 3
    dealt_T = deal_within(value_T, stratum_T, np.random.default_rng(0))
    assert not np.array_equal(dealt_T, value_T)
    np.testing.assert_array_equal(dealt_T % 3, stratum_T)
    np.testing.assert_array_equal(np.sort(dealt_T), value_T)


def test_an_interval_has_the_bootstraps_width_around_the_value() -> None:
    low, high = interval(5.0, np.linspace(10, 12, 1001))
    assert (low, high) == pytest.approx((4.05, 5.95))


def test_rare_labels_are_left_out_and_octaves_are_of_counts() -> None:
    token_T = np.array([7, 7, 7, 7, 2, 2, 9])
    assert frequent(token_T, 2).tolist() == [1, 1, 1, 1, 0, 0, -1]
    assert octaves(token_T).tolist() == [2, 2, 2, 2, 1, 1, 0]


def test_modal_share_is_one_for_a_hash_and_k_over_e_for_none() -> None:
    token_T = np.arange(30_000) % 30
    hashed = label_counts(token_T, Assignments.of(one_hot(token_T % 6, 6) | one_hot((token_T + 3) % 6, 6)), 30)
    assert specialisation.modal_share(*hashed) == 1
    random = label_counts(token_T, Assignments.of(random_top_k(30_000, 6, 2)), 30)
    assert specialisation.modal_share(*random) == pytest.approx(2 / 6, abs=0.03)


def test_divergence_between_labels_is_zero_when_alike_and_one_when_apart() -> None:
    tokens_M = np.ones(2)
    assert specialisation.mean_divergence(np.array([[2.0, 2], [5, 5]]), tokens_M) == pytest.approx(0)
    assert specialisation.mean_divergence(np.array([[2.0, 0], [0, 5]]), tokens_M) == pytest.approx(1)
    assert math.isnan(specialisation.mean_divergence(np.array([[2.0, 2]]), np.ones(1)))


def test_positions_are_told_apart_by_octaves() -> None:
    assert specialisation.position_octave(np.array([0, 1, 2, 3, 4, 7, 8])).tolist() == [0, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_id_explains_all_of_a_hash_router_and_nothing_of_a_random_one(k: int) -> None:
    token_T = np.random.default_rng(k).integers(0, 20, 8000)
    hashed_TE = np.any([one_hot((token_T + j * 2) % 6, 6) for j in range(k)], axis=0)
    unit_T = np.arange(8000) // 40
    found = measure(identity.explained_decisions, token_T, Assignments.of(hashed_TE), unit_T)
    assert found.value == pytest.approx(1) and identity.corrected(found) == pytest.approx(1)
    random = measure(identity.explained_decisions, token_T, Assignments.of(random_top_k(8000, 6, k)), unit_T)
    assert identity.corrected(random) == pytest.approx(0, abs=0.01)
    first_T = hashed_TE.argmax(1).astype(np.int16)
    first = measure(identity.explained_first, token_T, Assignments.of_top(first_T, 6), unit_T)
    assert first.value == pytest.approx(1)
    accuracy = identity.table_accuracy(token_T, first_T, 6, unit_T)
    assert accuracy.accuracy == 1 and accuracy.covered == 1 and accuracy.base_rate < 0.5


def test_a_table_of_a_random_router_is_at_its_base_rate() -> None:
    generator = np.random.default_rng(4)
    token_T, top_T = generator.integers(0, 10, 9000), generator.integers(0, 4, 9000).astype(np.int16)
    found = identity.table_accuracy(token_T, top_T, 4, np.arange(9000) // 30)
    assert found.accuracy == pytest.approx(found.base_rate, abs=0.04)
    assert identity.table_accuracy(token_T, np.full(9000, -1, np.int16), 4, np.arange(9000)).tokens == 0


def test_coactivation_counts_all_pairs() -> None:
    """Adjacent ranks only, as in OLMoE's script, would show a quarter of the truth at k = 8."""
    assigned_TE = random_top_k(20_000, 64, 8, 6)
    share_EE = coactivation.coactivation(assigned_TE)
    assert np.nanmean(share_EE) == pytest.approx(7 / 63, abs=1e-3)
    assert coactivation.null(assigned_TE) == pytest.approx(7 / 63)
    ranked_TK = np.nonzero(assigned_TE)[1].reshape(-1, 8)
    ranked_TK = np.random.default_rng(0).permuted(ranked_TK, axis=1)
    adjacent_EE = np.zeros((64, 64))
    for left, right in zip(ranked_TK.T[:-1], ranked_TK.T[1:], strict=True):
        np.add.at(adjacent_EE, (left, right), 1)
        np.add.at(adjacent_EE, (right, left), 1)
    adjacent = adjacent_EE / assigned_TE.sum(0)[:, None]
    assert adjacent[~np.eye(64, dtype=bool)].mean() == pytest.approx(0.0278, abs=2e-4)


def test_coactivation_is_asymmetric_and_known() -> None:
    share_EE = coactivation.coactivation(np.array([[1, 1, 0], [1, 0, 0], [1, 1, 0]], dtype=bool))
    assert share_EE[0, 1] == pytest.approx(2 / 3) and share_EE[1, 0] == 1 and share_EE[1, 2] == 0
    assert np.isnan(share_EE[0, 0]) and np.isnan(share_EE[2]).all()


def test_pairs_that_go_together_are_beyond_the_null_and_random_ones_are_not() -> None:
    expert_T = np.random.default_rng(7).integers(0, 3, 3000)
    together = coactivation.pairing(one_hot(2 * expert_T, 6) | one_hot(2 * expert_T + 1, 6))
    assert together.found > together.null_95 and together.strongest is not None and together.strongest[2] == 1
    random_TE = random_top_k(3000, 6, 2, 9)
    apart = coactivation.pairing(random_TE)
    assert apart.found < 2 * apart.null_95
    redrawn_TE = coactivation.redrawn(random_TE, np.random.default_rng(0))
    np.testing.assert_array_equal(redrawn_TE.sum(1), random_TE.sum(1))


def test_paths_are_zero_when_constant_and_one_when_independent() -> None:
    constant = ways.paths(np.zeros((100, 3), np.int16), 4)
    assert constant.entropy == 0 and constant.distinct == 0.01 and constant.share == 1
    top_TL = np.random.default_rng(8).integers(0, 3, (60_000, 3)).astype(np.int16)
    independent = ways.paths(top_TL, 3)
    assert independent.entropy == pytest.approx(1, abs=1e-3)
    assert independent.independent_entropy == pytest.approx(independent.entropy, abs=1e-3)
    assert ways.layer_information(top_TL, 3)[0, 2] < 1e-3
    top_TL[:, 2] = top_TL[:, 0]
    information_LL = ways.layer_information(top_TL, 3)
    assert information_LL[0, 2] == pytest.approx(information_LL[0, 0])
    assert information_LL[0, 2] == pytest.approx(math.log2(3), abs=1e-3)
    assert ways.layer_information_null(top_TL, 3)[0, 2] < 1e-3


def test_paths_leave_out_tokens_without_an_expert_and_say_how_many() -> None:
    found = ways.paths(np.array([[0, 1], [-1, 1], [0, 1], [1, -1]], np.int16), 2)
    assert (found.tokens, found.share, found.distinct) == (2, 0.5, 0.5)
    assert ways.paths(np.full((3, 2), -1, np.int16), 2).tokens == 0


def test_saturation_is_one_for_equal_routings_and_k_over_e_for_unrelated_ones() -> None:
    first_TE, second_TE = random_top_k(20_000, 8, 2, 1), random_top_k(20_000, 8, 2, 2)
    same = saturation.agreement(first_TE, first_TE)
    assert same.overlap == same.jaccard == 1
    apart = saturation.agreement(first_TE, second_TE)
    assert apart.overlap == pytest.approx(2 / 8, abs=0.01)
    assert same.null_overlap == pytest.approx(2 / 8, abs=0.01)
    assert same.null_jaccard == pytest.approx(apart.jaccard, abs=0.01)
    few = saturation.agreement(np.array([[1, 0], [0, 0], [1, 1]], bool), np.array([[1, 0], [0, 0], [0, 1]], bool))
    assert few.overlap == 1 and few.jaccard == 0.75
    assert not saturation.varies(first_TE) and saturation.varies(np.array([[1, 0], [1, 1]], bool))


def test_copies_are_alike_and_unrelated_outputs_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    output_ND = torch.randn(64, 100, generator=generator)
    rotation_DD = torch.linalg.qr(torch.randn(100, 100, generator=generator))[0]
    other_ND = torch.randn(64, 100, generator=generator)
    found_EE = similarity.cka(torch.stack([output_ND, 3 * output_ND @ rotation_DD + 1, other_ND]))
    assert found_EE[0, 1] == pytest.approx(1)
    assert abs(found_EE[0, 2]) < 0.1  # the biased estimate is about 0.6 with more features than tokens
    with pytest.raises(ValueError, match="4 or more"):
        similarity.cka(output_ND[None, :3])


def test_cka_is_the_unbiased_hsic_of_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    x_ND, y_ND = torch.randn(9, 4, generator=generator).double(), torch.randn(9, 3, generator=generator).double()

    def hsic(a_ND: torch.Tensor, b_ND: torch.Tensor) -> float:
        n = len(a_ND)
        k, m = a_ND @ a_ND.T, b_ND @ b_ND.T
        k.fill_diagonal_(0), m.fill_diagonal_(0)
        one = torch.ones(n, dtype=torch.float64)
        middle = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ k @ m @ one)
        return float(((k @ m).trace() + middle) / (n * (n - 3)))

    x_ND, y_ND = x_ND - x_ND.mean(0), y_ND - y_ND.mean(0)
    expected = hsic(x_ND, y_ND) / math.sqrt(hsic(x_ND, x_ND) * hsic(y_ND, y_ND))
    padded = torch.stack([x_ND, torch.nn.functional.pad(y_ND, (0, 1))])
    assert similarity.cka(padded)[0, 1] == pytest.approx(expected, rel=1e-5)


def test_copies_with_reordered_units_match_and_random_experts_match_a_little() -> None:
    generator = torch.Generator().manual_seed(0)
    w13_2FD, w2_DF = torch.randn(2, 12, 30, generator=generator), torch.randn(30, 12, generator=generator)
    order_F = torch.randperm(12, generator=generator)
    assert similarity.matched_cosine(w13_2FD, w2_DF, w13_2FD[:, order_F], w2_DF[:, order_F]) == pytest.approx(1)
    other = torch.randn(2, 12, 30, generator=generator), torch.randn(30, 12, generator=generator)
    assert 0 < similarity.matched_cosine(w13_2FD, w2_DF, *other) < 0.3


def test_router_vectors_are_compared_by_their_cosines() -> None:
    gram_EE = similarity.router_gram(torch.tensor([[1.0, 0], [2, 0], [0, 3]]))
    assert gram_EE[0, 1] == pytest.approx(1) and gram_EE[0, 2] == pytest.approx(0)
    random = similarity.router_gram(torch.randn(40, 256, generator=torch.Generator().manual_seed(0)))
    assert similarity.off_diagonal_rms(random) == pytest.approx(1 / 16, rel=0.1)
    assert similarity.spread([(0, 1), (0, 2), (1, 2)], 2) == [(0, 1), (0, 2)]


def test_rank_correlation_is_one_for_any_monotone_relation_and_within_its_null_for_none() -> None:
    generator = np.random.default_rng(0)
    a_T, unit_T = generator.random(2000), np.arange(2000) // 20
    assert expert_choice.rank_correlation(a_T, np.exp(5 * a_T), unit_T).value == pytest.approx(1)
    none = expert_choice.rank_correlation(a_T, generator.random(2000), unit_T)
    assert not none.beyond_null and none.low < 0 < none.high
    assert math.isnan(expert_choice.rank_correlation(a_T, np.ones(2000), unit_T).value)


def test_tokens_left_out_are_listed_by_share() -> None:
    label_T = np.array([0, 0, 1, 1, 2, 3, 3])
    zero_T = np.array([1, 0, 1, 1, 1, 0, 0], dtype=bool)
    assert expert_choice.left_out(label_T, zero_T, 2) == [(1, 2, 1.0), (0, 2, 0.5), (3, 2, 0.0)]
    bins, mean, count = expert_choice.mean_by_bin(np.array([5, 5, 9]), np.array([1.0, 3, 4]))
    assert (bins.tolist(), mean.tolist(), count.tolist()) == ([5, 9], [2, 4], [2, 1])
