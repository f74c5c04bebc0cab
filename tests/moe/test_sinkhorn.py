"""Sinkhorn routing: the scaled matrix against a plain loop, and which mode uses it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.routers.selection import top_k_mask
from moe.routers.sinkhorn import sinkhorn_bias
from moe.routing import RoutingContext
from tests.moe.helpers import make_router, pairs

E = 6


def random_logits(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    """Normal logits whose experts differ in popularity."""
    generator = torch.Generator().manual_seed(seed)
    popularity_E = torch.randn(shape[-1], generator=generator)
    return spread * (torch.randn(*shape, generator=generator) + 2 * popularity_E)


def scaled(logits_GNE: Tensor, valid_GN: Tensor | None = None, **options: Any) -> Tensor:
    """The Sinkhorn matrix."""
    return (logits_GNE + sinkhorn_bias(logits_GNE, valid_GN, **options)).softmax(-1)


def scaled_by_a_loop(logits_NE: Tensor, iterations: int = 300) -> Tensor:
    """exp(logits), its rows and columns divided in turn, in float64."""
    matrix = [[math.exp(value) for value in row] for row in logits_NE.double().tolist()]
    experts = range(len(matrix[0]))
    for _ in range(iterations):
        loads = [sum(row[e] for row in matrix) for e in experts]
        matrix = [[row[e] / loads[e] * len(matrix) / len(loads) for e in experts] for row in matrix]
        matrix = [[value / sum(row) for value in row] for row in matrix]
    return torch.tensor(matrix, dtype=torch.float64)


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_rows_and_columns_have_their_mass(spread: float) -> None:
    """Each of 40 tokens 1, each of 6 experts 40/6. Before, the busiest expert had several times its share."""
    logits_GNE = random_logits(0, 3, 40, E, spread=spread)
    matrix_GNE = scaled(logits_GNE)
    torch.testing.assert_close(matrix_GNE.sum(2), torch.ones(3, 40))
    torch.testing.assert_close(matrix_GNE.sum(1), torch.full((3, E), 40 / 6), rtol=2e-3, atol=0)
    assert (logits_GNE.softmax(-1).sum(1).amax(1) > 1.25 * 40 / 6).all()


def test_the_matrix_is_the_plain_loops() -> None:
    """Both at their limit."""
    logits_GNE = random_logits(1, 2, 11, E)
    for logits_NE, matrix_NE in zip(logits_GNE, scaled(logits_GNE.double(), iterations=300), strict=True):
        torch.testing.assert_close(matrix_NE, scaled_by_a_loop(logits_NE))


def test_two_tokens_and_two_experts_by_hand() -> None:
    """exp(logits) [[9, 1], [1, 1]] scales to [[p, 1-p], [1-p, p]], and scaling keeps the odds ratio 9: p = 3/4."""
    matrix_GNE = scaled(torch.tensor([[[math.log(9), 0.0], [0.0, 0.0]]]))
    torch.testing.assert_close(matrix_GNE, torch.tensor([[[0.75, 0.25], [0.25, 0.75]]]))


def test_a_number_added_to_all_of_a_tokens_logits_changes_nothing() -> None:
    """Nor does one added to all logits of an expert change the matrix."""
    logits_GNE = random_logits(2, 2, 15, E).double()
    by_token_GN1 = 10 * random_logits(3, 2, 15, 1).double()
    torch.testing.assert_close(sinkhorn_bias(logits_GNE + by_token_GN1), sinkhorn_bias(logits_GNE))
    by_expert_E = 10 * random_logits(4, E).double()
    torch.testing.assert_close(
        scaled(logits_GNE + by_expert_E, iterations=300), scaled(logits_GNE, iterations=300), rtol=1e-6, atol=1e-9
    )


def test_logits_of_ten_thousand_do_not_overflow() -> None:
    """Every token prefers expert 0 by about 1e4; its second choices are spread, and so is the load then."""
    logits_GNE = random_logits(5, 1, 60, E)
    logits_GNE[..., 0] += 1e4
    logits_GNE[..., 5] -= 1e4
    bias_G1E = sinkhorn_bias(logits_GNE)
    assert bias_G1E.isfinite().all()
    load_E = (logits_GNE + bias_G1E).softmax(-1).sum(1)[0]
    torch.testing.assert_close(load_E, torch.full((E,), 10.0), rtol=0.02, atol=0)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_padding_has_no_mass(poison: float) -> None:
    """What is valid is scaled as if it stood alone; a group of padding only gets bias 0."""
    logits_GNE = random_logits(6, 3, 9, E)
    valid_GN = torch.ones(3, 9, dtype=torch.bool)
    valid_GN[0, [0, 4, 8]] = valid_GN[1] = False
    poisoned_GNE = torch.where(valid_GN[..., None], logits_GNE, poison)
    bias_G1E = sinkhorn_bias(poisoned_GNE, valid_GN)
    torch.testing.assert_close(bias_G1E[0], sinkhorn_bias(logits_GNE[:1, valid_GN[0]])[0])
    torch.testing.assert_close(bias_G1E[2], sinkhorn_bias(logits_GNE[2:])[0])
    assert bias_G1E[1].eq(0).all()


def test_identical_tokens_stay_together() -> None:
    """Any logits alike for all tokens scale to 1/E; equal ones keep a bias of exactly 0."""
    logits_GNE = random_logits(7, 1, 1, E).expand(1, 30, E)
    torch.testing.assert_close(scaled(logits_GNE), torch.full((1, 30, E), 1 / E))
    router = sinkhorn(experts_per_token=2)
    routing = route(router, logits_GNE[0], RoutingContext(1, 30, mode="train"))
    assert sorted(routing.counts_E().tolist()) == [0, 0, 0, 0, 30, 30]
    equal = route(router, torch.zeros(30, E), RoutingContext(1, 30, mode="train"))
    assert equal.counts_E().tolist() == [30, 30, 0, 0, 0, 0]


def sinkhorn(**moe: Any) -> Any:
    return make_router(**{"router": "sinkhorn", "num_experts": E, "experts_per_token": 2, "group_sequences": 1, **moe})


def route(router: Any, logits_TE: Tensor, context: RoutingContext) -> Any:
    return router.select(router.score(logits_TE), logits_TE, context)


def top(matrix_NE: Tensor, k: int, first: int = 0) -> set[tuple[int, int]]:
    """Pairs of each row's k largest."""
    return {
        (first + t, e) for t, row in enumerate(matrix_NE.tolist()) for e in sorted(range(E), key=lambda e: -row[e])[:k]
    }


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("mode", ["train", "train_router"])
def test_training_takes_the_best_of_the_scaled_matrix_of_each_group(mode: Any, k: int) -> None:
    """Four sequences of 9 tokens in groups of two."""
    logits_TE = random_logits(8, 36, E)
    routing = route(sinkhorn(experts_per_token=k, group_sequences=2), logits_TE, RoutingContext(4, 9, mode=mode))
    expected = top(scaled_by_a_loop(logits_TE[:18]), k) | top(scaled_by_a_loop(logits_TE[18:]), k, 18)
    assert set(pairs(routing)) == expected
    assert expected != top(logits_TE, k)
    plain_E = top_k_mask(logits_TE, k).sum(0)
    assert routing.counts_E().max() < plain_E.max()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_evaluation_takes_the_plain_best(k: int) -> None:
    """H02: each token alone decides."""
    logits_TE = random_logits(9, 20, E)
    routing = route(sinkhorn(experts_per_token=k), logits_TE, RoutingContext(2, 10))
    assert set(pairs(routing)) == top(logits_TE, k)


def test_in_training_the_future_can_decide_and_in_evaluation_it_cannot() -> None:
    """H02: the last 15 of 30 tokens drawn again."""
    router, logits_TE = sinkhorn(), random_logits(10, 30, E)
    other_TE = torch.cat((logits_TE[:15], random_logits(11, 15, E)))
    for mode, same in [("train", False), ("causal", True)]:
        first_TE, second_TE = (
            route(router, values_TE, RoutingContext(1, 30, mode=mode)).assigned_TE()[:15]
            for values_TE in (logits_TE, other_TE)
        )
        assert first_TE.equal(second_TE) == same


@pytest.mark.parametrize("mode", ["train", "causal"])
def test_padding_is_not_routed_and_decides_nothing(mode: Any) -> None:
    """H01: a row with pads before it routes as it does alone."""
    router, logits_TE = sinkhorn(), random_logits(12, 12, E)
    padded_TE = torch.cat((torch.full((5, E), torch.nan), logits_TE))
    valid_BS = torch.arange(17)[None] >= 5
    alone = route(router, logits_TE, RoutingContext(1, 12, mode=mode))
    padded = route(router, padded_TE, RoutingContext(1, 17, valid_BS, mode=mode))
    assert [(token - 5, expert) for token, expert in pairs(padded)] == pairs(alone)


@pytest.mark.parametrize("mode", ["train", "causal"])
def test_a_batch_of_padding_is_routed_nowhere_and_one_token_is_routed(mode: Any) -> None:
    router = sinkhorn()
    nothing = router(torch.randn(8, 7), RoutingContext(2, 4, torch.zeros(2, 4, dtype=torch.bool), mode=mode))
    assert pairs(nothing) == []
    assert len(pairs(router(torch.randn(1, 7), RoutingContext(1, 1, mode=mode)))) == 2


def test_weights_are_unscaled_scores_and_carry_the_only_gradient() -> None:
    """A sigmoid for k = 1, a softmax over all experts for k = 2; the bias of the experts has no part in them."""
    logits_TE = random_logits(13, 10, E).requires_grad_()
    for k, scores_TE in [(1, logits_TE.sigmoid()), (2, logits_TE.softmax(-1))]:
        routing = route(sinkhorn(experts_per_token=k), logits_TE, RoutingContext(1, 10, mode="train"))
        mask_TE = routing.assigned_TE()
        torch.testing.assert_close(routing.weight_TE(), torch.where(mask_TE, scores_TE, 0.0))
        (found_TE,) = torch.autograd.grad(routing.weight_TE().square().sum(), logits_TE)
        (expected_TE,) = torch.autograd.grad(scores_TE[mask_TE].square().sum(), logits_TE)
        torch.testing.assert_close(found_TE, expected_TE)


def test_scores_that_underflow_do_not_tie() -> None:
    """Softmax scores of experts 1 to 5 are 0; the second choice is still the second largest logit."""
    logits_TE = torch.tensor([[1000.0, 1, 2, 5, 3, 4]])
    assert pairs(route(sinkhorn(), logits_TE, RoutingContext(1, 1))) == [(0, 0), (0, 3)]
