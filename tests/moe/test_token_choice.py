"""Token choice: which experts, with which of the published weights, and what a capacity drops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moe.config import ConfigError, MoEConfig
from moe.routing import RoutingContext
from tests.moe.helpers import make_layer, make_router, pairs


def token_choice(**moe: Any) -> Any:
    return make_router(
        **{"router": "token_choice", "num_experts": 4, "experts_per_token": 2, "group_sequences": 1, **moe}
    )


def weights(**moe: Any) -> list[float]:
    """Weights that the logits [2, 1, 0, -1] lead to, through the whole router."""
    router = token_choice(**moe)
    with torch.no_grad():
        router.weight_ED.zero_()
        router.weight_ED[:, 0] = torch.tensor([2.0, 1.0, 0.0, -1.0])
    routing = router(torch.eye(7)[:1], RoutingContext(1, 1))
    assert pairs(routing) == [(0, 0), (0, 1)]
    return routing.weight_A.tolist()


WEIGHTS = {
    "softmax, then top-k": ({}, [0.64391, 0.23688]),
    "softmax, renormalised": ({"renormalize": True}, [0.73106, 0.26894]),
    "sigmoid": ({"score": "sigmoid"}, [0.88080, 0.73106]),
    "sigmoid, normalised": ({"score": "sigmoid", "renormalize": True}, [0.54645, 0.45355]),
    "scale after normalising": ({"renormalize": True, "route_scale": 2.5}, [1.82765, 0.67235]),
    "scale": ({"route_scale": 2.5}, [1.60978, 0.59220]),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_weights_of_each_convention(name: str) -> None:
    """A09: known answers for logits [2, 1, 0, -1] and k = 2."""
    moe, expected = WEIGHTS[name]
    assert weights(**moe) == pytest.approx(expected, abs=2e-5)


def test_logits_are_handed_on_as_logits() -> None:
    """A07: losses get logits and scores, not probabilities under the name of logits: P0 is 0.71123."""
    router = token_choice()
    with torch.no_grad():
        router.weight_ED.zero_()
        router.weight_ED[0, 0] = 2
    routing = router(torch.eye(7)[:1], RoutingContext(1, 1))
    assert routing.logits_TE.tolist() == [[2, 0, 0, 0]]
    assert routing.scores_TE[0, 0].item() == pytest.approx(0.71123, abs=1e-5)
    assert routing.logits_TE.softmax(-1).equal(routing.scores_TE)


def test_renormalising_one_expert_is_refused() -> None:
    """A09: the weight would be exactly 1 and the router would learn nothing."""
    with pytest.raises(ConfigError, match="renormalize = false"):
        MoEConfig(router="token_choice", experts_per_token=1, renormalize=True)


def test_renormalised_weights_are_finite_when_every_sigmoid_underflows() -> None:
    """All scores 0: weights 0 and gradient 0, not NaN."""
    logits_TE = torch.full((3, 4), -200.0, requires_grad=True)
    routing = token_choice(score="sigmoid", renormalize=True).select(
        logits_TE.sigmoid(), logits_TE, RoutingContext(1, 3)
    )
    routing.weight_A.sum().backward()
    assert routing.weight_A.eq(0).all()
    assert logits_TE.grad.eq(0).all()


def test_every_valid_token_gets_exactly_k_and_padding_none() -> None:
    """A02: the counters are [1, 1, 1, 1] for four tokens on four experts, not [5, 1, 1, 1] with four pads."""
    router = token_choice(experts_per_token=1)
    logits_TE = torch.cat((10 * torch.eye(4), torch.tensor([[10.0, 0, 0, 0]] * 4)))
    valid_BS = torch.tensor([[True] * 4 + [False] * 4])
    routing = router.select(logits_TE.softmax(-1), logits_TE, RoutingContext(1, 8, valid_BS, mode="train"))
    assert routing.counts_E().tolist() == [1, 1, 1, 1]
    assert routing.counts_E().dtype == torch.int64
    assert pairs(routing) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_assignments_are_sorted_by_expert_then_token() -> None:
    """The order is a function of the decision alone, and the offsets end each expert's run."""
    routing = token_choice()(torch.randn(15, 7), RoutingContext(3, 5))
    found = pairs(routing)
    assert found == sorted(found, key=lambda pair: (pair[1], pair[0]))
    assert len(found) == 30 and routing.capacity is None
    counts = [sum(expert == e for _, expert in found) for e in range(4)]
    assert routing.offsets_E.tolist() == [sum(counts[: e + 1]) for e in range(4)]
    assert routing.counts_E().tolist() == counts


def test_counting_is_exact_beyond_a_bytes_range() -> None:
    """A11: one token to each of 300 experts gives 300 ones."""
    router = token_choice(num_experts=300, experts_per_token=1)
    logits_TE = torch.eye(300)[torch.randperm(300)]
    assert router.select(logits_TE.softmax(-1), logits_TE, RoutingContext(1, 300)).counts_E().tolist() == [1] * 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearly_equal_logits_are_told_apart_in_any_precision(dtype: torch.dtype) -> None:
    """A12: [1.000, 1.001, 0, 0] chooses expert 1, also in a bf16 model and under autocast, where both round to 1."""
    layer = make_layer(8, router="token_choice", num_experts=4, experts_per_token=1, expert_width=8, group_sequences=1)
    with torch.no_grad():
        layer.router.weight_ED.zero_()
        layer.router.weight_ED[:, 0] = torch.tensor([1.0, 1.001, 0.0, 0.0])
    layer.to(dtype)
    assert layer.router.weight_ED.dtype == torch.float32
    assert layer.experts.w2_EDF.dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        routing = layer.router(torch.eye(8, dtype=dtype)[:1], RoutingContext(1, 1))
    assert pairs(routing) == [(0, 1)]
    assert routing.weight_A.dtype == routing.scores_TE.dtype == torch.float32


def preferring(expert_T: list[int], num_experts: int) -> torch.Tensor:
    """Logits of tokens that each want one expert."""
    return 5.0 * nn.functional.one_hot(torch.tensor(expert_T), num_experts)


def test_capacity_keeps_the_first_tokens_of_a_group_and_reports_the_rest() -> None:
    """Two groups of 6 tokens, E = 3, k = 1, factor 1.5: 3 slots an expert and group; the 4th for expert 0 drops."""
    router = token_choice(num_experts=3, experts_per_token=1, capacity_factor=1.5)
    wanted = [0, 1, 0, 0, 0, 0, 2, 0, 2, 2, 1, 2]
    logits_TE = preferring(wanted, 3)
    routing = router.select(logits_TE.softmax(-1), logits_TE, RoutingContext(2, 6, mode="train"))
    assert pairs(routing) == [(0, 0), (2, 0), (3, 0), (7, 0), (1, 1), (10, 1), (6, 2), (8, 2), (9, 2)]
    assert routing.dropped() == 3
    assert routing.chosen_TE.sum(0).tolist() == [6, 2, 4]


def test_capacity_is_rounded_up() -> None:
    """Factor 1, N = 5, k = 1, E = 3: ceil(5/3) = 2."""
    router = token_choice(num_experts=3, experts_per_token=1, capacity_factor=1.0)
    logits_TE = preferring([1] * 5, 3)
    routing = router.select(logits_TE.softmax(-1), logits_TE, RoutingContext(1, 5, mode="train"))
    assert pairs(routing) == [(0, 1), (1, 1)]


def test_capacity_is_not_rounded_up_by_a_rounding_error() -> None:
    """Factor 1.1, N = 200, k = 1, E = 4 is 55 slots; in floating point the product is a hair above."""
    assert 1.1 * 200 / 4 > 55
    router = token_choice(num_experts=4, experts_per_token=1, capacity_factor=1.1)
    logits_TE = preferring([2] * 200, 4)
    routing = router.select(logits_TE.softmax(-1), logits_TE, RoutingContext(1, 200, mode="train"))
    assert routing.counts_E().tolist() == [0, 0, 55, 0]


def test_padding_takes_no_capacity() -> None:
    """H01: 4 real tokens want expert 0, capacity 2 of 4: the same two drop with 4 pads placed before them."""
    moe: dict[str, Any] = {"router": "token_choice", "num_experts": 2, "experts_per_token": 1, "expert_width": 8}
    layer = make_layer(8, capacity_factor=1.0, group_sequences=1, **moe)
    with torch.no_grad():
        layer.router.weight_ED.zero_()
        layer.router.weight_ED[0, 0] = 3
    x_BSD = torch.randn(1, 4, 8)
    x_BSD[..., 0] = 1
    pads_BSD = torch.randn(1, 4, 8)
    pads_BSD[..., 0] = 100
    seen = []
    context = RoutingContext(1, 4, mode="train", observe=lambda _, routing: seen.append(routing))
    alone_BSD = layer(x_BSD, context)
    valid_BS = torch.tensor([[False] * 4 + [True] * 4])
    context = RoutingContext(1, 8, valid_BS, mode="train", observe=lambda _, routing: seen.append(routing))
    padded_BSD = layer(torch.cat((pads_BSD, x_BSD), 1), context)
    torch.testing.assert_close(padded_BSD[:, 4:], alone_BSD)
    assert padded_BSD[:, :4].eq(0).all()
    assert [routing.dropped().item() for routing in seen] == [2, 2]
    assert alone_BSD[0, 2:].eq(0).all() and alone_BSD[0, :2].abs().sum() > 0


@pytest.mark.parametrize("mode", ["train", "train_router", "causal"])
def test_only_training_drops(mode: Any) -> None:
    """H01: evaluation keeps every choice, whatever the training capacity was."""
    router = token_choice(num_experts=3, experts_per_token=1, capacity_factor=0.5)
    logits_TE = preferring([0] * 7, 3)
    routing = router.select(logits_TE.softmax(-1), logits_TE, RoutingContext(1, 7, mode=mode))
    assert len(pairs(routing)) == (7 if mode == "causal" else 2)
    assert routing.dropped() == (0 if mode == "causal" else 5)
