"""Expert choice: each expert takes its C best tokens of a routing group, C = N c / E."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe.groups import RoutingGroup
from moe.routing import RoutingContext, from_groups, to_groups
from tests.moe import oracle
from tests.moe.helpers import make_router, pairs, select

B, S, E, K = 8, 12, 6, 3
GROUPS: dict[str, dict[str, Any]] = {
    "position": {"group": "position", "group_sequences": 4},
    "flat": {"group": "flat", "group_sequences": 2},
    "flat, one sequence": {"group": "flat", "group_sequences": 1},
    "chunk": {"group": "chunk", "chunk_length": 4, "group_sequences": 2},
}


def expert_choice(**moe: Any) -> Any:
    return make_router(**{"router": "expert_choice", "num_experts": E, "experts_per_token": K, **moe})


def oracle_groups(moe: dict[str, Any], batch: int = B) -> list[list[int]]:
    return oracle.groups(moe["group"], batch, S, moe["group_sequences"], moe.get("chunk_length", 0))


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("padded", [False, True])
def test_every_expert_takes_the_best_of_every_group(kind: str, padded: bool) -> None:
    """Against sorting each group by hand, with many ties; assignments come sorted by expert, then by token."""
    router = expert_choice(**GROUPS[kind])
    scores_TE = torch.randint(1, 9, (B * S, E)) / 9
    valid_BS = torch.ones(B, S, dtype=torch.bool)
    if padded:  # few enough that every group still has C valid tokens
        valid_BS[3, :1] = valid_BS[6, 7] = valid_BS[7, 2] = False
    context = RoutingContext(B, S, valid_BS if padded else None, mode="train")
    routing = select(router, scores_TE, context)
    token_GN = oracle_groups(GROUPS[kind])
    capacity = len(token_GN[0]) * K // E
    expected = oracle.choose_by_expert(scores_TE, token_GN, capacity, valid_BS.flatten().tolist())
    assert pairs(routing) == sorted(expected, key=lambda pair: (pair[1], pair[0]))
    assert routing.capacity == capacity * len(token_GN)
    assert routing.offsets_E.dtype == torch.int32
    assert routing.offsets_E.tolist() == [routing.capacity * (e + 1) for e in range(E)]
    assert routing.counts_E().tolist() == [routing.capacity] * E
    assert routing.dropped() == 0


@pytest.mark.parametrize("kind", GROUPS)
def test_groups_partition_the_tokens_as_documented(kind: str) -> None:
    """`to_groups` puts the right tokens together, and `from_groups` undoes it."""
    moe = GROUPS[kind]
    index_T1 = torch.arange(B * S)[:, None]
    group = RoutingGroup(moe["group"], moe["group_sequences"], S, moe.get("chunk_length", 0))
    index_GN1 = to_groups(index_T1, group)
    assert index_GN1.squeeze(-1).tolist() == oracle_groups(moe)
    assert from_groups(index_GN1, group).equal(index_T1)


def test_a_hand_worked_example() -> None:
    """3 experts, 1 sequence of 6 tokens, c = 1: C = 2. Token 3 is taken by nobody, token 0 by two experts."""
    router = expert_choice(num_experts=3, experts_per_token=1, group="flat", group_sequences=1, route_scale=2.0)
    scores_TE = torch.tensor(
        [[0.9, 0.1, 0.8], [0.8, 0.7, 0.1], [0.1, 0.7, 0.2], [0.5, 0.6, 0.3], [0.2, 0.7, 0.4], [0.3, 0.1, 0.5]]
    )
    routing = select(router, scores_TE, RoutingContext(1, 6, mode="train"))
    assert pairs(routing) == [(0, 0), (1, 0), (1, 1), (2, 1), (0, 2), (5, 2)]
    assert routing.weight_A.tolist() == pytest.approx([1.8, 1.6, 1.4, 1.4, 1.6, 1.0])


def test_weights_are_the_scores_not_renormalised_and_carry_the_gradient() -> None:
    """Each slot's weight is its score times route_scale; the selection itself has no gradient."""
    router = expert_choice(route_scale=2.5, **GROUPS["flat"])
    scores_TE = torch.rand(B * S, E, requires_grad=True)
    routing = select(router, scores_TE, RoutingContext(B, S, mode="train"))
    slot_A = torch.arange(1.0, routing.weight_A.shape[0] + 1)
    (routing.weight_A * slot_A).sum().backward()
    expected_TE = torch.zeros(B * S, E)
    for slot, (token, expert) in enumerate(pairs(routing)):
        expected_TE[token, expert] = 2.5 * (slot + 1)
        assert routing.weight_A[slot] == 2.5 * scores_TE[token, expert]
    assert scores_TE.grad.equal(expected_TE)


def test_slots_that_only_padding_could_fill_have_weight_zero_and_no_gradient() -> None:
    """Group 0 has 3 valid tokens for C = 6 slots, group 1 is all padding: shapes stay, weights are 0, counts true."""
    router = expert_choice(group="flat", group_sequences=1)
    scores_TE = torch.rand(3 * S, E, requires_grad=True)
    valid_BS = torch.ones(3, S, dtype=torch.bool)
    valid_BS[0, :-3] = valid_BS[1] = False
    routing = select(router, scores_TE, RoutingContext(3, S, valid_BS, mode="train"))
    assert routing.capacity == 3 * 6
    assert routing.counts_E().tolist() == [3 + 0 + 6] * E
    valid_A = valid_BS.flatten()[routing.token_A]
    assert routing.weight_A[~valid_A].eq(0).all() and routing.weight_A[valid_A].gt(0).all()
    routing.weight_A.sum().backward()
    assert scores_TE.grad.view(3, S, E)[~valid_BS].eq(0).all()
    assert len(set(pairs(routing))) == len(pairs(routing)), "no token may hold two slots of one expert"


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_scores_of_padding_never_win_a_slot(poison: float) -> None:
    """H01: the choice among valid tokens is that without the padding's scores, whatever they are."""
    router = expert_choice(**GROUPS["flat"])
    scores_TE = torch.rand(B * S, E)
    valid_BS = torch.rand(B, S) > 0.2
    context = RoutingContext(B, S, valid_BS, mode="train")
    clean = select(router, scores_TE, context, logits_TE=scores_TE)
    scores_TE[~valid_BS.flatten()] = poison
    poisoned = select(router, scores_TE, context, logits_TE=scores_TE)
    assert poisoned.token_A.equal(clean.token_A)
    assert poisoned.weight_A.equal(clean.weight_A)


def test_neighbouring_groups_do_not_touch() -> None:
    """Changing the scores of one group's sequences leaves the other groups' choices as they were."""
    for kind in ("position", "flat"):
        router = expert_choice(**GROUPS[kind])
        rows = GROUPS[kind]["group_sequences"]
        scores_TE = torch.rand(B * S, E)
        context = RoutingContext(B, S, mode="train")
        before_BSE = select(router, scores_TE, context).assigned_TE().view(B, S, E)
        scores_TE[: rows * S] = torch.rand(rows * S, E)
        after_BSE = select(router, scores_TE, context).assigned_TE().view(B, S, E)
        assert after_BSE[rows:].equal(before_BSE[rows:])
        assert not after_BSE[:rows].equal(before_BSE[:rows])


def test_the_last_phase_and_evaluation_route_by_threshold() -> None:
    """`threshold_phase` and mode "causal" give a ragged routing by cutoff; the training router does not."""
    router = expert_choice(**GROUPS["flat"])
    scores_TE = torch.rand(B * S, E)
    router.cutoff_E.copy_(torch.linspace(0.2, 0.9, E))
    expected_TE = scores_TE > router.cutoff_E
    for mode in ("train", "causal", "train_router"):
        routing = select(router, scores_TE, RoutingContext(B, S, mode=mode, threshold_phase=True))
        assert routing.capacity is None
        assert routing.assigned_TE().equal(expected_TE)
    assert select(router, scores_TE, RoutingContext(B, S, mode="causal")).assigned_TE().equal(expected_TE)
    for mode in ("train", "train_router"):
        assert select(router, scores_TE, RoutingContext(B, S, mode=mode)).capacity == B * S * K // E
