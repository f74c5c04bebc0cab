"""The mixture layer against a plain float64 loop over tokens and experts: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.layer import MoELayer
from moe.routing import RoutingContext
from tests.moe import oracle
from tests.moe.helpers import gradients, make_layer, relative_error

B, S, D, E, K, F = 8, 12, 40, 6, 3, 16
CASES: dict[str, dict[str, Any]] = {
    "token choice": {"router": "token_choice"},
    "token choice, renormalised sigmoid": {"router": "token_choice", "score": "sigmoid", "renormalize": True},
    "token choice, k = 1": {"router": "token_choice", "experts_per_token": 1},
    "token choice, k = E": {"router": "token_choice", "experts_per_token": E},
    "threshold": {"router": "threshold"},
    "expert choice, position": {"router": "expert_choice", "group": "position"},
    "expert choice, flat": {"router": "expert_choice", "group": "flat", "group_sequences": 2},
    "expert choice, chunk": {"router": "expert_choice", "group": "chunk", "chunk_length": 4, "score": "sigmoid"},
}


def build(backend: str, **moe: Any) -> MoELayer:
    sizes = {"num_experts": E, "experts_per_token": K, "expert_width": F, "group_sequences": 4, "route_scale": 1.5}
    return make_layer(D, **{**sizes, "backend": backend, **moe})


class Loop:
    """The same layer in float64, with gradients."""

    def __init__(self, layer: MoELayer, x_BSD: Tensor, valid_BS: Tensor | None, upstream_BSD: Tensor) -> None:
        config, (batch, length, _) = layer.config, x_BSD.shape
        copies = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
        x_TD = x_BSD.detach().double().flatten(0, 1).requires_grad_()
        valid = [True] * (batch * length) if valid_BS is None else valid_BS.flatten().tolist()
        scores_TE = oracle.scores(x_TD, copies["router.weight_ED"], config.score)
        if config.router == "token_choice":
            pairs = oracle.choose_by_token(scores_TE, config.experts_per_token, valid)
        elif config.router == "threshold":
            pairs = oracle.choose_by_cutoff(scores_TE, layer.router.cutoff_E.tolist(), valid)
        else:
            groups = oracle.groups(config.group, batch, length, config.group_sequences, config.chunk_length)
            capacity = len(groups[0]) * config.experts_per_token // config.num_experts
            pairs = oracle.choose_by_expert(scores_TE, groups, capacity, valid)
        weight_TE = scores_TE * config.route_scale
        if config.renormalize:
            chosen_TE = torch.zeros_like(scores_TE)
            for token, expert in pairs:
                chosen_TE[token, expert] = 1
            weight_TE = weight_TE / (scores_TE * chosen_TE).sum(1, keepdim=True).clamp_min(1e-30)
        y_TD = oracle.mixture(x_TD, weight_TE, pairs, copies["experts.w13_E2FD"], copies["experts.w2_EDF"])
        (y_TD * upstream_BSD.double().flatten(0, 1)).sum().backward()
        self.y_BSD, self.dx_BSD = y_TD.detach().view_as(x_BSD), x_TD.grad.view_as(x_BSD)
        self.gradients = {n: c.grad if c.grad is not None else torch.zeros_like(c) for n, c in copies.items()}
        self.pairs = pairs


def compare(layer: MoELayer, x_BSD: Tensor, tolerance: float, valid_BS: Tensor | None = None) -> Loop:
    """Check output, dx and the gradient of every parameter; returns the loop for more."""
    x_BSD = x_BSD.detach().requires_grad_()
    upstream_BSD = torch.randn_like(x_BSD)
    loop = Loop(layer, x_BSD, valid_BS, upstream_BSD)
    y_BSD = layer(x_BSD, RoutingContext(*x_BSD.shape[:2], valid_BS, mode="train_router"))
    assert y_BSD.dtype == x_BSD.dtype
    (y_BSD * upstream_BSD).sum().backward()
    found = gradients(layer) | {"x": x_BSD.grad, "y": y_BSD.detach()}
    expected = loop.gradients | {"x": loop.dx_BSD, "y": loop.y_BSD}
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert max(errors.values()) < tolerance, errors
    return loop


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("padded", [False, True])
def test_the_layer_is_the_loop_in_fp32(case: str, backend: str, padded: bool) -> None:
    """Values and all gradients to a few ulps of the largest; padding rows give exactly 0."""
    valid_BS = None
    if padded:
        valid_BS = torch.ones(B, S, dtype=torch.bool)
        valid_BS[0, 9:] = valid_BS[3, :5] = valid_BS[5] = False
    layer = build(backend, **CASES[case])
    loop = compare(layer, torch.randn(B, S, D), 1e-5, valid_BS)
    assert all(gradient.abs().max() > 0 for gradient in loop.gradients.values())
    if valid_BS is not None:
        y_BSD = layer(torch.randn(B, S, D), RoutingContext(B, S, valid_BS, mode="train_router"))
        assert y_BSD[~valid_BS].eq(0).all() and y_BSD[valid_BS].abs().sum() > 0


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("case", ["token choice", "threshold", "expert choice, flat"])
def test_the_layer_is_the_loop_in_bf16(case: str, backend: str) -> None:
    """bf16 activations and experts, fp32 router: within 2 % of the largest value everywhere."""
    layer = build(backend, **CASES[case]).to(torch.bfloat16)
    compare(layer, torch.randn(B, S, D).to(torch.bfloat16), 2e-2)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_fp32_masters_may_serve_bf16_activations(backend: str) -> None:
    """The weights are cast on use; their gradients are fp32."""
    layer = build(backend, router="token_choice")
    layer(torch.randn(2, 5, D).to(torch.bfloat16), RoutingContext(2, 5)).sum().backward()
    assert {g.dtype for g in gradients(layer).values()} == {torch.float32}


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_all_tokens_to_one_expert(backend: str) -> None:
    """The other experts get gradients of exactly 0, not None and not leftovers."""
    layer = build(backend, router="token_choice", experts_per_token=1)
    x_BSD = torch.randn(3, 5, D)
    x_BSD[..., 0] = 4
    with torch.no_grad():  # a clear winner, and scores far from 1, where fp32 gradients would have no digits left
        layer.router.weight_ED.mul_(0.1)
        layer.router.weight_ED[:, 0] = torch.tensor([0, 0, 0, 0, 0.5, 0])
    loop = compare(layer, x_BSD, 1e-5)
    assert {expert for _, expert in loop.pairs} == {4}
    for name in ("w13_E2FD", "w2_EDF"):
        gradient = getattr(layer.experts, name).grad
        assert gradient[[0, 1, 2, 3, 5]].eq(0).all() and gradient[4].abs().sum() > 0


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("empty", [[0], [5], [1, 2, 3], [0, 1, 2, 3, 4, 5]])
def test_empty_experts_and_tokens_without_an_expert(backend: str, empty: list[int]) -> None:
    """Experts whose cutoff nobody passes, also the first, the last and all; tokens in no expert give 0."""
    layer = build(backend, router="threshold")
    layer.router.cutoff_E.fill_(0.2)
    layer.router.cutoff_E[empty] = 2.0
    loop = compare(layer, torch.randn(3, 5, D), 1e-5)
    assert not {expert for _, expert in loop.pairs} & set(empty)
    lonely_T = torch.ones(15, dtype=torch.bool)
    lonely_T[[token for token, _ in loop.pairs]] = False
    assert lonely_T.any()
    assert loop.y_BSD.flatten(0, 1)[lonely_T].eq(0).all()
    assert all(g.isfinite().all() for g in gradients(layer).values())


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 3), (1, 6), (7, 1)])
def test_few_tokens(backend: str, batch: int, length: int) -> None:
    """One token; T = k; T = E; many rows of length 1."""
    compare(build(backend, router="token_choice"), torch.randn(batch, length, D), 1e-5)


def test_the_shared_expert_is_added_for_every_token_and_not_scaled() -> None:
    """With experts that give nothing, the layer is the shared SwiGLU alone, for padding's neighbours too."""
    layer = build("torch", router="token_choice", shared_width=24)
    with torch.no_grad():
        layer.experts.w2_EDF.zero_()
    x_BSD = torch.randn(2, 5, D)
    gate, up, down = (part.weight.double() for part in (layer.shared.gate, layer.shared.up, layer.shared.down))
    expected = [oracle.swiglu(x, gate, up, down) for x in x_BSD.double().flatten(0, 1)]
    y_BSD = layer(x_BSD, RoutingContext(2, 5))
    assert relative_error(y_BSD.flatten(0, 1), torch.stack(expected)) < 1e-5


@pytest.mark.parametrize("case", ["token choice", "threshold", "expert choice, flat"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_huge_padding_changes_nothing(case: str, backend: str) -> None:
    """H01: rows of 1e6 at padding leave valid outputs and every gradient as rows of 0 do, and get no gradient."""
    layer = build(backend, **CASES[case], z_coefficient=0.1)
    valid_BS = torch.rand(B, S) > 0.3
    x_BSD = torch.randn(B, S, D)
    found = []
    for padding in (0.0, 1e6):
        layer.zero_grad()
        if hasattr(layer.router, "reset_buffers"):
            layer.router.reset_buffers()
        x_BSD = torch.where(valid_BS[..., None], x_BSD, padding).detach().requires_grad_()
        y_BSD = layer(x_BSD, RoutingContext(B, S, valid_BS, mode="train"))
        (y_BSD * torch.linspace(1, 2, D)).sum().backward()
        assert x_BSD.grad[~valid_BS].eq(0).all()
        found.append(gradients(layer) | {"y": y_BSD[valid_BS], "x": x_BSD.grad[valid_BS]})
        if hasattr(layer.router, "step_sum_E"):
            found[-1]["cutoff"] = layer.router.step_sum_E.clone()
    for name, value in found[0].items():
        assert relative_error(found[1][name], value) < 1e-6, name


def test_observers_see_every_layers_routing_once_with_its_number() -> None:
    """Telemetry reads the routing that was used."""
    layer, seen = build("torch", router="token_choice"), []
    layer(torch.randn(2, 5, D), RoutingContext(2, 5, observe=lambda index, routing: seen.append((index, routing))))
    ((index, routing),) = seen
    assert index == 5 and routing.num_tokens == 10 and routing.num_experts == E
    assert routing.counts_E().sum() == 10 * K
