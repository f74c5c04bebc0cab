"""Capacity: who is served first, against plain queues in Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.routers.capacity import token_choice_capacity, within_capacity
from moe.routers.selection import top_k_mask

ORDERS = ["position", "choice", "score", "priority"]
# Few distinct values, so that nearly every example has ties.
SCORES = st.sampled_from([0.0, 0.125, 0.25, 0.25000003, 0.875])


def served(chosen: list[list[bool]], scores: list[list[float]], capacity: int, order: str, valid: list[bool]) -> set:
    """One group as a person would do it: call the tokens up one by one and count the places taken."""
    tokens = [t for t in range(len(chosen)) if valid[t] and any(chosen[t])]
    experts = range(len(chosen[0]))
    wishes = {t: sorted((e for e in experts if chosen[t][e]), key=lambda e: (-scores[t][e], e)) for t in tokens}
    most = max((len(wish) for wish in wishes.values()), default=0)
    if order == "position":
        calls = [(t, e) for t in tokens for e in wishes[t]]
    elif order == "score":
        calls = sorted(((t, e) for t in tokens for e in wishes[t]), key=lambda pair: (-scores[pair[0]][pair[1]], pair))
    else:
        if order == "priority":
            tokens = sorted(tokens, key=lambda t: (-max(scores[t][e] for e in wishes[t]), t))
        calls = [(t, wishes[t][round_]) for round_ in range(most) for t in tokens if round_ < len(wishes[t])]
    taken = dict.fromkeys(experts, 0)
    kept = set()
    for t, e in calls:
        if taken[e] < capacity:
            taken[e] += 1
            kept.add((t, e))
    return kept


def pairs(mask_NE: torch.Tensor) -> set[tuple[int, int]]:
    return {(t, e) for t, e in mask_NE.nonzero().tolist()}


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    """G groups of N tokens with ragged choices (0 to E), ties, padding, and a capacity of each group's own."""
    g, n, e = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(1, 4))

    def table(values: st.SearchStrategy[Any], *shape: int) -> Any:
        if not shape:
            return draw(values)
        return [table(values, *shape[1:]) for _ in range(shape[0])]

    return {
        "chosen": table(st.booleans(), g, n, e),
        "scores": table(SCORES, g, n, e),
        "capacity": table(st.sampled_from([0, 1, 2, 3, 9]), g),
        "valid": table(st.sampled_from([True, True, False]), g, n),
    }


@pytest.mark.parametrize("order", ORDERS)
@given(case=groups())
def test_every_order_serves_as_a_plain_queue_does(order: Any, case: dict[str, Any]) -> None:
    """Padding is poisoned with NaN, infinities and huge scores, and still takes no place."""
    valid_GN = torch.tensor(case["valid"])
    scores_GNE = torch.tensor(case["scores"])
    for poison in (torch.nan, torch.inf, -torch.inf, 1e30):
        poisoned_GNE = scores_GNE.where(valid_GN[..., None], poison)
        capacity_G11 = torch.tensor(case["capacity"])[:, None, None]
        kept_GNE = within_capacity(torch.tensor(case["chosen"]), poisoned_GNE, capacity_G11, order, valid_GN)
        for g, kept_NE in enumerate(kept_GNE):
            tables = case["chosen"][g], case["scores"][g], case["capacity"][g], order, case["valid"][g]
            assert pairs(kept_NE) == served(*tables)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_top_k_choices_of_many_tokens(order: Any, k: int) -> None:
    """Two groups of 70 tokens, E = 6, capacity below and above the demand."""
    generator = torch.Generator().manual_seed(k)
    scores_GNE = torch.randn(2, 70, 6, generator=generator).round(decimals=1).softmax(-1)
    chosen_GNE = top_k_mask(scores_GNE.flatten(0, 1), k).view_as(scores_GNE)
    for capacity in (0, 1, 11 * k, 70, 71):
        kept_GNE = within_capacity(chosen_GNE, scores_GNE, torch.tensor([[[capacity]], [[capacity]]]), order)
        for g in range(2):
            tables = chosen_GNE[g].tolist(), scores_GNE[g].tolist(), capacity, order, [True] * 70
            assert pairs(kept_GNE[g]) == served(*tables)
        if capacity >= 70:
            assert kept_GNE.equal(chosen_GNE)


def one_place(order: Any) -> list[tuple[int, int]]:
    """Three tokens with two choices among three experts, one place each."""
    chosen_GNE = torch.tensor([[[True, True, False], [True, False, True], [False, True, True]]])
    scores_GNE = torch.tensor([[[0.2, 0.6, 0.9], [0.5, 0.9, 0.3], [0.9, 0.7, 0.4]]])
    return sorted(pairs(within_capacity(chosen_GNE, scores_GNE, torch.tensor([[[1]]]), order)[0]))


def test_the_four_orders_worked_out_by_hand() -> None:
    """Choices by score: token 0 wants 1 then 0, token 1 wants 0 then 2, token 2 wants 1 then 2.

    Scores of experts that a token did not choose (0.9 each) must not matter.
    """
    assert one_place("position") == [(0, 0), (0, 1), (1, 2)]
    # First choices: token 0 takes 1, token 1 takes 0, token 2 finds 1 full. Second: 0 is full, token 1 takes 2.
    assert one_place("choice") == [(0, 1), (1, 0), (1, 2)]
    # Expert 0: 0.5 beats 0.2; expert 1: 0.7 beats 0.6; expert 2: 0.4 beats 0.3.
    assert one_place("score") == [(1, 0), (2, 1), (2, 2)]
    # Visit 2 (0.7), 0 (0.6), 1 (0.5). First: 2 takes 1, 0 is refused, 1 takes 0. Second: 2 takes 2, the rest is full.
    assert one_place("priority") == [(1, 0), (2, 1), (2, 2)]


def test_one_choice_a_token_makes_choice_order_the_order_of_position() -> None:
    """k = 1: there are only first choices."""
    scores_GNE = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(0))
    chosen_GNE = top_k_mask(scores_GNE.flatten(0, 1), 1).view_as(scores_GNE)
    capacity_G11 = torch.tensor([3, 9, 20])[:, None, None]
    by_choice_GNE, by_position_GNE = (
        within_capacity(chosen_GNE, scores_GNE, capacity_G11, order) for order in ("choice", "position")
    )
    assert by_choice_GNE.equal(by_position_GNE)
    assert not by_choice_GNE.equal(chosen_GNE)


@pytest.mark.parametrize("order", ORDERS)
def test_identical_tokens_are_served_from_the_front(order: Any) -> None:
    """A12: 5,000 ties, beyond any sort's small-case path: the first C are kept, always."""
    chosen_GNE = torch.ones(1, 5000, 3, dtype=torch.bool)
    kept_GNE = within_capacity(chosen_GNE, torch.full((1, 5000, 3), 0.25), torch.tensor([[[1234]]]), order)
    assert kept_GNE[:, :1234].all() and not kept_GNE[:, 1234:].any()


@pytest.mark.parametrize("order", ORDERS)
def test_a_group_of_padding_keeps_nothing(order: Any) -> None:
    """And its neighbour is not affected."""
    chosen_GNE = torch.ones(2, 3, 2, dtype=torch.bool)
    scores_GNE = torch.full((2, 3, 2), 0.5)
    scores_GNE[0] = torch.nan
    valid_GN = torch.tensor([[False] * 3, [True] * 3])
    kept_GNE = within_capacity(chosen_GNE, scores_GNE, torch.tensor([[[0]], [[2]]]), order, valid_GN)
    assert not kept_GNE[0].any()
    assert kept_GNE[1].tolist() == [[True, True], [True, True], [False, False]]


def changed_by_the_future(order: Any, k: int) -> float:
    """Share of tokens 0..15 whose places change when tokens 16..31 are drawn again: N = 32, E = 8, factor 1."""
    generator = torch.Generator().manual_seed(5)
    scores_GNE = torch.randn(400, 32, 8, generator=generator).softmax(-1)
    other_GNE = scores_GNE.clone()
    other_GNE[:, 16:] = torch.randn(400, 16, 8, generator=generator).softmax(-1)
    capacity_G11 = token_choice_capacity(1.0, torch.full((400, 1, 1), 32), k, 8)
    first_GNE, second_GNE = (
        within_capacity(top_k_mask(s_GNE.flatten(0, 1), k).view_as(s_GNE), s_GNE, capacity_G11, order)[:, :16]
        for s_GNE in (scores_GNE, other_GNE)
    )
    return (first_GNE != second_GNE).any(-1).float().mean().item()


def test_which_orders_let_the_future_decide() -> None:
    """H02: exactly nothing changes by position, and by choice with k = 1; something does everywhere else."""
    assert changed_by_the_future("position", 1) == changed_by_the_future("position", 2) == 0
    assert changed_by_the_future("choice", 1) == 0
    for order, k in [("choice", 2), ("score", 1), ("score", 2), ("priority", 1), ("priority", 2)]:
        assert changed_by_the_future(order, k) > 0.05


@pytest.mark.parametrize(
    "factor, tokens, k, experts, expected",
    [
        (1.5, 6, 1, 3, 3),
        (1.0, 5, 1, 3, 2),
        (1.1, 200, 1, 4, 55),
        (1.25, 7, 2, 6, 3),
        (0.01, 7, 1, 6, 1),
        (2, 0, 2, 6, 0),
    ],
)
def test_capacity_is_rounded_up_but_not_by_a_rounding_error(
    factor: float, tokens: int, k: int, experts: int, expected: int
) -> None:
    """ceil(factor * N * k / E); 1.1 * 200 / 4 is 55 although the product in floating point is above it."""
    capacity_G11 = token_choice_capacity(factor, torch.tensor([[[tokens]]]), k, experts)
    assert capacity_G11.tolist() == [[[expected]]]
    assert math.ceil(round(factor * tokens * k / experts, 9)) == expected
