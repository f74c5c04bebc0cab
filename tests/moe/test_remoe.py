"""ReMoE: the decision is R > 0, its L1 against a plain loop, and the weight that holds the number of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.config import ConfigError, MoEConfig
from moe.layer import MoELayer
from moe.routing import RoutingContext
from tests.moe import oracle
from tests.moe.helpers import gradients, make_layer, make_model, make_router, pairs, relative_error
from tests.moe.test_group_losses import plain_l1

B, S, D, E, K = 4, 5, 24, 6, 2
VALID_BS = torch.arange(S) < torch.tensor([5, 2, 4, 5])[:, None]


def remoe(**moe: Any) -> dict[str, Any]:
    return {"router": "remoe", "num_experts": E, "experts_per_token": K, "group_sequences": 2, **moe}


def test_an_expert_works_where_its_logit_is_positive_and_weighs_as_much() -> None:
    """0 is not positive; weights are not bounded by 1."""
    router = make_router(5, **remoe(num_experts=5))
    with torch.no_grad():
        router.weight_ED.copy_(torch.diag(torch.tensor([2.5, -1.0, 0.0, 0.25, -3.0])))
    x_TD = torch.tensor([[1.0] * 5, [-1.0] * 5])
    routing = router(x_TD, RoutingContext(1, 2))
    assert pairs(routing) == [(0, 0), (1, 1), (0, 3), (1, 4)]
    assert routing.weight_A.tolist() == [2.5, 1.0, 0.25, 3.0]


def plain_gradients(layer: MoELayer, x_BSD: Tensor, weight: float, valid: list[bool]) -> dict[str, Tensor]:
    """Sum of R times expert, plus the weighted L1 of both groups."""
    copies = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x_TD = x_BSD.double().flatten(0, 1)
    logits_TE = x_TD @ copies["router.weight_ED"].T
    r_TE = logits_TE * (logits_TE > 0)
    chosen = [(t, e) for t in range(B * S) for e in range(E) if valid[t] and logits_TE[t, e] > 0]
    loss = oracle.mixture(x_TD, r_TE, chosen, copies["experts.w13_E2FD"], copies["experts.w2_EDF"]).sum()
    for members in oracle.groups("flat", B, S, 2):
        loss = loss + weight * plain_l1([list(r_TE[t]) for t in members if valid[t]]) / 2
    loss.backward()
    return {name: copy.grad for name, copy in copies.items()}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("weight", [1e-8, 0.75])
def test_the_layer_is_the_loop(weight: float, padded: bool) -> None:
    """Every gradient of the mixture and of the L1; k = 2 of the plain loop is the layer's."""
    layer = make_layer(D, expert_width=16, l1_initial=weight, **remoe())
    x_BSD, valid_BS = torch.randn(B, S, D), VALID_BS if padded else None
    context = RoutingContext(B, S, valid_BS, mode="train")
    layer(x_BSD, context).sum().backward()
    valid = VALID_BS.flatten().tolist() if padded else [True] * (B * S)
    expected = plain_gradients(layer, x_BSD, weight, valid)
    for name, gradient in gradients(layer).items():
        assert relative_error(gradient, expected[name]) < 1e-5, name
    assert set(context.auxiliary) == {"l1"}


@pytest.mark.parametrize("mode", ["causal", "train_router"])
def test_outside_training_nothing_is_counted_or_penalised(mode: Any) -> None:
    """A11, A06."""
    router = make_router(D, **remoe())
    routing = router(torch.randn(B * S, D), RoutingContext(B, S, mode=mode))
    assert not routing.own_losses and router.step_active == 0 and router.step_tokens == 0


def count(router: Any, active: int, tokens: int, **context: Any) -> None:
    """One pass of so many tokens with so many active pairs between them."""
    logits_TE = -torch.ones(tokens, E)
    logits_TE.view(-1)[:active] = 1
    router.select(logits_TE.relu(), logits_TE, RoutingContext(1, tokens, **{"mode": "train", **context}))


@pytest.mark.parametrize(("active", "change"), [(21, 1.5), (20, 1), (19, 1 / 1.5)])
def test_the_weight_of_the_l1_follows_the_number_of_experts(active: int, change: float) -> None:
    """Aimed at are 2 experts for each of 10 tokens: times the multiplier with more, divided by it with fewer."""
    router = make_router(**remoe(l1_initial=0.001, l1_multiplier=1.5))
    count(router, active, 10)
    assert router.l1_weight.item() == pytest.approx(0.001), "not before the step"
    type(router).after_step_together([router])
    assert router.l1_weight.item() == pytest.approx(0.001 * change)
    type(router).after_step_together([router])
    assert router.l1_weight.item() == pytest.approx(0.001 * change), "nothing seen, nothing changed"


def test_only_the_sparsity_of_all_layers_together_counts() -> None:
    """35 and 10 active pairs of 20 and 20: too many together, so the weight rises in both, equally."""
    full, empty = (make_router(**remoe(l1_initial=0.001, l1_multiplier=2.0)) for _ in range(2))
    count(full, 35, 10), count(empty, 10, 10)
    type(full).after_step_together([full, empty])
    assert full.l1_weight.item() == empty.l1_weight.item() == pytest.approx(0.002)
    count(full, 25, 10), count(empty, 5, 10)
    type(full).after_step_together([full, empty])
    assert full.l1_weight.item() == empty.l1_weight.item() == pytest.approx(0.001)


def test_padding_and_steps_not_taken_do_not_count() -> None:
    """A02, A11: 10 valid of 15 tokens; a forgotten step leaves nothing."""
    router = make_router(**remoe())
    count(router, 60, 15, valid_BS=torch.arange(15)[None] < 10)
    assert (router.step_active.item(), router.step_tokens.item()) == (60, 10)
    count(router, 90, 15, valid_BS=torch.arange(15)[None] < 10)
    assert (router.step_active.item(), router.step_tokens.item()) == (120, 20)
    assert router.step_active.dtype == torch.int64
    router.forget_step()
    assert router.step_active == router.step_tokens == 0


def test_a_later_step_does_not_change_the_weight_that_an_earlier_forward_saw() -> None:
    """The L1's gradient is that of the weight at the time of the forward pass."""
    layer = make_layer(D, expert_width=16, l1_initial=0.5, **remoe())
    x_BSD = torch.randn(B, S, D)
    found = []
    for late in (False, True):
        layer.zero_grad()
        layer.router.l1_weight.fill_(0.5)
        y_BSD = layer(x_BSD, RoutingContext(B, S, mode="train"))
        if late:
            layer.router.l1_weight.mul_(7)
        (y_BSD * 0).sum().backward()
        found.append(layer.router.weight_ED.grad.clone())
    assert found[0].equal(found[1]) and found[0].abs().max() > 0


def test_all_layers_of_a_model_keep_one_weight() -> None:
    model = make_model(**remoe(l1_initial=1e-4))
    for _ in range(3):
        model(torch.randint(37, (4, 9)), RoutingContext(4, 9, mode="train"))
        model.after_step()
    weights = [layer.router.l1_weight.item() for layer in model.moe_layers()]
    assert weights == pytest.approx([1e-4 * 1.2**3] * 3), "random logits are half positive: 3 of 6, above 2"


def test_it_settles_near_k_experts_a_token() -> None:
    """Two layers whose loss wants every R to be 1, and so all six experts: the L1 brings their mean to 2."""
    routers = [make_router(12, **remoe(l1_initial=0.001)) for _ in range(2)]
    parameters = [parameter for router in routers for parameter in router.parameters()]
    optimizer, experts = torch.optim.SGD(parameters, lr=0.1), []
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.3)
    for _ in range(100):
        x_TD, active = torch.randn(4 * 16, 12), 0
        x_TD[:, 0] = 1
        optimizer.zero_grad()
        for router in routers:
            routing = router(x_TD, RoutingContext(4, 16, mode="train"))
            coefficient, value = routing.own_losses["l1"]
            ((routing.scores_TE - 1).square().sum(1).mean() + coefficient * value).backward()
            active += routing.counts_E().sum().item()
        optimizer.step()
        type(routers[0]).after_step_together(routers)
        experts.append(active / len(x_TD) / 2)
    assert max(experts) > 4
    assert sum(experts[-50:]) / 50 == pytest.approx(2, rel=0.1)


def test_a_weight_that_fell_for_long_rises_again() -> None:
    """1.2 ** -700 of anything is a denormal that 1.2 does not move."""
    router = make_router(12, **remoe())
    for active in [0] * 700 + [10**6] * 200:
        router.step_active.fill_(active)
        router.step_tokens.fill_(1000)
        type(router).after_step_together([router])
    assert router.l1_weight > 1e-3


def test_more_experts_than_a_relu_gives_are_refused() -> None:
    with pytest.raises(ConfigError, match="moe.experts_per_token = 3: .* at most 2"):
        MoEConfig(router="remoe", num_experts=4, experts_per_token=3)
