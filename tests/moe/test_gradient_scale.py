"""How strong an auxiliary loss is: not a matter of micro-batches, loss scales, layouts of padding or block code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe.layer import MoELayer
from moe.losses import router_z, switch_balance
from moe.model import token_losses
from moe.routers.selection import top_k_mask
from moe.routing import RoutingContext
from tests.moe.helpers import calibrate, gradients, make_layer, make_model, relative_error

D, S, E = 16, 5, 4
LOSSES = {"balance": {"balance_coefficient": 0.01}, "z": {"z_coefficient": 0.01}}
BOTH = {"balance_coefficient": 0.01, "z_coefficient": 0.003}


def build(**moe: Any) -> MoELayer:
    sizes: dict[str, Any] = {"router": "token_choice", "num_experts": E, "expert_width": 8, "group_sequences": 1}
    return make_layer(D, **{**sizes, **moe})


def backward(layer: MoELayer, x_BSD: Tensor, upstream: float = 0.0, **context: Any) -> dict[str, Tensor]:
    """Auxiliary backward only (the layer's output has gradient `upstream`); returns the logged values."""
    told = RoutingContext(x_BSD.shape[0], x_BSD.shape[1], mode="train", **context)
    (layer(x_BSD, told) * upstream).sum().backward()
    return told.auxiliary


def router_gradient(layer: MoELayer) -> Tensor:
    assert layer.router.weight_ED.grad is not None
    return layer.router.weight_ED.grad.clone()


@pytest.mark.parametrize("name", LOSSES)
def test_the_coefficient_is_the_strength(name: str) -> None:
    """A06: coefficient 0 gives no gradient, 0.02 exactly twice that of 0.01, which is not 0."""
    x_BSD, layer = torch.randn(3, S, D), build()
    found = []
    for factor in (0, 1, 2):
        other = build(**{key: value * factor for key, value in LOSSES[name].items()})
        other.load_state_dict(layer.state_dict())
        logged = backward(other, x_BSD)
        assert (name in logged) == (factor > 0)
        found.append(router_gradient(other))
    assert found[0].eq(0).all()
    assert found[1].abs().max() > 1e-5
    torch.testing.assert_close(found[2], 2 * found[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_the_attached_gradient_is_that_of_the_loss_itself(name: str) -> None:
    """A06: the layer's router gradient equals autograd's on coefficient * loss; the log has the loss alone."""
    layer, x_BSD = build(**LOSSES[name]), torch.randn(3, S, D)
    logged = backward(layer, x_BSD)[name]
    weight_ED = layer.router.weight_ED.detach().requires_grad_()
    logits_TE = x_BSD.flatten(0, 1) @ weight_ED.T
    chosen_GNE = top_k_mask(logits_TE.detach(), 2).view(3, S, E)
    balance = switch_balance(logits_TE.softmax(-1).view(3, S, E), chosen_GNE, 2).mean()
    loss = balance if name == "balance" else router_z(logits_TE).mean()
    (0.01 * loss).backward()
    torch.testing.assert_close(router_gradient(layer), weight_ED.grad)
    torch.testing.assert_close(logged, loss.detach())


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_the_loss_scale_of_the_main_loss_does_not_reach_it(scale: float) -> None:
    """A04: the auxiliary part of the router's gradient is the same under any upstream gradient."""
    layer, x_BSD = build(**BOTH), torch.randn(3, S, D)
    backward(layer, x_BSD)
    alone = router_gradient(layer)
    silent = build()
    silent.load_state_dict(layer.state_dict())
    layer.zero_grad()
    backward(layer, x_BSD, upstream=scale / 1e6), backward(silent, x_BSD, upstream=scale / 1e6)
    assert relative_error(router_gradient(layer) - router_gradient(silent), alone) < 1e-3


@pytest.mark.parametrize("copies", [1, 4])
def test_identical_micro_batches_do_not_multiply_the_gradient(copies: int) -> None:
    """A04: four identical micro-batches accumulate to the gradient of one (the bug gives four times it)."""
    layer, x_BSD = build(**BOTH), torch.randn(3, S, D)
    whole_log = backward(layer, x_BSD)
    whole = router_gradient(layer)
    layer.zero_grad()
    context = RoutingContext(3, S, mode="train", step_groups=3 * copies, step_tokens=3 * S * copies)
    for _ in range(copies):
        (layer(x_BSD, context) * 0).sum().backward()
    torch.testing.assert_close(router_gradient(layer), whole, rtol=1e-5, atol=0)
    for name in ("balance", "z"):
        torch.testing.assert_close(context.auxiliary[name], whole_log[name])


@pytest.mark.parametrize("cuts", [[6], [1] * 6, [2, 4], [5, 1]])
def test_the_cut_into_micro_batches_does_not_matter(cuts: list[int]) -> None:
    """A04: unequal padding, unequal micro-batches: every gradient and every logged value of the whole batch."""
    layer, x_BSD = build(**BOTH), torch.randn(6, S, D)
    valid_BS = torch.arange(S) < torch.tensor([5, 1, 4, 0, 2, 5])[:, None]
    upstream_BSD = torch.randn(6, S, D) * 0.01
    found = []
    for sizes in ([6], cuts):
        layer.zero_grad()
        log: dict[str, Tensor] = {}
        for x, valid, upstream in zip(
            x_BSD.split(sizes), valid_BS.split(sizes), upstream_BSD.split(sizes), strict=True
        ):
            context = RoutingContext(len(x), S, valid, mode="train", step_groups=6, step_tokens=17, auxiliary=log)
            (layer(x, context) * upstream).sum().backward()
        found.append(gradients(layer) | log)
    assert found[1].keys() == found[0].keys() >= {"balance", "z"}
    for name, expected in found[0].items():
        assert relative_error(found[1][name], expected) < 1e-5, name


def test_token_counts_of_one_and_seven_in_two_micro_batches() -> None:
    """A04: with the main loss on, a whole model's gradients are those of the full batch, auxiliary part included."""
    model = make_model(router="token_choice", group_sequences=1, **BOTH)
    token_BS, label_BS = torch.randint(37, (2, 7)), torch.randint(37, (2, 7))
    label_BS[0, 1:] = -100
    valid_BS = label_BS != -100
    found = []
    for rows in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        model.zero_grad()
        for r in rows:
            tokens, labels = token_BS[r], label_BS[r]
            context = RoutingContext(len(tokens), 7, valid_BS[r], mode="train", step_groups=2, step_tokens=8)
            (token_losses(model(tokens, context), labels).sum() / 8).backward()
        found.append(gradients(model))
    for name, expected in found[0].items():
        assert relative_error(found[1][name], expected) < 1e-5, name


def test_padding_does_not_change_the_auxiliary_gradient() -> None:
    """A02: more padding on either side, same gradient and same logged values."""
    layer, x_BSD = build(**BOTH), torch.randn(2, S, D)
    log = backward(layer, x_BSD)
    plain = router_gradient(layer)
    layer.zero_grad()
    padded_BSD = torch.cat((torch.randn(2, 3, D), x_BSD, torch.randn(2, 4, D)), 1)
    valid_BS = torch.tensor([[False] * 3 + [True] * S + [False] * 4] * 2)
    padded_log = backward(layer, padded_BSD, valid_BS=valid_BS)
    torch.testing.assert_close(router_gradient(layer), plain, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(padded_log, log)


@pytest.mark.parametrize("router", ["token_choice", "threshold"])
def test_a_batch_of_padding_only_gives_zero(router: str) -> None:
    """A02: no NaN, no gradient; also with the step's own counts left out."""
    layer = build(router=router, **BOTH | {"group_sequences": 2})
    log = backward(layer, torch.randn(2, S, D), upstream=1.0, valid_BS=torch.zeros(2, S, dtype=torch.bool))
    assert log["balance"] == 0 and log["z"] == 0
    assert all(gradient.eq(0).all() for gradient in gradients(layer).values())


def test_layers_are_summed() -> None:
    """A07: the logged z-loss of three layers with silent routers is 3 (ln E)^2, the balance loss 3."""
    model = make_model(router="token_choice", group_sequences=1, **BOTH)
    with torch.no_grad():
        for layer in model.moe_layers():
            layer.router.weight_ED.zero_()
    context = RoutingContext(2, 9, mode="train")
    model(torch.randint(37, (2, 9)), context)
    assert context.auxiliary["z"].item() == pytest.approx(3 * 1.791759**2, rel=1e-5)
    assert context.auxiliary["balance"].item() == pytest.approx(3, rel=1e-5)


def test_the_balance_loss_sees_what_the_router_asked_for_not_what_fitted() -> None:
    """Everybody wants expert 0 of 4, capacity keeps few of them: the loss is that of a collapsed router, nearly 4."""
    layer = build(experts_per_token=1, balance_coefficient=0.01, capacity_factor=0.5)
    x_BSD = torch.randn(2, S, D)
    x_BSD[..., 0] = 10
    with torch.no_grad():
        layer.router.weight_ED.mul_(0.1)
        layer.router.weight_ED[0, 0] = 2
    assert backward(layer, x_BSD)["balance"].item() == pytest.approx(4, abs=1e-3)


@pytest.mark.parametrize("mode", ["causal", "train_router"])
def test_evaluation_attaches_nothing(mode: Any) -> None:
    """Neither gradient nor log."""
    layer, x_BSD = build(**BOTH), torch.randn(2, S, D)
    context = RoutingContext(2, S, mode=mode)
    (layer(x_BSD, context) * 0).sum().backward()
    assert not context.auxiliary and router_gradient(layer).eq(0).all()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shared_width", [0, 8])
def test_every_block_layout_passes_the_gradient_on(recompute: bool, shared_width: int) -> None:
    """A06: with and without a shared expert and activation recompute, every layer's router learns from it."""
    model = make_model(router="token_choice", group_sequences=1, shared_width=shared_width, **BOTH)
    context, token_BS = RoutingContext(2, 9, mode="train"), torch.randint(37, (2, 9))
    out = checkpoint(model, token_BS, context, use_reentrant=False) if recompute else model(token_BS, context)
    (out * 0).sum().backward()
    for layer in model.moe_layers():
        assert router_gradient(layer).abs().max() > 1e-6


@pytest.mark.parametrize(("coefficient", "improves"), [(0.0, False), (0.01, True)])
def test_the_balance_loss_alone_balances_a_collapsed_router(coefficient: float, improves: bool) -> None:
    """A06: all tokens on expert 0 (max/mean load 4.0); 200 auxiliary-only SGD steps spread them, or change nothing."""
    layer = build(experts_per_token=1, balance_coefficient=coefficient, group_sequences=4)
    x_BSD = torch.randn(4, 16, D)
    x_BSD[..., 0] = 1
    with torch.no_grad():
        layer.router.weight_ED.mul_(0.2)
        layer.router.weight_ED[0, 0] += 3
    loads = []
    context = RoutingContext(4, 16, mode="train", observe=lambda _, routing: loads.append(routing.counts_E()))
    optimizer = torch.optim.SGD(layer.router.parameters(), lr=5.0)
    for _ in range(200):
        optimizer.zero_grad()
        (layer(x_BSD, context) * 0).sum().backward()
        optimizer.step()
    ratios = [(load.max() / load.float().mean()).item() for load in loads]
    assert ratios[0] == 4.0
    assert ratios[-1] < 2.0 if improves else ratios[-1] == 4.0


def test_expert_choice_takes_the_z_loss_and_thresholds_the_balance_loss() -> None:
    """Every pair of router and loss that the configuration allows reaches the router."""
    for router, loss in (("expert_choice", "z"), ("threshold", "z"), ("threshold", "balance")):
        model = calibrate(make_model(router=router, group="flat", group_sequences=2, **LOSSES[loss]))
        context = RoutingContext(4, 9, mode="train")
        (model(torch.randint(37, (4, 9)), context) * 0).sum().backward()
        assert set(context.auxiliary) == {loss}
        assert all(router_gradient(layer).abs().max() > 1e-6 for layer in model.moe_layers())
