"""BASE: assignments are balanced and best, training assigns, evaluation is greedy."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from moe.config import MoEConfig
from moe.initialization import build_model
from moe.routers.assignment import balanced_assignment
from moe.routing import RoutingContext
from tests.moe.helpers import SMALL, make_layer, make_router, pairs

E = 4


def random_scores(seed: int, *shape: int) -> Tensor:
    """Normal scores whose experts differ in popularity."""
    generator = torch.Generator().manual_seed(seed)
    popularity_E = torch.randn(shape[-1], generator=generator)
    return torch.randn(*shape, generator=generator) + 2 * popularity_E


def best_by_trying_all(scores_NE: Tensor) -> list[int]:
    """Every way to give each token an expert, with loads that differ by at most 1."""
    table = scores_NE.tolist()
    tokens, experts = scores_NE.shape
    balanced = (
        choice
        for choice in product(range(experts), repeat=tokens)
        if max(counts := [choice.count(e) for e in range(experts)]) - min(counts) <= 1
    )
    return list(max(balanced, key=lambda choice: sum(row[e] for row, e in zip(table, choice, strict=True))))


def experts(assigned_NE: Tensor) -> list[int]:
    """The one expert of each token."""
    assert assigned_NE.sum(1).eq(1).all()
    return assigned_NE.int().argmax(1).tolist()


@pytest.mark.parametrize("tokens", range(1, 8))
def test_it_is_the_best_of_all_balanced_assignments(tokens: int) -> None:
    """1 to 7 tokens, 3 experts, with and without a remainder and with fewer tokens than experts; 4 groups at once."""
    scores_GNE = random_scores(tokens, 4, tokens, 3)
    assigned_GNE = balanced_assignment(scores_GNE)
    for scores_NE, assigned_NE in zip(scores_GNE, assigned_GNE, strict=True):
        assert experts(assigned_NE) == best_by_trying_all(scores_NE)


def test_a_case_by_hand() -> None:
    """All four want expert 0. Its two places go to the tokens that would lose most elsewhere: 3 and 2, not 1 and 1."""
    scores_GNE = torch.tensor([[[5.0, 4.0], [9.0, 6.0], [3.0, 2.0], [1.0, -1.0]]])
    assert experts(balanced_assignment(scores_GNE)[0]) == [1, 0, 1, 0]


@pytest.mark.parametrize("tokens", [96, 101, 103])
def test_larger_ones_are_worth_what_a_linear_programme_finds(tokens: int) -> None:
    """Loads between floor(N/8) and ceil(N/8); the programme's best is known to be a whole assignment."""
    scores_NE = random_scores(tokens, tokens, 8).double()
    assigned_NE = balanced_assignment(scores_NE[None])[0]
    load_E = assigned_NE.sum(0)
    assert set(load_E.tolist()) <= {tokens // 8, -(-tokens // 8)}
    by_token = torch.eye(tokens).repeat_interleave(8, 1).numpy()
    by_expert = torch.eye(8).repeat(1, tokens)
    best = linprog(
        -scores_NE.flatten().numpy(),
        torch.cat((by_expert, -by_expert)).numpy(),
        [-(-tokens // 8)] * 8 + [-(tokens // 8)] * 8,
        by_token,
        [1] * tokens,
        bounds=(0, 1),
    )
    assert scores_NE[assigned_NE].sum().item() == pytest.approx(-best.fun, abs=1e-6)
    assert torch.bincount(scores_NE.argmax(1)).max() > 2 * tokens / 8


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_padding_is_not_assigned_and_takes_no_share(poison: float) -> None:
    """The valid tokens of a group are assigned as if they stood alone; a group of padding is assigned nowhere."""
    scores_GNE = random_scores(0, 3, 11, E)
    valid_GN = torch.ones(3, 11, dtype=torch.bool)
    valid_GN[0, [0, 3, 10]] = valid_GN[1] = False
    assigned_GNE = balanced_assignment(torch.where(valid_GN[..., None], scores_GNE, poison), valid_GN)
    alone_GNE = balanced_assignment(scores_GNE[:1, valid_GN[0]])
    assert assigned_GNE[0, valid_GN[0]].equal(alone_GNE[0])
    assert not assigned_GNE[~valid_GN].any()
    assert assigned_GNE[0].sum(0).tolist() == [2] * E


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_not_finite_are_refused(value: float) -> None:
    """With the place and the value."""
    scores_GNE = random_scores(1, 3, 5, E)
    scores_GNE[2, 4, 1] = value
    with pytest.raises(ValueError, match=rf"token 4 of routing group 2 for expert 1 is {value}.*finite"):
        balanced_assignment(scores_GNE)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e4, 1e30])
def test_scores_of_any_size_and_ties_give_balance_every_time(size: float) -> None:
    """A12: equal inputs, equal assignments."""
    scores_GNE = size * torch.randint(2, (1, 14, E), generator=torch.Generator().manual_seed(0)).float()
    first_GNE = balanced_assignment(scores_GNE)
    assert sorted(first_GNE[0].sum(0).tolist()) == [3, 3, 4, 4]
    assert all(balanced_assignment(scores_GNE.clone()).equal(first_GNE) for _ in range(5))


def base(**moe: Any) -> Any:
    return make_router(**{"router": "base", "num_experts": E, "experts_per_token": 1, "group_sequences": 1, **moe})


def route(router: Any, logits_TE: Tensor, context: RoutingContext) -> Any:
    return router.select(router.score(logits_TE), logits_TE, context)


@pytest.mark.parametrize("mode", ["train", "train_router"])
def test_training_assigns_each_group_for_itself(mode: Any) -> None:
    """Four sequences of 3 tokens in groups of two."""
    logits_TE = random_scores(2, 12, E)
    routing = route(base(group_sequences=2), logits_TE, RoutingContext(4, 3, mode=mode))
    expected = best_by_trying_all(logits_TE[:6]) + best_by_trying_all(logits_TE[6:])
    assert sorted(pairs(routing)) == list(enumerate(expected))
    assert expected != logits_TE.argmax(1).tolist()


def test_evaluation_is_greedy() -> None:
    """H02: each token alone decides, by its logit: sigmoids of 50 and 60 are both 1."""
    logits_TE = random_scores(3, 12, E)
    logits_TE[7] = torch.tensor([50.0, 60.0, 0.0, 55.0])
    routing = route(base(), logits_TE, RoutingContext(2, 6))
    assert sorted(pairs(routing)) == list(enumerate(logits_TE.argmax(1).tolist()))
    assert logits_TE[7].argmax() == 1


@pytest.mark.parametrize("mode", ["train", "causal"])
def test_padding_a_batch_of_padding_and_one_token(mode: Any) -> None:
    """H01: a row with pads before it routes as it does alone."""
    router, logits_TE = base(), random_scores(4, 6, E)
    padded_TE = torch.cat((torch.full((5, E), torch.nan), logits_TE))
    valid_BS = torch.arange(11)[None] >= 5
    alone = route(router, logits_TE, RoutingContext(1, 6, mode=mode))
    padded = route(router, padded_TE, RoutingContext(1, 11, valid_BS, mode=mode))
    assert [(token - 5, expert) for token, expert in pairs(padded)] == pairs(alone)
    assert pairs(route(router, logits_TE, RoutingContext(2, 3, torch.zeros(2, 3, dtype=torch.bool), mode=mode))) == []
    assert pairs(route(router, logits_TE[:1], RoutingContext(1, 1, mode=mode))) == [(0, logits_TE[0].argmax().item())]


def test_the_weight_is_a_sigmoid_and_carries_the_only_gradient() -> None:
    """alpha = sigmoid(x.w_e); its derivative is alpha (1 - alpha) at the assigned pair and 0 elsewhere."""
    logits_TE = random_scores(5, 9, E).requires_grad_()
    routing = route(base(), logits_TE, RoutingContext(1, 9, mode="train"))
    alpha_TE = torch.where(routing.assigned_TE(), logits_TE.detach().sigmoid(), 0.0)
    torch.testing.assert_close(routing.weight_TE(), alpha_TE)
    routing.weight_TE().sum().backward()
    torch.testing.assert_close(logits_TE.grad, alpha_TE * (1 - alpha_TE))


def test_the_layer_is_alpha_times_the_experts_output() -> None:
    """With the block's residual this is the published x + alpha FFN(norm(x))."""
    layer = make_layer(8, router="base", num_experts=E, experts_per_token=1, expert_width=16, group_sequences=1)
    x_BSD = torch.randn(1, 7, 8)
    seen: list[Any] = []
    y_BSD = layer(x_BSD, RoutingContext(1, 7, mode="train", observe=lambda _, routing: seen.append(routing)))
    for token, expert in pairs(seen[0]):
        x_D = x_BSD[0, token]
        gate_F, up_F = layer.experts.w13_E2FD[expert] @ x_D
        ffn_D = layer.experts.w2_EDF[expert] @ (torch.nn.functional.silu(gate_F) * up_F)
        alpha = torch.sigmoid(x_D @ layer.router.weight_ED[expert])
        torch.testing.assert_close(y_BSD[0, token], alpha * ffn_D, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_experts", [4, 24, 31])
def test_centroids_start_orthogonal_with_length_a_tenth(num_experts: int) -> None:
    """Rows while there are no more experts than inputs (24), else columns; the same whenever the seed is."""
    moe = MoEConfig(router="base", num_experts=num_experts, experts_per_token=1, expert_width=8)
    first, second, other = (build_model(SMALL, moe, seed=seed).blocks["1"].feed_forward.router for seed in (3, 3, 4))
    weight_ED = first.weight_ED.detach()
    gram = weight_ED @ weight_ED.T if num_experts <= 24 else weight_ED.T @ weight_ED
    torch.testing.assert_close(gram, 0.01 * torch.eye(len(gram)))
    assert weight_ED.equal(second.weight_ED) and not weight_ED.equal(other.weight_ED)


def test_centroids_are_the_drawn_rows_made_orthogonal_one_after_the_other() -> None:
    """Gram-Schmidt: the same on every machine, without the signs that a decomposition leaves open."""
    router = base(num_experts=6)
    drawn_ED = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        router.weight_ED.copy_(drawn_ED)
    expected: list[Tensor] = []
    for row_D in drawn_ED.double():
        for other_D in expected:
            row_D = row_D - row_D @ other_D * other_D
        expected.append(row_D / row_D.norm())
    router.reset_parameters()
    torch.testing.assert_close(router.weight_ED.detach().double(), 0.1 * torch.stack(expected), rtol=1e-4, atol=1e-6)
