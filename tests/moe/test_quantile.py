"""Quantile balancing: beta against a plain sort, and what it does to the load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.routers.selection import top_k_mask
from moe.routing import RoutingContext
from tests.moe import oracle
from tests.moe.helpers import make_router

B, S, E, K = 4, 6, 6, 2
VALID_BS = torch.arange(S) < torch.tensor([6, 2, 0, 0])[:, None]


def quantile(**moe: Any) -> Any:
    sizes = {"router": "quantile", "num_experts": E, "experts_per_token": K, "group_sequences": 2}
    return make_router(**{**sizes, **moe})


def see(router: Any, scores_TE: Tensor, **context: Any) -> Any:
    """One pass over B sequences of S."""
    return router.select(scores_TE, scores_TE, RoutingContext(B, S, **{"mode": "train", **context}))


def beta_by_hand(scores_TE: Tensor, beta: list[float], valid: list[bool], k: int = K) -> list[float]:
    """Sort each expert's margins over a token's (k+1)-th best; take the one after its share; mean over groups."""
    experts, table = range(scores_TE.shape[1]), scores_TE.tolist()
    found = []
    for members in oracle.groups("flat", B, S, 2):
        rows = [table[t] for t in members if valid[t]]
        if not rows:
            continue
        alphas = [sorted((row[e] - beta[e] for e in experts), reverse=True)[k] for row in rows]
        share = len(rows) * k // len(experts)
        found.append(
            [sorted((row[e] - a for row, a in zip(rows, alphas, strict=True)), reverse=True)[share] for e in experts]
        )
    means = [sum(column) / len(found) for column in zip(*found, strict=True)]
    return [mean - sum(means) / len(means) for mean in means]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_beta_is_the_plain_sorts_quantile(k: int, padded: bool) -> None:
    """Three steps, each from the last one's beta; a group of padding only has no say, and padding may be NaN."""
    router, expected = quantile(experts_per_token=k), [0.0] * E
    valid = VALID_BS.flatten().tolist() if padded else [True] * (B * S)
    for _ in range(3):
        scores_TE = torch.randn(B * S, E).softmax(-1)
        expected = beta_by_hand(scores_TE, expected, valid, k)
        poisoned_TE = torch.where(torch.tensor(valid)[:, None], scores_TE, torch.nan)
        see(router, poisoned_TE, valid_BS=VALID_BS if padded else None)
        router.after_step()
        assert router.beta_E.tolist() == pytest.approx(expected, abs=1e-6)
    assert router.beta_E.abs().max() > 0.01


def test_a_token_takes_the_largest_scores_less_beta_and_weighs_them_by_the_plain_scores() -> None:
    router = quantile(num_experts=3)
    router.beta_E.copy_(torch.tensor([0.4, 0.0, -0.4]))
    scores_TE = torch.tensor([[0.6, 0.3, 0.1], [0.9, 0.05, 0.05]])
    routing = router.select(scores_TE, scores_TE, RoutingContext(1, 2))
    assert routing.assigned_TE().tolist() == [[False, True, True], [True, False, True]]
    assert routing.weight_TE().tolist() == [pytest.approx([0, 0.3, 0.1]), pytest.approx([0.9, 0, 0.05])]


def violation(count_E: Tensor) -> float:
    return (count_E.max() / count_E.float().mean() - 1).item()


def violations(router: Any, steps: int, fresh: bool, tokens: int = 4096) -> list[float]:
    """MaxVio of each step, for experts whose logits differ by up to 3."""
    with torch.no_grad():
        router.weight_ED.mul_(0.5)
        router.weight_ED[:, 0] = torch.linspace(-1.5, 1.5, router.config.num_experts)
    x_TD, found = torch.randn(tokens, 7), []
    for _ in range(steps):
        x_TD[:, 0] = 1
        count_E = router(x_TD, RoutingContext(4, tokens // 4, mode="train")).counts_E()
        found.append((count_E.max() / count_E.float().mean() - 1).item())
        router.after_step()
        x_TD = torch.randn(tokens, 7) if fresh else x_TD
    return found


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_few_steps_on_one_batch_balance_it(score: str) -> None:
    """MaxVio over 1 is smaller by a third or more after one step and below 0.06 after ten: alpha moves with beta."""
    found = violations(quantile(num_experts=8, score=score), 11, fresh=False)
    assert found[0] > 1 and found[1] < 2 / 3 * found[0] and found[10] < 0.06


def test_it_balances_fresh_tokens_too() -> None:
    """The last batch's quantiles serve the next: MaxVio over 1 falls below 0.15, of which sampling is 0.1."""
    found = violations(quantile(num_experts=8), 15, fresh=True)
    assert found[0] > 1 and sum(found[5:]) / 10 < 0.15


def test_a_step_decides_by_the_last_steps_beta() -> None:
    """Causal: neither the pass that is recorded nor a later one of the same step sees its own quantiles."""
    router, scores_TE = quantile(), torch.randn(B * S, E).softmax(-1)
    for _ in range(2):
        assert see(router, scores_TE).assigned_TE().equal(top_k_mask(scores_TE, K))
    router.after_step()
    after_TE = see(router, scores_TE).assigned_TE()
    assert after_TE.equal(top_k_mask(scores_TE - router.beta_E, K)) and not after_TE.equal(top_k_mask(scores_TE, K))


def test_the_cut_into_micro_batches_changes_nothing() -> None:
    whole, parts = quantile(), quantile()
    scores_TE = torch.randn(B * S, E).softmax(-1)
    see(whole, scores_TE)
    for half_TE in scores_TE.chunk(2):
        parts.select(half_TE, half_TE, RoutingContext(B // 2, S, mode="train"))
    whole.after_step(), parts.after_step()
    torch.testing.assert_close(parts.beta_E, whole.beta_E, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["causal", "train_router"])
def test_evaluation_records_nothing(mode: Any) -> None:
    """A11."""
    router = quantile()
    see(router, torch.rand(B * S, E), mode=mode)
    router.after_step()
    assert router.beta_E.eq(0).all()


def test_beta_keeps_its_value_over_a_step_without_a_valid_token() -> None:
    router = quantile()
    see(router, torch.rand(B * S, E))
    router.after_step()
    before_E = router.beta_E.clone()
    see(router, torch.full((B * S, E), torch.nan), valid_BS=torch.zeros(B, S, dtype=torch.bool))
    router.after_step()
    assert router.beta_E.equal(before_E) and before_E.ne(0).any()


def test_with_every_expert_chosen_there_is_nothing_to_balance() -> None:
    """k = E: no (k+1)-th score; beta stays 0 and every pair is taken."""
    router = quantile(experts_per_token=E)
    assert see(router, torch.rand(B * S, E)).assigned_TE().all()
    router.after_step()
    assert router.beta_E.eq(0).all()


def test_beta_is_fp32_without_gradient_in_a_bf16_model() -> None:
    """A11."""
    router = quantile().to(torch.bfloat16)
    x_TD = torch.randn(B * S, 7, dtype=torch.bfloat16, requires_grad=True)
    router(x_TD, RoutingContext(B, S, mode="train")).weight_A.sum().backward()
    assert router.beta_E.dtype == torch.float32 and not router.beta_E.requires_grad
    assert not router.step_sum_E.requires_grad and x_TD.grad.abs().max() > 0
