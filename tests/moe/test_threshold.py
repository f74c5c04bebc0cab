"""Threshold routing and the moving average behind it, with every value worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe.routing import RoutingContext
from tests.moe import oracle
from tests.moe.helpers import calibrate, make_model, make_router, pairs, select

# One sequence of 4 tokens is a group, E = 2, c = 1: C = 2. The second largest of the columns: 0.5 and 0.25.
FIRST = [[0.5, 0.125], [0.25, 0.25], [0.75, 0.0], [0.125, 0.875]]
# 0.25 and 0.75.
SECOND = [[0.0, 0.75], [0.25, 1.0], [0.125, 0.25], [1.0, 0.5]]


def threshold(**moe: Any) -> Any:
    sizes = {
        "router": "threshold",
        "num_experts": 2,
        "experts_per_token": 1,
        "group_sequences": 1,
        "threshold_decay": 0.75,
    }
    return make_router(**{**sizes, **moe})


def see(router: Any, *groups: list[list[float]], valid: list[list[bool]] | None = None, mode: Any = "train") -> None:
    """Show the router one micro-batch of groups."""
    scores_TE = torch.tensor(groups).flatten(0, 1)
    valid_BS = None if valid is None else torch.tensor(valid)
    select(router, scores_TE, RoutingContext(len(groups), 4, valid_BS, mode=mode), logits_TE=scores_TE)


@pytest.mark.parametrize(("score", "expected"), [("softmax", 0.5), ("sigmoid", 0.5)])
def test_cutoffs_start_at_a_uniform_routers_score(score: Any, expected: float) -> None:
    """1/E for softmax (5 experts: 0.2), 1/2 for sigmoid."""
    assert threshold(score=score).cutoff_E.tolist() == [expected] * 2
    five = threshold(score=score, num_experts=5)
    assert five.cutoff_E.tolist() == pytest.approx([0.2 if score == "softmax" else 0.5] * 5)


@pytest.mark.parametrize("name", ["threshold", "expert_choice"])
def test_the_first_step_is_the_mean_over_groups_of_the_cth_largest_score(name: str) -> None:
    """Groups with C-th scores (0.5, 0.25) and (0.25, 0.75): cutoffs (0.375, 0.5), whatever they were before."""
    router = threshold(router=name)
    router.cutoff_E.copy_(torch.tensor([0.9, 0.1]))
    see(router, FIRST, SECOND)
    router.after_step()
    assert router.cutoff_E.tolist() == pytest.approx([0.375, 0.5], abs=1e-7)
    assert router.updates == 1


def test_the_average_is_plain_at_first_and_moving_afterwards() -> None:
    """Decay 0.75: rates 1, 1/2, 1/3, 1/4, then 1/4 for ever."""
    router = threshold()
    expected = [0.0, 0.0]
    for step, batch in enumerate([FIRST, SECOND, SECOND, FIRST, FIRST, SECOND, FIRST]):
        seen = [0.5, 0.25] if batch is FIRST else [0.25, 0.75]
        rate = max(1 / (step + 1), 0.25)
        expected = [c + rate * (s - c) for c, s in zip(expected, seen, strict=True)]
        see(router, batch)
        router.after_step()
        assert router.cutoff_E.tolist() == pytest.approx(expected, abs=1e-6)
    assert router.updates == 7
    # The last two steps once more without the loop: 4 steps of mean (0.375, 0.5), then F, S, F at rate 1/4.
    a = ((0.375 * 0.75 + 0.125) * 0.75 + 0.0625) * 0.75 + 0.125
    assert router.cutoff_E[0].item() == pytest.approx(a, abs=1e-6)


def test_nothing_moves_before_after_step_and_a_step_counts_once() -> None:
    """The forward pass reads cutoffs and never moves them; a second call without new groups does nothing."""
    router = threshold()
    see(router, FIRST)
    assert router.cutoff_E.tolist() == [0.5, 0.5]
    router.after_step()
    before = router.cutoff_E.clone()
    assert before.tolist() == [0.5, 0.25]
    router.after_step()
    assert router.cutoff_E.equal(before)
    assert router.updates == 1


@pytest.mark.parametrize("mode", ["causal", "train_router"])
@pytest.mark.parametrize("name", ["threshold", "expert_choice"])
def test_evaluation_between_steps_leaves_no_trace(mode: Any, name: str) -> None:
    """A11: neither the cutoffs nor what the step has gathered so far."""
    router, other = threshold(router=name), threshold(router=name)
    for r in (router, other):
        see(r, FIRST)
    see(router, SECOND, SECOND, SECOND, mode=mode)
    router.after_step(), other.after_step()
    assert router.cutoff_E.tolist() == other.cutoff_E.tolist() == [0.5, 0.25]
    see(router, SECOND, mode=mode)
    router.after_step()
    assert router.updates == 1


def test_micro_batches_add_up_to_one_large_batch() -> None:
    """Three groups in two unequal micro-batches give the mean over groups, not the mean of means."""
    split, whole = threshold(), threshold()
    see(split, FIRST), see(split, SECOND, SECOND)
    see(whole, FIRST, SECOND, SECOND)
    split.after_step(), whole.after_step()
    assert split.cutoff_E.equal(whole.cutoff_E)
    assert split.cutoff_E.tolist() == pytest.approx([1 / 3, 1.75 / 3], abs=1e-6)


def test_padding_does_not_lower_a_cutoff() -> None:
    """Half of the valid tokens each: the best of two, although C is 2; padding's own scores never enter."""
    router = threshold()
    few, two, none = [True, False, False, False], [False, True, False, True], [False] * 4
    see(router, FIRST, SECOND, SECOND, valid=[few, two, none])
    router.after_step()
    assert router.cutoff_E.tolist() == [1.0, 1.0]
    see(router, FIRST, FIRST, valid=[few, none])
    router.after_step()
    assert router.cutoff_E.tolist() == [1.0, 1.0], "half of one token is none: such groups do not count"
    assert router.updates == 1


@pytest.mark.parametrize("name", ["threshold", "expert_choice"])
def test_cutoffs_of_padded_rows_are_those_of_their_valid_tokens(name: str) -> None:
    """Six valid tokens behind six of padding, against the six alone."""
    scores_TE = torch.rand(6, 3)
    alone, padded = (threshold(router=name, num_experts=3, allow_leak=True) for _ in range(2))
    select(alone, scores_TE, RoutingContext(1, 6, mode="train"))
    valid_BS = torch.arange(12)[None] >= 6
    select(padded, torch.cat([torch.full((6, 3), torch.nan), scores_TE]), RoutingContext(1, 12, valid_BS, mode="train"))
    alone.after_step(), padded.after_step()
    assert alone.cutoff_E.equal(padded.cutoff_E)


def test_a_token_meets_every_expert_whose_cutoff_it_reaches() -> None:
    """At the cutoff or above; none, one or all experts; padding none."""
    router = threshold(num_experts=3, route_scale=2.0)
    router.cutoff_E.copy_(torch.tensor([0.5, 0.25, 0.125]))
    scores_TE = torch.tensor([[0.5, 0.24, 0.124], [0.75, 0.5, 0.25], [0.0, 0.0, 0.0], [0.75, 0.5, 0.25]])
    valid_BS = torch.tensor([[True, True, True, False]])
    routing = select(router, scores_TE, RoutingContext(1, 4, valid_BS), logits_TE=scores_TE)
    assert pairs(routing) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert routing.weight_A.tolist() == [1.0, 1.5, 1.0, 0.5]
    assert routing.counts_E().tolist() == [2, 1, 1]
    assert sorted(pairs(routing)) == oracle.choose_by_cutoff(scores_TE, [0.5, 0.25, 0.125], [True, True, True, False])


def test_an_expert_whose_scores_all_tie_is_not_deserted() -> None:
    """With one expert every softmax score is 1, and so is the cutoff."""
    router = make_router(num_experts=1, experts_per_token=1, group_sequences=1, allow_leak=True)
    scores_TE = torch.ones(6, 1)
    select(router, scores_TE, RoutingContext(1, 6, mode="train"))
    router.after_step()
    assert select(router, scores_TE, RoutingContext(1, 6)).counts_E().tolist() == [6]


def test_state_stays_fp32_when_the_model_is_cast() -> None:
    """A11: in bf16 a cutoff of 1.0 could not move by 0.001. The experts are cast, the router is not."""
    model = make_model(router="threshold", group="flat", group_sequences=2).to(torch.bfloat16)
    router = model.moe_layers()[0].router
    assert model.moe_layers()[0].experts.w2_EDF.dtype == torch.bfloat16
    for tensor in (router.weight_ED, router.cutoff_E, router.step_sum_E, router.step_groups_E):
        assert tensor.dtype == torch.float32
    assert router.updates.dtype == torch.int64
    router.cutoff_E.fill_(1.0)
    router.cutoff_E += 0.001
    assert router.cutoff_E.tolist() == pytest.approx([1.001] * 6, abs=1e-7)


def test_cutoffs_are_saved_and_the_unfinished_step_is_not() -> None:
    """What a checkpoint holds: cutoffs and the number of updates, per layer."""
    model = calibrate(make_model(router="expert_choice", group="flat", group_sequences=2))
    state = model.state_dict()
    for index in range(3):
        prefix = f"blocks.{index}.feed_forward.router."
        kept = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
        assert kept == {"weight_ED", "cutoff_E", "updates"}
    other = make_model(seed=99, router="expert_choice", group="flat", group_sequences=2)
    other.load_state_dict(state)
    token_BS = torch.randint(37, (2, 9))
    assert other(token_BS).equal(model(token_BS))


def test_calibrated_cutoffs_reproduce_expert_choices_load() -> None:
    """On its calibration batch, one group, each expert takes C - 1 tokens or C: the C-th score is the cutoff."""
    router = threshold(num_experts=6, experts_per_token=2, group="flat", group_sequences=4)
    x_TD = torch.randn(4 * 9, 7)
    router(x_TD, RoutingContext(4, 9, mode="train"))
    router.after_step()
    counts = router(x_TD, RoutingContext(4, 9)).counts_E()
    assert ((counts == 11) | (counts == 12)).all()


@pytest.mark.parametrize(
    ("kind", "sequences", "chunk"), [("position", 8, 0), ("position", 16, 0), ("chunk", 8, 8), ("flat", 8, 0)]
)
def test_cutoffs_let_through_the_right_number_however_small_the_choosing_group_is(
    kind: str, sequences: int, chunk: int
) -> None:
    """The C-th largest of few scores is a biased cutoff: over 8 tokens with C = 1 it would let through half of c."""
    length, num_experts, k = 64, 16, 2
    router = make_router(
        **{"num_experts": num_experts, "experts_per_token": k, "group": kind, "group_sequences": sequences},
        **{"chunk_length": chunk, "allow_leak": True},
    )
    generator = torch.Generator().manual_seed(1)

    def scores() -> torch.Tensor:
        return torch.randn(sequences * length, num_experts, generator=generator).softmax(-1)

    for _ in range(60):
        select(router, scores(), RoutingContext(sequences, length, mode="train"))
        router.after_step()
    fresh = [select(router, scores(), RoutingContext(sequences, length)).counts_E().sum().item() for _ in range(30)]
    assert sum(fresh) / 30 / (sequences * length) == pytest.approx(k, rel=0.03)


def test_a_step_that_is_not_taken_leaves_no_trace() -> None:
    router = make_router(num_experts=4, experts_per_token=2, group_sequences=2, allow_leak=True)
    scores_TE = torch.rand(2 * 6, 4)
    select(router, scores_TE, RoutingContext(2, 6, mode="train"))
    router.forget_step()
    before = router.cutoff_E.clone()
    router.after_step()
    assert router.cutoff_E.equal(before)
    assert router.updates == 0


@pytest.mark.parametrize("name", ["threshold", "expert_choice"])
def test_where_every_expert_takes_every_token_thresholds_let_everyone_pass(name: str) -> None:
    """c = E: the mean of lowest scores would keep half of the lowest out."""
    router = threshold(router=name, experts_per_token=2, allow_leak=True)
    see(router, FIRST, SECOND)
    router.after_step()
    assert router.cutoff_E.tolist() == [0, 0]
