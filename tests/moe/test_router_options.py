"""Settings that several routers share: jitter, forced balance, the scale of weights, and how a model is served."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.config import ConfigError, MoEConfig
from moe.layer import MoELayer
from moe.routers import ROUTERS
from moe.routers.selection import top_k_mask
from moe.routing import Routing, RoutingContext
from tests.moe.helpers import calibrate, gradients, make_layer, make_model, make_router, pairs, relative_error

B, S, D, E, K = 4, 6, 16, 4, 2
SIZES: dict[str, dict[str, Any]] = {
    "mixture_of_depths": {"num_experts": 1, "experts_per_token": 1, "depth_capacity": 0.5},
    "base": {"experts_per_token": 1},
}


def readers(key: str) -> list[str]:
    return [name for name, facts in ROUTERS.items() if key in facts.reads]


def sizes(name: str, **more: Any) -> dict[str, Any]:
    usual = {"num_experts": E, "experts_per_token": K, "group_sequences": 2}
    return {"router": name, **usual, **SIZES.get(name, {}), **more}


def build(name: str, seed: int = 0, **more: Any) -> MoELayer:
    torch.manual_seed(seed)
    return make_layer(D, expert_width=8, **sizes(name, **more))


def run(layer: MoELayer, x_BSD: Tensor, mode: Any = "train", **context: Any) -> tuple[Tensor, Routing]:
    seen: list[Routing] = []
    told = RoutingContext(B, S, mode=mode, observe=lambda _, routing: seen.append(routing), **context)
    told.token_BS = torch.arange(B * S).view(B, S)
    return layer(x_BSD, told), seen[0]


# -- jitter ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", readers("jitter"))
def test_jitter_is_for_the_routers_input_alone(name: str) -> None:
    """The experts see x itself: output and gradients are those of a layer without jitter told the same routes.

    (A known bug elsewhere multiplies the hidden states in place, so that experts and residual see noise too.)
    """
    layer, x_BSD = build(name, jitter=0.3), torch.randn(B, S, D)
    given_BSD = x_BSD.clone()
    y_BSD, routing = run(layer, given_BSD)
    assert given_BSD.equal(x_BSD), "nothing is multiplied in place"
    y_BSD.sum().backward()
    found, again = gradients(layer.experts), build(name, jitter=0.3)
    w13_E2FD, w2_EDF = (p.detach().double().requires_grad_() for p in (again.experts.w13_E2FD, again.experts.w2_EDF))
    x_TD, weight_TE = x_BSD.flatten(0, 1).double(), routing.weight_TE().detach().double()
    hidden_TE2F = torch.einsum("td,ecfd->tecf", x_TD, w13_E2FD)
    out_TED = torch.einsum("tef,edf->ted", hidden_TE2F[:, :, 0].sigmoid() * hidden_TE2F.prod(2), w2_EDF)
    expected_TD = (weight_TE[..., None] * out_TED).sum(1)
    expected_TD.sum().backward()
    assert relative_error(y_BSD.flatten(0, 1), expected_TD) < 1e-5
    assert relative_error(found["w13_E2FD"], w13_E2FD.grad) < 1e-5
    assert relative_error(found["w2_EDF"], w2_EDF.grad) < 1e-5


@pytest.mark.parametrize("name", readers("jitter"))
def test_jitter_moves_logits_in_training_only(name: str) -> None:
    """Not when served, not when the training router is measured; other numbers each step, the same for a repeat."""
    calm, shaken, x_BSD = build(name), build(name, jitter=0.3), torch.randn(B, S, D)
    for mode in ("causal", "train_router"):
        assert run(calm, x_BSD, mode)[1].logits_TE.equal(run(shaken, x_BSD, mode)[1].logits_TE)
    logits_TE = run(shaken, x_BSD)[1].logits_TE
    assert logits_TE.ne(run(calm, x_BSD)[1].logits_TE).float().mean() > 0.4, "relu makes some of them 0 either way"
    assert logits_TE.equal(run(shaken, x_BSD)[1].logits_TE)
    assert not logits_TE.equal(run(shaken, x_BSD, step=1)[1].logits_TE)


def test_jitter_multiplies_each_number_within_its_bounds() -> None:
    """Uniform in 1 - 0.2 to 1 + 0.2, mean 1: also for bf16 inputs, whose own precision would round it."""
    router = make_router(D, **sizes("token_choice", jitter=0.2))
    for dtype in (torch.float32, torch.bfloat16):
        x_TD = (torch.rand(4000, D) + 0.5).to(dtype)
        factor_TD = router.router_input(x_TD, RoutingContext(40, 100, mode="train")) / x_TD.float()
        assert factor_TD.dtype == torch.float32
        assert 0.8 - 1e-6 < factor_TD.min() < 0.801 and 1.199 < factor_TD.max() < 1.2 + 1e-6
        assert factor_TD.mean().item() == pytest.approx(1, abs=5 * 0.4 / (12 * factor_TD.numel()) ** 0.5)


def test_jitter_reaches_the_gradient_of_the_input() -> None:
    """d logit / d x is the router's row times the factor."""
    router = make_router(D, **sizes("token_choice", jitter=0.2))
    x_TD = torch.rand(6, D).add(0.5).requires_grad_()
    context = RoutingContext(1, 6, mode="train")
    router(x_TD, context).logits_TE[:, 1].sum().backward()
    factor_TD = router.router_input(x_TD, context) / x_TD
    torch.testing.assert_close(x_TD.grad, (factor_TD * router.weight_ED[1]).detach())


@pytest.mark.parametrize("jitter", [-0.1, 1.0])
def test_jitter_is_from_0_to_below_1(jitter: float) -> None:
    """A factor of 0 or less would erase or turn an input."""
    with pytest.raises(ConfigError, match=f"moe.jitter = {jitter}: must be at least 0 and below 1"):
        MoEConfig(router="token_choice", jitter=jitter)


# -- forced balance --------------------------------------------------------------------------------------------------


def dealt(tokens: Iterable[int]) -> list[tuple[int, int]]:
    """Token t has experts 2t and 2t + 1 (mod 4)."""
    return sorted((token, (2 * token + j) % E) for token in tokens for j in range(2))


@pytest.mark.parametrize("name", readers("forced_balance"))
@pytest.mark.parametrize("mode", ["train", "train_router"])
def test_forced_balance_deals_experts_round_robin(name: str, mode: str) -> None:
    """Whatever the scores; 24 tokens load each of 4 experts with 12."""
    layer, x_BSD = build(name, forced_balance=True), torch.randn(B, S, D)
    x_BSD[..., 0] = 50
    _, routing = run(layer, x_BSD, mode)
    assert sorted(pairs(routing)) == dealt(range(B * S))
    assert routing.counts_E().tolist() == [12] * E and routing.dropped() == 0


@pytest.mark.parametrize("name", readers("forced_balance"))
def test_forced_balance_weighs_by_the_routers_scores(name: str) -> None:
    """A benchmark runs the whole backward pass: the router has a gradient too."""
    layer = build(name, forced_balance=True)
    y_BSD, routing = run(layer, torch.randn(B, S, D))
    y_BSD.sum().backward()
    assert routing.weight_A.ge(0).all() and routing.weight_A.gt(0).any()
    assert layer.router.weight_ED.grad.abs().max() > 0


@pytest.mark.parametrize("name", readers("forced_balance"))
def test_a_model_trained_with_forced_balance_is_served_by_its_scores(name: str) -> None:
    """Round-robin goes by a token's place in the pass, which is not the same token by token."""
    forced, plain = build(name, forced_balance=True), build(name)
    plain.load_state_dict(forced.state_dict())
    x_BSD = torch.randn(B, S, D)
    assert pairs(run(forced, x_BSD, "causal")[1]) == pairs(run(plain, x_BSD, "causal")[1])


def test_forced_balance_goes_on_where_the_last_micro_batch_ended() -> None:
    """Seven experts, 12 tokens: the second half of a step starts at expert 24 mod 7."""
    router = make_router(D, router="token_choice", num_experts=7, experts_per_token=2, forced_balance=True)
    x_TD = torch.randn(24, D)
    whole = router(x_TD, RoutingContext(2, 12, mode="train"))
    halves = [
        router(x_TD[12 * i : 12 * i + 12], RoutingContext(1, 12, mode="train", first_token=12 * i)) for i in (0, 1)
    ]
    assert whole.assigned_TE().equal(torch.cat([half.assigned_TE() for half in halves]))


def test_forced_balance_gives_padding_nothing() -> None:
    """A02."""
    valid_BS = torch.arange(S) < torch.tensor([6, 3, 0, 1])[:, None]
    _, routing = run(build("token_choice", forced_balance=True), torch.randn(B, S, D), valid_BS=valid_BS)
    assert sorted(pairs(routing)) == dealt(valid_BS.flatten().nonzero()[:, 0].tolist())


# -- weights and loads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", readers("route_scale"))
@pytest.mark.parametrize("mode", ["train", "causal"])
def test_the_scale_multiplies_every_weight_and_changes_no_choice(name: str, mode: str) -> None:
    x_BSD = torch.randn(B, S, D)
    (plain_BSD, plain), (scaled_BSD, scaled) = (
        run(build(name, route_scale=scale), x_BSD, mode) for scale in (1.0, 2.5)
    )
    assert pairs(plain) == pairs(scaled) and len(pairs(plain)) > 0
    torch.testing.assert_close(scaled.weight_A, 2.5 * plain.weight_A)
    torch.testing.assert_close(scaled_BSD, 2.5 * plain_BSD)


@pytest.mark.parametrize("name", readers("balance_scope"))
def test_the_load_of_a_step_is_what_was_asked_for_before_anything_was_dropped(name: str) -> None:
    """A11: the share of all micro-batches' assignments, in whole numbers until the step is taken."""
    drops = {"capacity_factor": 0.6} if "capacity_factor" in ROUTERS[name].reads else {}
    layer = build(name, balance_coefficient=0.01, balance_scope="global", **drops)
    assert layer.router.load_E.tolist() == [1 / E] * E
    count_E = torch.zeros(E, dtype=torch.int64)
    for step in range(2):
        _, routing = run(layer, torch.randn(B, S, D), step=step)
        count_E += routing.counts_E() if routing.chosen_TE is None else routing.chosen_TE.sum(0)
        assert routing.dropped() > 0 or not drops
    assert layer.router.step_load_E.dtype == torch.int64 and layer.router.step_load_E.equal(count_E)
    layer.router.after_step()
    torch.testing.assert_close(layer.router.load_E, count_E / count_E.sum())
    assert layer.router.step_load_E.eq(0).all()


def test_a_key_that_a_router_does_not_read_is_refused() -> None:
    """Rather than ignored: for every router and every key that is somebody's, but not its own."""
    values = {"jitter": 0.1, "forced_balance": True, "route_scale": 2.0, "renormalize": True, "capacity_factor": 1.0}
    values |= {"l1_multiplier": 2.0, "bias_rate": 0.1, "z_coefficient": 0.1, "depth_capacity": 0.5, "expert_cap": 2}
    for name, facts in ROUTERS.items():
        for key, value in values.items():
            if key not in facts.reads:
                with pytest.raises(ConfigError, match=f"moe.{key} = {value} has no effect with moe.router = '{name}'"):
                    MoEConfig(**sizes(name, **{key: value}))


# -- serving expert choice -------------------------------------------------------------------------------------------


def test_expert_choice_is_served_as_the_configuration_or_the_attribute_says() -> None:
    """One set of weights: cutoffs, each token's best k, or a guess. The weights are the scores in all three."""
    model = calibrate(make_model(router="expert_choice", group_sequences=2, predictor_coefficient=0.1))
    token_BS, found = torch.randint(37, (B, S)), {}
    for inference in ("threshold", "token_choice", "predictor"):
        for layer in model.moe_layers():
            assert layer.router.inference == "threshold" or found
            layer.router.inference = inference
        seen: dict[int, Routing] = {}
        with torch.no_grad():
            model(token_BS, RoutingContext(B, S, observe=seen.__setitem__))
        routing = found[inference] = seen[0]
        assert routing.weight_A.equal(routing.scores_TE[routing.token_A, routing.expert_A()])
    scores_TE, first = found["threshold"].scores_TE, model.moe_layers()[0]
    assert found["threshold"].assigned_TE().equal(scores_TE >= first.router.cutoff_E)
    assert found["token_choice"].assigned_TE().equal(top_k_mask(scores_TE, 2))
    assert not found["predictor"].assigned_TE().any(), "an untrained guess is 2 of 6, below even odds"
    config = MoEConfig(router="expert_choice", inference="token_choice")
    assert make_router(7, **{"router": "expert_choice", "inference": "token_choice"}).inference == config.inference


@pytest.mark.parametrize("inference", ["token_choice", "predictor"])
def test_how_it_is_served_changes_nothing_in_training(inference: str) -> None:
    usual, other = (
        build("expert_choice", predictor_coefficient=0.1, inference=way) for way in ("threshold", inference)
    )
    x_BSD = torch.randn(B, S, D)
    for mode, phase in (("train", False), ("train", True), ("train_router", False)):
        expected, found = (run(layer, x_BSD, mode, threshold_phase=phase) for layer in (usual, other))
        assert found[0].equal(expected[0]) and pairs(found[1]) == pairs(expected[1])


@pytest.mark.parametrize("inference", ["threshold", "token_choice", "predictor"])
def test_the_distance_from_another_decision_is_that_of_the_way_it_is_served(inference: str) -> None:
    """To the cutoff; to the middle between the k-th and the next score; or the guess's log-odds."""
    layer = build("expert_choice", predictor_coefficient=0.1, inference=inference)
    _, routing = run(layer, torch.randn(B, S, D), "causal")
    distance_TE, scores_TE = layer.router.decision_distance(routing), routing.scores_TE
    if inference == "threshold":
        expected_TE = (scores_TE - layer.router.cutoff_E).abs()
    elif inference == "token_choice":
        expected_TE = (scores_TE - scores_TE.sort(1).values[:, [E - K, E - K - 1]].mean(1, keepdim=True)).abs()
    else:
        expected_TE = routing.distance_TE
        assert expected_TE is not None
    torch.testing.assert_close(distance_TE, expected_TE)
    assert distance_TE.shape == (B * S, E) and distance_TE.gt(0).any()
