"""Mixture of depths: who passes the feed-forward, who keeps the residual, and the predictor that serves it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moe.config import ConfigError, MoEConfig
from moe.flops import forward_flops_per_token
from moe.groups import RoutingGroup, check_routing, expert_choice_capacity
from moe.initialization import parameter_counts
from moe.model import Transformer
from moe.routing import Routing, RoutingContext
from tests.moe import oracle
from tests.moe.helpers import (
    calibrate,
    gradients,
    make_layer,
    make_model,
    make_router,
    model_config,
    pairs,
    relative_error,
)

B, S, D = 4, 8, 24


def depths(**moe: Any) -> dict[str, Any]:
    """A quarter of the tokens of each sequence: 2 of 8."""
    sizes = {"router": "mixture_of_depths", "num_experts": 1, "experts_per_token": 1, "group_sequences": 1}
    return {**sizes, "depth_capacity": 0.25, "allow_leak": True, **moe}


def layer_of(**moe: Any) -> Any:
    return make_layer(D, expert_width=16, **depths(**moe))


def run(layer: Any, x_BSD: Tensor, mode: Any = "train", **context: Any) -> tuple[Tensor, Routing]:
    seen: list[Routing] = []
    told = RoutingContext(*x_BSD.shape[:2], mode=mode, observe=lambda _, routing: seen.append(routing), **context)
    return layer(x_BSD, told), seen[0]


@pytest.mark.parametrize(("sequences", "capacity"), [(1, 0.25), (1, 1.0), (2, 0.125), (4, 0.03125), (4, 0.65625)])
def test_exactly_its_share_of_every_group_passes(sequences: int, capacity: float) -> None:
    """C = N * depth_capacity tokens: those with the highest gates."""
    layer, x_BSD = layer_of(group_sequences=sequences, depth_capacity=capacity), torch.randn(B, S, D)
    y_BSD, routing = run(layer, x_BSD)
    places = sequences * S * capacity
    passed_GN = routing.assigned_TE().view(B // sequences, -1)
    gates_GN = routing.scores_TE.view(B // sequences, -1)
    assert passed_GN.sum(1).tolist() == [places] * (B // sequences)
    for passed_N, gates_N in zip(passed_GN, gates_GN, strict=True):
        assert passed_N.all() or gates_N[passed_N].min() > gates_N[~passed_N].max()
    assert y_BSD.flatten(0, 1)[~passed_GN.flatten()].eq(0).all(), "only the residual connection carries the others"


def test_the_layer_is_the_loop() -> None:
    """sigmoid(x w) * feed-forward for the tokens that pass: output and every gradient in float64."""
    layer, x_BSD = layer_of(), torch.randn(B, S, D, requires_grad=True)
    y_BSD, _ = run(layer, x_BSD)
    upstream_BSD = torch.randn(B, S, D)
    (y_BSD * upstream_BSD).sum().backward()
    copies = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x_TD = x_BSD.detach().double().flatten(0, 1).requires_grad_()
    gate_TE = oracle.scores(x_TD, copies["router.weight_ED"], "sigmoid")
    chosen = oracle.choose_by_expert(gate_TE, oracle.groups("flat", B, S, 1), 2, [True] * (B * S))
    y_TD = oracle.mixture(x_TD, gate_TE, chosen, copies["experts.w13_E2FD"], copies["experts.w2_EDF"])
    (y_TD * upstream_BSD.double().flatten(0, 1)).sum().backward()
    found = gradients(layer) | {"x": x_BSD.grad.flatten(0, 1), "y": y_BSD.detach().flatten(0, 1)}
    expected = {name: copy.grad for name, copy in copies.items()} | {"x": x_TD.grad, "y": y_TD.detach()}
    for name, value in expected.items():
        assert value.abs().max() > 0 and relative_error(found[name], value) < 1e-5, name


def test_in_a_model_the_others_keep_their_residual() -> None:
    """The block adds nothing to tokens that do not pass."""
    model = make_model(**depths())
    block, context = model.blocks["1"], RoutingContext(B, S, mode="train")
    hidden: dict[str, Tensor] = {}
    block.feed_forward_norm.register_forward_hook(lambda _, inputs, out: hidden.update(before=inputs[0]))
    block.register_forward_hook(lambda _, inputs, out: hidden.update(after=out))
    seen: dict[int, Routing] = {}
    context.observe = seen.__setitem__
    model(torch.randint(37, (B, S)), context)
    passed_BS = seen[1].assigned_TE().view(B, S)
    changed_BS = hidden["before"].ne(hidden["after"]).any(-1)
    assert passed_BS.sum(1).tolist() == [2] * B and changed_BS.equal(passed_BS)


def test_it_has_one_expert_and_neither_token_choice_nor_a_predictor_that_nobody_trained() -> None:
    for moe, message in (
        ({"num_experts": 2}, "moe.num_experts = 2: .* needs moe.num_experts = 1, moe.experts_per_token = 1"),
        ({"inference": "token_choice"}, "use threshold or predictor"),
        ({"inference": "predictor"}, "predictor_coefficient = 0: no predictor is trained"),
        ({"depth_capacity": 0.0}, "moe.depth_capacity = 0.0: must be above 0"),
        ({"depth_capacity": 1.1}, "moe.depth_capacity = 1.1: must be above 0 and at most 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            MoEConfig(**depths(**moe))


def test_a_capacity_that_is_no_whole_number_names_its_key_and_a_way_out() -> None:
    """0.1 of 8 tokens is 0.8; of five sequences' 40 it is 4."""
    with pytest.raises(ConfigError, match=r"moe.depth_capacity .* = 0.8 .* nearest moe.group_sequences .* is 5"):
        check_routing(MoEConfig(**depths(depth_capacity=0.1)), S, 10)
    moe = MoEConfig(**depths(depth_capacity=0.1, group_sequences=5))
    assert expert_choice_capacity(moe, RoutingGroup("flat", 5, S)) == 4


@pytest.mark.parametrize("threshold_phase", [False, True])
def test_the_predictor_learns_who_passes_and_gives_x_no_gradient(threshold_phase: bool) -> None:
    """Binary cross-entropy against the routing, mean over valid tokens; its own weights get all of its gradient."""
    layer = layer_of(predictor_coefficient=0.5)
    valid_BS = torch.arange(S) < torch.tensor([8, 5, 8, 3])[:, None]
    x_BSD = torch.randn(B, S, D, requires_grad=True)
    y_BSD, routing = run(layer, x_BSD, valid_BS=valid_BS, threshold_phase=threshold_phase)
    (y_BSD * 0).sum().backward()
    assert x_BSD.grad.eq(0).all() and layer.router.weight_ED.grad.eq(0).all()
    predictor, valid_T = layer.router.predictor, valid_BS.flatten()
    weight_ED, bias_E = (p.detach().double().requires_grad_() for p in (predictor.weight_ED, predictor.bias_E))
    guess_T = (x_BSD.detach().double().flatten(0, 1) @ weight_ED.T + bias_E)[valid_T, 0]
    taken_T = routing.assigned_TE()[valid_T, 0]
    (-0.5 * (F.logsigmoid(torch.where(taken_T, guess_T, -guess_T))).mean()).backward()
    torch.testing.assert_close(predictor.weight_ED.grad.double(), weight_ED.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(predictor.bias_E.grad.double(), bias_E.grad, rtol=1e-5, atol=1e-7)


def test_the_predictor_starts_from_the_share_that_passes() -> None:
    """Log-odds of a quarter, ln(1/3), for every token; its loss is then the entropy of a quarter, 0.5623."""
    model = make_model(**depths(predictor_coefficient=1.0))
    context = RoutingContext(B, S, mode="train")
    model(torch.randint(37, (B, S)), context)
    predictor = model.moe_layers()[0].router.predictor
    assert predictor(torch.randn(5, D)).flatten().tolist() == pytest.approx([-math.log(3)] * 5)
    assert context.auxiliary["predictor"].item() == pytest.approx(3 * 0.562335, abs=1e-4)


def served(model: Transformer, inference: Any, token_BS: Tensor) -> tuple[Tensor, dict[int, Routing]]:
    """Logits and routings in causal mode."""
    for layer in model.moe_layers():
        layer.router.inference = inference
    seen: dict[int, Routing] = {}
    with torch.no_grad():
        return model(token_BS, RoutingContext(*token_BS.shape, observe=seen.__setitem__)), seen


def test_it_is_served_by_the_cutoff_or_by_the_guess() -> None:
    """One model, both ways: gate >= cutoff, or a guess above even odds; weighed by the gate either way."""
    model = calibrate(make_model(backend="reference", **depths(predictor_coefficient=1.0)), batch=4, length=8)
    with torch.no_grad():
        for layer in model.moe_layers():
            layer.router.predictor.weight_ED.normal_()
    token_BS = torch.randint(37, (B, S))
    _, by_cutoff = served(model, "threshold", token_BS)
    _, by_guess = served(model, "predictor", token_BS)
    for layer in model.moe_layers():
        routing = by_cutoff[layer.index]
        assert routing.assigned_TE().equal(routing.scores_TE >= layer.router.cutoff_E)
    hidden: list[Tensor] = []
    first = model.moe_layers()[0]
    first.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0].flatten(0, 1)))
    routing = served(model, "predictor", token_BS)[1][0]
    guess_TE = first.router.predictor(hidden[0])
    assert routing.assigned_TE().equal(guess_TE > 0) and routing.assigned_TE().equal(by_guess[0].assigned_TE())
    assert first.router.decision_distance(routing).equal(guess_TE.abs())
    torch.testing.assert_close(routing.weight_A, routing.scores_TE[guess_TE > 0])
    assert not by_guess[0].assigned_TE().equal(by_cutoff[0].assigned_TE())


@pytest.mark.parametrize("inference", ["threshold", "predictor"])
def test_serving_is_causal(inference: str) -> None:
    """H02: logits and routes before position 5 do not see what comes after, to the last bit."""
    model = calibrate(make_model(backend="reference", **depths(predictor_coefficient=1.0)), batch=4, length=8)
    with torch.no_grad():
        for layer in model.moe_layers():
            layer.router.predictor.weight_ED.normal_()
    token_BS = torch.randint(37, (B, S))
    other_BS = token_BS.clone()
    other_BS[:, 5:] = (other_BS[:, 5:] + 1) % 37
    (first, routes), (second, others) = (served(model, inference, tokens) for tokens in (token_BS, other_BS))
    assert first[:, :5].equal(second[:, :5]) and not first[:, 5:].isclose(second[:, 5:]).all()
    for index, routing in routes.items():
        before, after = (r.assigned_TE().view(B, S)[:, :5] for r in (routing, others[index]))
        assert before.equal(after) and before.any()


def test_the_guess_does_not_take_padding() -> None:
    """H05: nor does it count, whatever the padding holds."""
    router = make_router(7, **depths(predictor_coefficient=1.0, inference="predictor"))
    with torch.no_grad():
        router.predictor.bias_E.fill_(100.0)
    valid_BS = torch.tensor([[True, False, True, False]])
    assert pairs(router(torch.randn(4, 7), RoutingContext(1, 4, valid_BS))) == [(0, 0), (2, 0)]


def test_training_teaches_the_predictor_to_serve() -> None:
    """A router that likes one direction of x: after 60 steps the guess agrees with the routing on 90 % of tokens."""
    layer = layer_of(predictor_coefficient=1.0, group_sequences=4)
    optimizer = torch.optim.Adam(layer.router.predictor.parameters(), lr=0.1)
    with torch.no_grad():
        layer.router.weight_ED.copy_(F.one_hot(torch.tensor([3]), D))
        layer.router.predictor.reset_parameters()
    for _ in range(60):
        optimizer.zero_grad()
        (run(layer, torch.randn(B, 2 * S, D))[0] * 0).sum().backward()
        optimizer.step()
    x_BSD = torch.randn(B, 2 * S, D)
    _, chosen = run(layer, x_BSD, mode="train_router")
    layer.router.inference = "predictor"
    _, guessed = run(layer, x_BSD, mode="causal")
    assert (chosen.assigned_TE() == guessed.assigned_TE()).float().mean() > 0.9


def test_a_token_costs_its_share_of_the_feed_forward() -> None:
    """G04: a quarter of the experts' operations, all of the router's; what PyTorch measures, within 1 %."""
    shape, moe = model_config(heads=6, kv_heads=2, head_dim=10), depths(expert_width=64)
    model, config = make_model(model=shape, **moe), MoEConfig(**moe)
    whole = MoEConfig(**depths(expert_width=64, depth_capacity=1.0))
    saved = forward_flops_per_token(shape, whole, S) - forward_flops_per_token(shape, config, S)
    assert saved == 3 * 2 * (3 * 24 * 64) * 3 / 4
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randint(37, (B, S)), RoutingContext(B, S, mode="train_router"))
    attention = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "attention" in str(op))
    square = B * S * 2 * 3 * S * 60
    expected = forward_flops_per_token(shape, config, S) * B * S - square
    assert counter.get_total_flops() - attention == pytest.approx(expected, rel=0.01)


def test_a_token_uses_its_share_of_the_feed_forwards_parameters() -> None:
    model = make_model(**depths())
    total, used = parameter_counts(model)
    assert total == sum(p.numel() for p in model.parameters())
    assert total - used == 3 * (3 * 24 * 16) * 3 // 4
