"""Noisy top-k gating against a plain float64 loop, and when there is noise at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe import noise
from moe.config import ConfigError, MoEConfig
from moe.layer import MoELayer
from moe.routers.selection import top_k_mask
from moe.routing import RoutingContext
from tests.moe import oracle
from tests.moe.helpers import gradients, make_layer, make_model, make_router, pairs, relative_error
from tests.moe.test_group_losses import plain_load

B, S, D, E, K = 4, 5, 24, 6, 2
VALID_BS = torch.arange(S) < torch.tensor([5, 2, 4, 5])[:, None]


def noisy(**moe: Any) -> dict[str, Any]:
    sizes = {"router": "noisy_top_k", "num_experts": E, "experts_per_token": K, "group_sequences": 2}
    return {**sizes, **moe}


def training(batch: int = B, **more: Any) -> RoutingContext:
    return RoutingContext(batch, S, mode="train", seed=3, step=4, **more)


def plain_gradients(layer: MoELayer, x_BSD: Tensor, coefficient: float, valid: list[bool]) -> dict[str, Tensor]:
    """Gates over the k largest noisy logits, and the load loss of both groups, token by token."""
    copies = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x_TD = x_BSD.double().flatten(0, 1)
    noise_TE = noise.normal(training(), layer.index, "noisy top-k", E, torch.device("cpu")).double()
    clean_TE = x_TD @ copies["router.weight_ED"].T
    std_TE = (1 + (x_TD @ copies["router.noise_ED"].T).exp()).log()
    noisy_TE = clean_TE + noise_TE * std_TE
    gates_TE = torch.zeros_like(noisy_TE)
    chosen = oracle.choose_by_token(noisy_TE, K, valid)
    for t in range(B * S):
        kept = [e for token, e in chosen if token == t]
        if kept:
            gates_TE[t, kept] = noisy_TE[t, kept].softmax(0)
    y_TD = oracle.mixture(x_TD, gates_TE, chosen, copies["experts.w13_E2FD"], copies["experts.w2_EDF"])
    loss = y_TD.sum()
    for members in oracle.groups("flat", B, S, 2):
        rows = [t for t in members if valid[t]]
        group = ([list(values[t]) for t in rows] for values in (clean_TE, noisy_TE, std_TE))
        loss = loss + coefficient * plain_load(*group) / 2
    loss.backward()
    return {name: copy.grad for name, copy in copies.items()}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("coefficient", [0.0, 5.0])
def test_the_layer_is_the_loop(coefficient: float, padded: bool) -> None:
    """Every gradient of gates and load loss, noise included; with padding as well."""
    layer = make_layer(D, expert_width=16, load_coefficient=coefficient, **noisy())
    x_BSD, valid_BS = torch.randn(B, S, D), VALID_BS if padded else None
    layer(x_BSD, training(valid_BS=valid_BS)).sum().backward()
    valid = VALID_BS.flatten().tolist() if padded else [True] * (B * S)
    expected = plain_gradients(layer, x_BSD, coefficient, valid)
    for name, gradient in gradients(layer).items():
        assert expected[name].abs().max() > 1e-3, name
        assert relative_error(gradient, expected[name]) < 2e-5, name


@pytest.mark.parametrize("mode", ["causal", "train_router"])
def test_outside_training_the_clean_logits_decide(mode: Any) -> None:
    """No noise when served, nor when the training router is only measured."""
    router, x_TD = make_router(D, **noisy()), torch.randn(B * S, D)
    with torch.no_grad():
        router.noise_ED.fill_(9.0)
    routing = router(x_TD, RoutingContext(B, S, mode=mode))
    assert routing.logits_TE.equal(x_TD @ router.weight_ED.T)
    assert routing.assigned_TE().equal(top_k_mask(routing.logits_TE, K))
    assert not routing.own_losses


def test_gates_are_the_softmax_over_the_chosen_logits() -> None:
    """A09: logits [2, 1, 0, -1], k = 2: 0.73106 and 0.26894."""
    router = make_router(4, **noisy(num_experts=4))
    with torch.no_grad():
        router.weight_ED.copy_(torch.diag(torch.tensor([2.0, 1.0, 0.0, -1.0])))
    routing = router(torch.ones(1, 4), RoutingContext(1, 1))
    assert pairs(routing) == [(0, 0), (0, 1)]
    assert routing.weight_A.tolist() == pytest.approx([0.73106, 0.26894], abs=1e-5)


def test_the_noise_starts_at_a_deviation_of_ln_2() -> None:
    """Its projection is 0 in a new model, so softplus gives ln 2 for every expert and token."""
    model = make_model(**noisy())
    router = model.moe_layers()[0].router
    assert router.noise_ED.eq(0).all() and router.weight_ED.ne(0).all()
    x_TD = torch.randn(4000, 24)
    drawn_TE = router(x_TD, RoutingContext(8, 500, mode="train")).logits_TE - x_TD @ router.weight_ED.T
    noise_TE = noise.normal(RoutingContext(8, 500), 0, "noisy top-k", E, torch.device("cpu"))
    torch.testing.assert_close(drawn_TE, math.log(2) * noise_TE, rtol=1e-4, atol=1e-5)


def test_the_deviation_is_each_tokens_and_experts_own() -> None:
    """softplus(x W): 20 for a projection of 20, nothing for one of -20."""
    router, x_TD = make_router(D, **noisy()), torch.randn(B * S, D)
    x_TD[:, 0] = torch.tensor([1.0, -1.0]).repeat(B * S // 2)
    with torch.no_grad():
        router.noise_ED.zero_()
        router.noise_ED[:3, 0], router.noise_ED[3:, 0] = 20.0, -20.0
    drawn_TE = router(x_TD, training()).logits_TE - x_TD @ router.weight_ED.T
    noise_TE = noise.normal(training(), 0, "noisy top-k", E, torch.device("cpu"))
    torch.testing.assert_close(drawn_TE[0::2, :3], 20 * noise_TE[0::2, :3], rtol=1e-4, atol=1e-4)
    assert drawn_TE[0::2, 3:].abs().max() < 1e-5 and drawn_TE[1::2, :3].abs().max() < 1e-5


def test_each_step_and_each_layer_draws_its_own_noise() -> None:
    x_TD = torch.randn(B * S, D)
    first, second = (make_router(D, **noisy()) for _ in range(2))
    with torch.no_grad():
        first.noise_ED.zero_()
    second.load_state_dict(first.state_dict())
    second.layer = 1
    context = training()
    logits_TE = first(x_TD, context).logits_TE
    assert first(x_TD, context).logits_TE.equal(logits_TE)
    assert second(x_TD, context).logits_TE.ne(logits_TE).all()
    context.step += 1
    assert first(x_TD, context).logits_TE.ne(logits_TE).all()


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_the_load_loss_alone_teaches_the_router_and_its_noise(coefficient: float) -> None:
    """A06: no gradient without it, some to both projections with it."""
    layer = make_layer(D, expert_width=16, load_coefficient=coefficient, **noisy())
    context = training()
    (layer(torch.randn(B, S, D), context) * 0).sum().backward()
    assert set(context.auxiliary) == ({"load"} if coefficient else set())
    for name in ("weight_ED", "noise_ED"):
        gradient = getattr(layer.router, name).grad
        assert gradient.abs().max() > 1e-4 if coefficient else gradient.eq(0).all()


def test_the_load_loss_spreads_a_collapsed_router() -> None:
    """A06: everybody wants experts 0 and 1 of 6: max/mean load 3; 100 steps of that loss alone bring it below 1.5."""
    layer = make_layer(D, expert_width=16, load_coefficient=1.0, **noisy())
    x_BSD = torch.randn(B, 16, D)
    x_BSD[..., 0] = 1
    with torch.no_grad():
        layer.router.weight_ED.mul_(0.1)
        layer.router.noise_ED.zero_()
        layer.router.weight_ED[:2, 0] += 3
    optimizer = torch.optim.SGD(layer.router.parameters(), lr=0.5)
    ratios = []
    for step in range(100):
        loads: list[Tensor] = []
        context = RoutingContext(
            B, 16, mode="train", step=step, observe=lambda _, routing, loads=loads: loads.append(routing.counts_E())
        )
        optimizer.zero_grad()
        (layer(x_BSD, context) * 0).sum().backward()
        optimizer.step()
        ratios.append((loads[0].max() / loads[0].float().mean()).item())
    assert ratios[0] > 2.5
    assert sum(ratios[-10:]) / 10 < 1.5


def test_one_expert_a_token_is_refused() -> None:
    """A09: a softmax over one gate is 1 and teaches nothing."""
    with pytest.raises(ConfigError, match="moe.experts_per_token = 1"):
        MoEConfig(router="noisy_top_k", experts_per_token=1)


def test_a_capacity_drops_by_token_order_and_leaves_the_gates() -> None:
    """All want experts 0 and 1, 10 tokens a group, factor 0.6: ceil(0.6 * 10 * 2 / 6) = 2 places."""
    router = make_router(D, **noisy(capacity_factor=0.6))
    with torch.no_grad():
        router.weight_ED.zero_(), router.noise_ED.zero_()
        router.weight_ED[:2, 0] = torch.tensor([40.0, 39.0])
    x_TD = F.one_hot(torch.zeros(B * S, dtype=torch.long), D).float()
    routing = router(x_TD, training())
    assert pairs(routing) == [(t, e) for e in (0, 1) for t in (0, 1, 10, 11)]
    chosen_T2 = routing.logits_TE[[0, 1, 10, 11]][:, :2].softmax(-1)
    torch.testing.assert_close(routing.weight_A.view(2, 4).T, chosen_T2)
