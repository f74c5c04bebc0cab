"""Balance by a bias: which experts it chooses, that weights never see it, and how counts move it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe.config import ConfigError, MoEConfig
from moe.routing import RoutingContext
from tests.moe.helpers import make_layer, make_router, pairs, select


def loss_free(**moe: Any) -> Any:
    sizes = {"router": "loss_free", "num_experts": 4, "experts_per_token": 2, "group_sequences": 1}
    return make_router(**{**sizes, **moe})


def with_bias(bias: list[float], **moe: Any) -> Any:
    router = loss_free(num_experts=len(bias), **moe)
    router.bias_E.copy_(torch.tensor(bias))
    return router


def count(router: Any, counts: list[int], mode: Any = "train", **context: Any) -> None:
    """One pass in which each expert is the only choice of so many tokens."""
    expert_T = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    scores_TE = torch.nn.functional.one_hot(expert_T, len(counts)).float()
    select(router, scores_TE, RoutingContext(1, len(expert_T), mode=mode, **context))


def test_a_group_that_is_not_kept_gives_no_expert_even_where_biased_scores_are_negative() -> None:
    """A10: biased scores [-0.1, -0.2 | -0.3, -0.4], one group kept: {0, 1}; masked by 0, {2, 3} would win."""
    router = with_bias([-0.6, -0.7, -0.8, -0.9], expert_groups=2, expert_groups_kept=1)
    assert pairs(select(router, torch.full((1, 4), 0.5), RoutingContext(1, 1))) == [(0, 0), (0, 1)]


def test_the_bias_chooses_and_the_weights_do_not_see_it() -> None:
    """A10: scores [.6, .5, .4, .3], bias [0, 0, 1, 1]: experts 2 and 3 with the shares of 0.4 and 0.3."""
    scores_TE = torch.tensor([[0.6, 0.5, 0.4, 0.3]])
    plain = select(with_bias([0.0, 0.0, 1.0, 1.0]), scores_TE, RoutingContext(1, 1))
    assert pairs(plain) == [(0, 2), (0, 3)]
    assert plain.weight_A.tolist() == pytest.approx([0.4, 0.3])
    shares = select(with_bias([0.0, 0.0, 1.0, 1.0], renormalize=True), scores_TE, RoutingContext(1, 1))
    assert shares.weight_A.tolist() == pytest.approx([0.57143, 0.42857], abs=1e-5)


def test_tiny_scores_keep_their_weights_under_a_large_bias() -> None:
    """A10: 1e-8 under a bias of 12 cannot be had back by subtraction in fp32; two such scores weigh a half each."""
    scores_TE = torch.tensor([[1e-8, 0.9, 1e-8]])
    assert (scores_TE[0, 0] + 12) - 12 == 0
    routing = select(with_bias([12.0, 0.0, 12.0], renormalize=True), scores_TE, RoutingContext(1, 1))
    assert pairs(routing) == [(0, 0), (0, 2)]
    assert routing.weight_A.tolist() == [0.5, 0.5]


def chosen_by_hand(scores: list[float], bias: list[float], groups: int, kept: int, k: int) -> set[int]:
    """DeepSeek-V3's selection of one token, in words."""
    biased = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(biased) // groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    worth = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in members]
    best = sorted(range(groups), key=lambda g: (-worth[g], g))[:kept]
    eligible = [e for g in best for e in members[g]]
    return set(sorted(eligible, key=lambda e: (-biased[e], e))[:k])


@pytest.mark.parametrize(("groups", "kept", "k"), [(4, 2, 3), (3, 1, 4), (6, 3, 5), (12, 5, 4), (1, 1, 2), (2, 2, 7)])
def test_group_limited_selection_is_the_plain_loop(groups: int, kept: int, k: int) -> None:
    """Twelve experts, thirty tokens, scores from a grid of nine so that many tie, biases of either sign."""
    bias = (torch.randint(-8, 9, (12,)) / 8).tolist()
    router = with_bias(bias, experts_per_token=k, expert_groups=groups, expert_groups_kept=kept)
    scores_TE = torch.randint(9, (30, 12)) / 8
    assigned_TE = router.select(scores_TE, scores_TE, RoutingContext(1, 30)).assigned_TE()
    for token, scores in enumerate(scores_TE.tolist()):
        found = set(assigned_TE[token].nonzero().flatten().tolist())
        assert found == chosen_by_hand(scores, bias, groups, kept, k)


@pytest.mark.parametrize(
    ("moe", "key"),
    [
        ({"expert_groups": 3}, "expert_groups = 3: must divide num_experts = 8"),
        ({"expert_groups": 4, "expert_groups_kept": 5}, "expert_groups_kept = 5: must be from 1 to"),
        ({"expert_groups": 4, "expert_groups_kept": 1, "experts_per_token": 3}, "1 of 4 groups hold only 2 experts"),
    ],
)
def test_groups_that_cannot_work_are_refused(moe: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        MoEConfig(router="loss_free", num_experts=8, **moe)


def test_distances_to_another_decision_are_numbers_where_a_group_is_taken_whole() -> None:
    """Two groups of two, one kept, k = 2: only the groups' contest, 1.1 against 0.9, can change anything."""
    router = with_bias([0.0] * 4, expert_groups=2, expert_groups_kept=1)
    routing = select(router, torch.tensor([[0.8, 0.3, 0.7, 0.2]]), RoutingContext(1, 1))
    assert pairs(routing) == [(0, 0), (0, 1)]
    assert router.decision_distance(routing).tolist() == [pytest.approx([0.1] * 4)]


@pytest.mark.parametrize(
    ("update", "counts", "expected"),
    [
        ("sign", [6, 2], [-1, 1]),
        ("sign", [4, 4], [0, 0]),
        ("sign", [0, 0], [0, 0]),
        ("sign", [3, 1, 2], [-1, 1, 0]),
        ("sign", [6, 3, 0], [-1, 0, 1]),
        ("sign", [6, 1, 2], [-4 / 3, 2 / 3, 2 / 3]),  # signs -1, 1, 1, less their mean
        ("proportional", [6, 2], [-0.5, 0.5]),
        ("proportional", [4, 4], [0, 0]),
        ("proportional", [0, 0], [0, 0]),
        ("proportional", [5, 0, 1], [-1.5, 1, 0.5]),
    ],
)
def test_counts_move_the_biases(update: str, counts: list[int], expected: list[float]) -> None:
    """A11: by the rate towards more load or less; proportionally, in units of the mean load; recentred."""
    router = loss_free(num_experts=len(counts), experts_per_token=1, bias_update=update, bias_rate=0.001)
    count(router, counts)
    router.after_step()
    assert router.bias_E.tolist() == pytest.approx([0.001 * value for value in expected], abs=1e-9)


def test_one_token_in_millions_is_seen() -> None:
    """A11: 2^25 + 1, 2^25 and 2^25 - 1 are one and the same number in fp32."""
    router = loss_free(num_experts=3, experts_per_token=1)
    router.step_load_E += 2**25 + torch.tensor([1, 0, -1])
    router.after_step()
    assert router.bias_E.tolist() == pytest.approx([-0.001, 0, 0.001], abs=1e-9)


def test_biases_keep_a_mean_of_zero() -> None:
    router = loss_free(num_experts=5, experts_per_token=1, bias_rate=0.1)
    for counts in ([9, 0, 0, 1, 0], [0, 3, 3, 3, 6], [7, 1, 1, 1, 2]):
        count(router, counts)
        router.after_step()
        assert router.bias_E.mean().abs() < 1e-7 and router.bias_E.abs().max() > 0.05


def test_a_bf16_model_keeps_its_biases_in_fp32() -> None:
    """A11: 1 + 0.001 is 1.001; in bf16 it would stay at 1."""
    layer = make_layer(8, router="loss_free", num_experts=2, experts_per_token=1, expert_width=8, group_sequences=1)
    layer.router.bias_E.copy_(torch.tensor([1.0, -1.0]))
    layer.to(torch.bfloat16)
    assert layer.router.bias_E.dtype == torch.float32 and layer.experts.w2_EDF.dtype == torch.bfloat16
    layer.router.step_load_E += torch.tensor([2, 6])
    layer.router.after_step()
    assert layer.router.bias_E.tolist() == pytest.approx([1.001, -1.001], abs=1e-7)


def test_counts_are_whole_numbers_of_64_bits() -> None:
    """A11: one token to each of 300 experts gives 300 ones."""
    router = loss_free(num_experts=300, experts_per_token=1)
    count(router, [1] * 300)
    assert router.step_load_E.dtype == torch.int64 and router.step_load_E.tolist() == [1] * 300


@pytest.mark.parametrize("mode", ["causal", "train_router"])
def test_evaluation_moves_nothing(mode: Any) -> None:
    """A11: a pass in between is not counted."""
    router = loss_free(num_experts=2, experts_per_token=1)
    count(router, [6, 2])
    count(router, [0, 50], mode=mode)
    router.after_step()
    assert router.bias_E.tolist() == pytest.approx([-0.001, 0.001], abs=1e-9)


def test_a_step_that_is_not_taken_is_forgotten() -> None:
    """A11: what a refused step counted does not reach the next."""
    router = loss_free(num_experts=2, experts_per_token=1)
    count(router, [0, 50])
    router.forget_step()
    count(router, [6, 2])
    router.after_step()
    assert router.bias_E.tolist() == pytest.approx([-0.001, 0.001], abs=1e-9)
    assert router.step_load_E.eq(0).all()


def test_padding_is_not_counted() -> None:
    """A02: eight pads that want expert 1."""
    router = loss_free(num_experts=2, experts_per_token=1)
    count(router, [6, 10], valid_BS=torch.arange(16)[None] < 8)
    assert router.step_load_E.tolist() == [6, 2]


def test_what_a_capacity_drops_is_counted_too() -> None:
    """The bias answers what tokens ask for; counting what fits would call a full expert balanced."""
    router = loss_free(num_experts=2, experts_per_token=1, capacity_factor=1.0)
    count(router, [8, 0])
    assert router.step_load_E.tolist() == [8, 0]


@pytest.mark.parametrize("recompute", [False, True])
def test_biases_get_no_gradient_and_recompute_counts_once(recompute: bool) -> None:
    """A11: 16 tokens, k = 2: 32, not 64."""
    layer = make_layer(8, router="loss_free", num_experts=4, expert_width=8, group_sequences=1)
    x_BSD, context = torch.randn(2, 8, 8, requires_grad=True), RoutingContext(2, 8, mode="train")
    y_BSD = checkpoint(layer, x_BSD, context, use_reentrant=False) if recompute else layer(x_BSD, context)
    y_BSD.sum().backward()
    assert layer.router.step_load_E.sum() == 32
    assert not layer.router.bias_E.requires_grad and layer.router.bias_E.grad is None
    assert layer.router.weight_ED.grad.abs().max() > 0


@pytest.mark.parametrize("cuts", [[6], [1] * 6, [2, 4]], ids=str)
def test_biases_move_once_a_step_however_many_micro_batches(cuts: list[int]) -> None:
    """They are what one pass over the whole batch gives, and stand still until the step is taken."""
    whole, parts = loss_free(), loss_free()
    parts.load_state_dict(whole.state_dict())
    for _ in range(3):
        x_BSD = torch.randn(6, 5, 7)
        whole(x_BSD.flatten(0, 1), RoutingContext(6, 5, mode="train"))
        before_E = parts.bias_E.clone()
        for part in x_BSD.split(cuts):
            parts(part.flatten(0, 1), RoutingContext(len(part), 5, mode="train"))
            assert parts.bias_E.equal(before_E)
        whole.after_step(), parts.after_step()
        assert parts.bias_E.equal(whole.bias_E) and parts.bias_E.ne(before_E).any()


def violation(count_E: Tensor) -> float:
    """MaxVio: largest load over the mean, less 1."""
    return (count_E.max() / count_E.float().mean() - 1).item()


@pytest.mark.parametrize("update", ["sign", "proportional"])
def test_it_balances_a_lopsided_router(update: str) -> None:
    """Eight experts whose logits differ by up to 2: MaxVio over 1 falls below 0.15 in 150 steps on fresh tokens."""
    router = loss_free(num_experts=8, bias_rate=0.005 if update == "sign" else 0.05, bias_update=update)
    with torch.no_grad():
        router.weight_ED.mul_(0.3)
        router.weight_ED[:, 0] = torch.linspace(-1, 1, 8)
    found = []
    for _ in range(150):
        x_TD = torch.randn(512, 7)
        x_TD[:, 0] = 1
        found.append(violation(router(x_TD, RoutingContext(1, 512, mode="train")).counts_E()))
        router.after_step()
    assert found[0] > 1
    assert sum(found[-20:]) / 20 < 0.15
