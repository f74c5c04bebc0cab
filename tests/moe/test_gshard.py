"""GShard's random second expert: how often it is asked, and that its weight does not depend on the draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.routing import RoutingContext
from tests.moe.helpers import make_router, select

E = 5


def gshard(**moe: Any) -> Any:
    return make_router(**{"router": "gshard", "num_experts": E, "group_sequences": 1, **moe})


def scores_with_share(share: float, tokens: int) -> Tensor:
    """Experts 3 and 1 share 0.6, of which 1 gets `share`; the other three are alike."""
    row_E = torch.full((E,), 0.4 / 3)
    row_E[1], row_E[3] = 0.6 * share, 0.6 * (1 - share)
    return row_E.expand(tokens, E)


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5])
def test_the_second_expert_is_asked_with_twice_its_share(share: float) -> None:
    """min(1, 2 g2), g2 its share of the two, over 20,000 tokens and within four standard errors; the first always."""
    tokens = 20_000
    routing = select(gshard(), scores_with_share(share, tokens), RoutingContext(1, tokens, mode="train", seed=1))
    count_E = routing.counts_E()
    assert count_E[3] == tokens and count_E[[0, 2, 4]].eq(0).all()
    error = (2 * share * (1 - 2 * share) / tokens) ** 0.5
    assert count_E[1].item() / tokens == pytest.approx(2 * share, abs=4 * error + 1e-9)


@pytest.mark.parametrize("mode", ["causal", "train_router"])
def test_outside_training_the_second_expert_is_always_asked(mode: Any) -> None:
    routing = select(gshard(), scores_with_share(0.26, 200), RoutingContext(1, 200, mode=mode))
    assert routing.counts_E().tolist() == [0, 200, 0, 200, 0]


def test_weights_are_shares_of_the_two_whether_or_not_the_second_is_asked() -> None:
    """Scores 0.42 and 0.18: 0.7 and 0.3, also where the first stands alone."""
    routing = select(gshard(), scores_with_share(0.3, 50), RoutingContext(1, 50, mode="train"))
    alone_T = routing.assigned_TE().sum(1) == 1
    assert 0 < alone_T.sum() < 50
    first_T, second_T = routing.weight_TE()[:, 3], routing.weight_TE()[:, 1]
    torch.testing.assert_close(first_T, torch.full((50,), 0.7))
    torch.testing.assert_close(second_T, torch.where(alone_T, 0.0, 0.3))


def test_the_router_learns_from_the_share_of_an_expert_that_stands_alone() -> None:
    """d/dh1 of g1/(g1+g2) is g1 g2 of the shares, on both logits; a softmax renormalised over one would give 0."""
    logits_TE = scores_with_share(0.3, 50).log().requires_grad_()
    router = gshard()
    routing = router.select(router.score(logits_TE), logits_TE, RoutingContext(1, 50, mode="train"))
    (token,) = (routing.assigned_TE().sum(1) == 1).nonzero()[0].tolist()
    routing.weight_TE()[token].sum().backward()
    gradient_E = logits_TE.grad[token]
    assert gradient_E.tolist() == pytest.approx([0, -0.21, 0, 0.21, 0], abs=1e-6)


def test_draws_differ_between_tokens_steps_and_layers_and_not_between_repeats() -> None:
    router, scores_TE = gshard(), scores_with_share(0.25, 400)

    def asked(**context: Any) -> Tensor:
        return select(router, scores_TE, RoutingContext(4, 100, mode="train", **context)).assigned_TE()[:, 1]

    first_T = asked()
    assert asked().equal(first_T)
    others = [asked(step=1), asked(seed=1), first_T.roll(1)]
    router.layer = 1
    for other_T in [*others, asked()]:
        assert 150 < (other_T == first_T).sum() < 250


def test_an_unasked_second_expert_takes_no_place_and_drops_nothing() -> None:
    """24 places for 60 tokens that all have second expert 1: of those that ask, the first 24 get it."""
    router = gshard(capacity_factor=1.0)
    routing = select(router, scores_with_share(0.35, 60), RoutingContext(1, 60, mode="train"))
    asked_T = routing.chosen_TE[:, 1]
    assert 24 < asked_T.sum() < 60
    assert routing.assigned_TE()[:, 1].nonzero().flatten().tolist() == asked_T.nonzero().flatten().tolist()[:24]
    assert routing.dropped() == (60 - 24) + (asked_T.sum() - 24)


@pytest.mark.parametrize(("second", "load"), [(0.5, [0, 0.5, 0, 0.5, 0]), (1e-9, [0, 0, 0, 1, 0])])
def test_the_load_that_balance_sees_is_what_was_asked(second: float, load: list[float]) -> None:
    """An equal second expert is asked always, a hopeless one never."""
    router = gshard(balance_scope="global", balance_coefficient=0.01)
    scores_TE = torch.tensor([0, second, 0, 1 - second, 0]).expand(40, E)
    router.select(scores_TE, scores_TE, RoutingContext(1, 40, mode="train"))
    router.after_step()
    assert router.load_E.tolist() == load
