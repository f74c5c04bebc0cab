"""Expert choice with a limit on a token's experts: the prices solve the paper's programme."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from moe.config import ConfigError
from moe.routers.capped import capped_affinity
from moe.routers.selection import largest_per_row
from moe.routing import RoutingContext
from tests.moe.helpers import make_router, select

LAMBDA = 1e-3


def random_scores(seed: int, groups: int = 2, experts: int = 8, tokens: int = 128, spread: float = 1.0) -> Tensor:
    """Softmax scores (G, E, N)."""
    generator = torch.Generator().manual_seed(seed)
    logits_GNE = spread * torch.randn(groups, tokens, experts, generator=generator)
    return logits_GNE.softmax(-1).transpose(1, 2).contiguous()


def chosen(values_GEN: Tensor, capacity: int) -> Tensor:
    """bool (G, E, N): every expert's top C."""
    index_GEC, _ = largest_per_row(values_GEN, capacity)
    return torch.zeros_like(values_GEN, dtype=torch.bool).scatter_(2, index_GEC, True)


def affinity(ranked_GEN: Tensor, capacity: int) -> Tensor:
    """The paper's A, in float64, from scores less prices: each expert's level by bisection, so that rows sum to C."""
    ranked_GEN = ranked_GEN.double()
    low_GE1 = torch.full_like(ranked_GEN[..., :1], -5.0)
    high_GE1 = -low_GE1
    for _ in range(80):
        level_GE1 = (low_GE1 + high_GE1) / 2
        full_GE1 = ((ranked_GEN + level_GE1) / LAMBDA).clamp_max(0).exp().sum(2, keepdim=True) > capacity
        low_GE1, high_GE1 = torch.where(full_GE1, low_GE1, level_GE1), torch.where(full_GE1, level_GE1, high_GE1)
    return ((ranked_GEN + level_GE1) / LAMBDA).clamp_max(0).exp()


def test_a_case_worked_out_by_hand() -> None:
    """Both experts want tokens 0 and 1. With one expert a token and two slots, expert 0 keeps the tokens where its
    lead is largest: the leads are 0.1, 0.5, 0.05, -0.1, so expert 1 must take 2 and 3.
    """
    scores_GEN = torch.tensor([[[0.9, 0.8, 0.3, 0.1], [0.8, 0.3, 0.25, 0.2]]])
    assert largest_per_row(scores_GEN, 2)[0].tolist() == [[[0, 1], [0, 1]]]
    assert largest_per_row(capped_affinity(scores_GEN, 2, 1), 2)[0].tolist() == [[[0, 1], [2, 3]]]


@pytest.mark.parametrize("cap", [8, 9, 100])
def test_a_cap_of_all_experts_is_plain_expert_choice(cap: int) -> None:
    """Bit for bit."""
    scores_GEN = random_scores(0)
    assert capped_affinity(scores_GEN, 32, cap).equal(scores_GEN)


@pytest.mark.parametrize("cap, spread", [(2, 0.3), (2, 1.0), (3, 1.0), (3, 3.0)])
def test_the_prices_solve_the_programme(cap: int, spread: float) -> None:
    """Its optimality conditions, in float64: with rows that sum to C, no token has more than b experts, and a token
    has a price only where its b experts are used up.
    """
    scores_GEN = random_scores(1, spread=spread)
    ranked_GEN = capped_affinity(scores_GEN, 32, cap, iterations=4000, entropy=LAMBDA)
    affinity_GEN = affinity(ranked_GEN, 32)
    torch.testing.assert_close(affinity_GEN.sum(2), torch.full((2, 8), 32.0, dtype=torch.float64))
    taken_GN = affinity_GEN.sum(1)
    assert taken_GN.max() <= cap + 0.06
    price_GEN = scores_GEN - ranked_GEN
    assert price_GEN.min() >= 0
    torch.testing.assert_close(price_GEN, price_GEN[:, :1].expand(-1, 8, -1), atol=1e-6, rtol=0)
    dear_GN = price_GEN[:, 0] > 2e-3
    assert dear_GN.any() and (taken_GN[dear_GN] >= cap - 0.06).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_worth_what_the_best_is(seed: int) -> None:
    """Against an exact solver of the linear programme: E = 5, N = 15, C = 6, b = 2."""
    scores_EN = random_scores(seed, groups=1, experts=5, tokens=15)[0]
    rows = [[float(i // 15 == e) for i in range(75)] for e in range(5)]
    columns = [[float(i % 15 == n) for i in range(75)] for n in range(15)]
    best = linprog(-scores_EN.flatten().numpy(), columns, [2] * 15, rows, [6] * 5, bounds=(0, 1))
    best_EN = torch.tensor(best.x).view(5, 15) > 0.5
    assert chosen(scores_EN[None], 6).sum(1).max() > 2
    capped_EN = chosen(capped_affinity(scores_EN[None], 6, 2, iterations=3000), 6)[0]
    assert capped_EN.equal(best_EN)


@pytest.mark.parametrize("cap, iterations, share", [(2, 300, 0.06), (3, 300, 0.01), (2, 3000, 0.02), (3, 3000, 0.005)])
def test_few_tokens_exceed_the_cap_and_fewer_with_more_iterations(cap: int, iterations: int, share: float) -> None:
    """The mean stays c = 2 exactly. Plain expert choice gives a quarter of the tokens more than 2 experts."""
    scores_GEN = random_scores(3, tokens=512)
    fan_out_GN = chosen(capped_affinity(scores_GEN, 128, cap, iterations=iterations), 128).sum(1)
    plain_GN = chosen(scores_GEN, 128).sum(1)
    assert fan_out_GN.float().mean() == 2
    exceeding, before = ((x_GN > cap).float().mean().item() for x_GN in (fan_out_GN, plain_GN))
    assert exceeding <= share
    assert exceeding < before / 2


def test_padding_is_taken_only_when_valid_tokens_have_all_their_experts() -> None:
    """9 of 12 tokens are valid, E = 4, C = 6. With b = 2 they fill 18 slots and padding 6; with b = 3, all 24."""
    scores_GEN = random_scores(4, groups=1, experts=4, tokens=12)
    scores_GEN[..., [0, 5, 11]] = -torch.inf
    taken_N = chosen(capped_affinity(scores_GEN, 6, 2, iterations=3000), 6)[0].sum(0)
    assert taken_N[[1, 2, 3, 4, 6, 7, 8, 9, 10]].tolist() == [2] * 9
    assert taken_N.sum() == 24
    assert chosen(capped_affinity(scores_GEN, 6, 3, iterations=3000), 6)[..., [0, 5, 11]].sum() == 0


def test_groups_do_not_meet_and_a_group_of_padding_is_harmless() -> None:
    """Each group alone gives the same, up to rounding."""
    scores_GEN = random_scores(5, groups=3)
    scores_GEN[1] = -torch.inf
    together_GEN = capped_affinity(scores_GEN, 32, 3)
    assert together_GEN.isfinite().all()
    for g in range(3):
        torch.testing.assert_close(capped_affinity(scores_GEN[g : g + 1], 32, 3)[0], together_GEN[g])


def test_identical_tokens_give_identical_prices() -> None:
    """The cap cannot tell them apart: every expert takes the first C."""
    ranked_GEN = capped_affinity(torch.full((1, 4, 12), 0.25), 6, 2)
    assert largest_per_row(ranked_GEN, 6)[0].tolist() == [[list(range(6))] * 4]


def test_more_slots_than_the_cap_allows_is_refused() -> None:
    """8 experts * 32 slots for 128 tokens need a cap of 2."""
    with pytest.raises(ValueError, match="must be at least 2"):
        capped_affinity(random_scores(0), 32, 1)


def capped_router(**moe: Any) -> Any:
    sizes = {"router": "expert_choice", "num_experts": 8, "experts_per_token": 2, "group_sequences": 2}
    return make_router(**{**sizes, **moe})


def token_scores(seed: int, tokens: int) -> Tensor:
    """Softmax scores (T, E)."""
    return random_scores(seed, groups=1, tokens=tokens)[0].T.contiguous()


@pytest.mark.parametrize(
    "group", [{"group": "flat"}, {"group": "chunk", "chunk_length": 16}, {"group": "position", "group_sequences": 16}]
)
def test_the_router_keeps_every_expert_full_and_fewer_tokens_above_the_cap(group: dict[str, Any]) -> None:
    """Loads stay equal, the mean stays 2, and each group's choice is that of its prices."""
    scores_TE, context = token_scores(6, 16 * 32), RoutingContext(16, 32, mode="train")
    capped, plain = (select(capped_router(**group, expert_cap=cap), scores_TE, context) for cap in (2, 0))
    assert capped.counts_E().tolist() == [128] * 8
    assert capped.capacity == 128
    above, before = ((routing.assigned_TE().sum(1) > 2).sum().item() for routing in (capped, plain))
    assert before > 100 and above < before / 3
    assert select(capped_router(**group, expert_cap=8), scores_TE, context).token_A.equal(plain.token_A)


def test_cutoffs_and_evaluation_know_nothing_of_the_cap() -> None:
    """Cutoffs are those of plain scores, so that thresholds give each expert its share; weights are plain scores."""
    scores_TE = token_scores(7, 128)
    routers = capped_router(expert_cap=2), capped_router()
    for router in routers:
        routing = select(router, scores_TE, RoutingContext(4, 32, mode="train"))
        assert routing.weight_A.equal(scores_TE[routing.token_A, routing.expert_A()])
        router.after_step()
    assert routers[0].cutoff_E.equal(routers[1].cutoff_E)
    served = [select(router, scores_TE, RoutingContext(4, 32)).token_A for router in routers]
    assert served[0].equal(served[1])


def test_padding_that_an_expert_takes_has_no_weight() -> None:
    """A02: a third of the batch is padding with NaN scores; it fills slots, counts nowhere and weighs nothing."""
    scores_TE = token_scores(8, 128)
    valid_BS = torch.rand(4, 32, generator=torch.Generator().manual_seed(0)) > 1 / 3
    scores_TE[~valid_BS.flatten()] = torch.nan
    routing = select(capped_router(expert_cap=2), scores_TE, RoutingContext(4, 32, valid_BS, mode="train"))
    padding_A = ~valid_BS.flatten()[routing.token_A]
    assert padding_A.any() and routing.weight_A[padding_A].eq(0).all()
    assert routing.weight_A.isfinite().all()
    assert routing.token_A.numel() == 128 * 2


def test_a_cap_below_the_mean_is_refused() -> None:
    """c = 2 experts a token on average cannot be at most 1."""
    with pytest.raises(ConfigError, match="expert_cap = 1: must be at least experts_per_token = 2"):
        capped_router(expert_cap=1)
