"""Activation recompute and torch.compile change nothing: same routes, same gradients, nothing counted twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe.attention import rotary_rotation
from moe.config import ModelConfig, MoEConfig
from moe.initialization import build_model
from moe.layer import MoELayer
from moe.routers import ROUTERS as REGISTRY
from moe.routing import Routing, RoutingContext
from tests.moe.helpers import gradients, make_layer, pairs, relative_error

D, E, K = 16, 8, 2
ROUTERS: dict[str, dict[str, Any]] = {
    "token choice": {"router": "token_choice", "z_coefficient": 0.01},
    "token choice with capacity": {"router": "token_choice", "capacity_factor": 1.0},
    "threshold": {"router": "threshold", "z_coefficient": 0.01},
    "expert choice": {"router": "expert_choice", "z_coefficient": 0.01},
    "expert choice, position": {"router": "expert_choice", "group": "position", "group_sequences": 4},
    "expert choice with a predictor": {"router": "expert_choice", "predictor_coefficient": 0.1},
    "capped expert choice": {"router": "expert_choice", "expert_cap": 3},
    "mixture of depths": {
        "router": "mixture_of_depths",
        "num_experts": 1,
        "experts_per_token": 1,
        "predictor_coefficient": 0.1,
    },
    "jittered token choice": {"router": "token_choice", "jitter": 0.1, "balance_coefficient": 0.01},
    "forced balance": {"router": "token_choice", "forced_balance": True},
    "noisy top-k": {"router": "noisy_top_k", "load_coefficient": 0.1, "importance_coefficient": 0.1},
    "gshard with capacity": {"router": "gshard", "capacity_factor": 1.0, "drop_order": "choice"},
    "loss-free": {"router": "loss_free", "renormalize": True, "expert_groups": 4, "expert_groups_kept": 2},
    "quantile": {"router": "quantile", "mutual_information_coefficient": 0.01},
    "sinkhorn": {"router": "sinkhorn", "balance_coefficient": 0.01, "balance_scope": "global"},
    "base": {"router": "base", "experts_per_token": 1, "orthogonality_coefficient": 0.01},
    "hash": {"router": "hash"},
    "remoe": {"router": "remoe", "l1_initial": 0.1},
}


def build(name: str, **more: Any) -> MoELayer:
    sizes: dict[str, Any] = {"num_experts": E, "experts_per_token": K, "expert_width": 24, "group_sequences": 2}
    return make_layer(D, **{**sizes, **ROUTERS[name], **more})


def run(layer: MoELayer, x_BSD: Tensor, recompute: bool) -> tuple[dict[str, Tensor], list[Routing]]:
    """Forward and backward; everything that came out or was recorded, and the routings in the order they were made."""
    layer.zero_grad()
    x_BSD, seen = x_BSD.detach().clone().requires_grad_(), []
    context = RoutingContext(*x_BSD.shape[:2], mode="train", observe=lambda _, routing: seen.append(routing))
    context.token_BS = torch.arange(context.num_tokens).view(x_BSD.shape[:2]) % 11
    y_BSD = checkpoint(layer, x_BSD, context, use_reentrant=False) if recompute else layer(x_BSD, context)
    (y_BSD * torch.linspace(0.5, 2, D)).sum().backward()
    recorded = {f"recorded {name}": buffer.clone() for name, buffer in layer.named_buffers()}
    return gradients(layer) | {"x": x_BSD.grad, "y": y_BSD.detach()} | context.auxiliary | recorded, seen


def test_every_router_is_tried() -> None:
    """The soft mixture, which has no routing to replay, has its own test."""
    assert {moe["router"] for moe in ROUTERS.values()} == set(REGISTRY) - {"dense", "soft"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_recompute_gives_bit_equal_gradients_and_records_once(backend: str, name: str, tied: bool) -> None:
    """A11, A12: with distinct rows and with 64 identical ones, where every choice is a tie."""
    layer = build(name, backend=backend)
    x_BSD = torch.randn(1, 1, D).expand(4, 16, D) if tied else torch.randn(4, 16, D)
    if hasattr(layer.router, "cutoff_E"):  # some experts take all of the equal rows, some none
        scores_E = layer.router(x_BSD[0, :1], RoutingContext(1, 1)).scores_TE[0]
        layer.router.cutoff_E.copy_(scores_E * torch.tensor([0.5, 2] * 4)[: len(scores_E)])
    plain, _ = run(layer, x_BSD, recompute=False)
    layer.router.forget_step()
    recomputed, seen = run(layer, x_BSD, recompute=True)
    assert [key for key, value in plain.items() if not value.equal(recomputed[key])] == []
    assert len(seen) == 1 and (pairs(seen[0]) or name == "remoe"), "an observer is shown each pass once"


@pytest.mark.parametrize("rows", [1, 64])
def test_identical_rows_all_choose_the_two_lowest_of_equal_experts(rows: int) -> None:
    """A12: a silent router ties everything; 0 and 1 win in every row, in ten repeats."""
    layer = build("token choice")
    with torch.no_grad():
        layer.router.weight_ED.zero_()
    for _ in range(10):
        routing = layer.router(torch.randn(1, D).expand(rows, D), RoutingContext(1, rows))
        assert pairs(routing) == [(t, e) for e in (0, 1) for t in range(rows)]


@pytest.mark.parametrize("recompute", [False, True])
def test_counts_are_those_of_one_pass(recompute: bool) -> None:
    """A11: 16 tokens, k = 2: 32 assignments in each routing that an observer is shown."""
    _, seen = run(build("token choice"), torch.randn(2, 8, D), recompute)
    assert all(routing.counts_E().sum() == 32 and routing.counts_E().dtype == torch.int64 for routing in seen)


@pytest.mark.parametrize("name", ["threshold", "expert choice", "expert choice, position"])
def test_cutoffs_are_the_same_with_recompute(name: str) -> None:
    """A11: scores seen twice in every micro-batch do not move the mean; an evaluation in between does not either."""
    plain, recomputed = build(name), build(name)
    recomputed.load_state_dict(plain.state_dict())
    for _ in range(3):
        micro_batches = torch.randn(2, 4, 8, D)
        for x_BSD in micro_batches:
            run(plain, x_BSD, recompute=False), run(recomputed, x_BSD, recompute=True)
        recomputed(torch.randn(4, 8, D), RoutingContext(4, 8))
        plain.router.after_step(), recomputed.router.after_step()
    torch.testing.assert_close(recomputed.router.cutoff_E, plain.router.cutoff_E, rtol=1e-6, atol=0)
    assert recomputed.router.updates == plain.router.updates == 3


def compiled_equals_eager(name: str, backend: str) -> None:
    layer = build(name, backend=backend)
    other = build(name, backend=backend)
    other.load_state_dict(layer.state_dict())
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    x_BSD = torch.randn(4, 6, D)
    found = []
    for module in (layer, compiled):
        x = x_BSD.clone().requires_grad_()
        y_BSD = module(x, RoutingContext(4, 6, mode="train"))
        (y_BSD * torch.linspace(0.5, 2, D)).sum().backward()
        found.append({"x": x.grad, "y": y_BSD.detach()})
    eager, graph = found[0] | gradients(layer), found[1] | gradients(other)
    for key, value in eager.items():
        assert relative_error(graph[key], value) < 1e-6, key
    layer.router.after_step(), other.router.after_step()
    torch.testing.assert_close(other.router.cutoff_E, layer.router.cutoff_E)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", ["expert choice", "expert choice, position"])
def test_expert_choice_compiles_without_a_graph_break(name: str, backend: str) -> None:
    """Static shapes: `fullgraph=True` works, with the same values, gradients, losses (A06) and cutoffs."""
    compiled_equals_eager(name, backend)


def test_a_block_with_expert_choice_compiles_without_a_graph_break() -> None:
    """Attention, norms, router, experts and the shared expert in one graph, forward and backward."""
    moe = MoEConfig(num_experts=4, expert_width=6, shared_width=5, group_sequences=2, allow_leak=True)
    model = build_model(ModelConfig(vocabulary_size=20, width=D, layers=1, heads=2), moe, seed=3)
    block, x_BSD = model.blocks["0"], torch.randn(4, 6, D)
    rotation = rotary_rotation(torch.arange(6).expand(4, -1), D // 2, 1e4, torch.float32)
    torch._dynamo.reset()
    found = []
    for module in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        model.zero_grad(), model.forget_step()
        y_BSD = module(x_BSD, RoutingContext(4, 6, mode="train"), rotation, None, None)
        (y_BSD * torch.linspace(0.5, 2, D)).sum().backward()
        found.append({"y": y_BSD.detach()} | {n: p.grad.clone() for n, p in block.named_parameters()})
    for key, value in found[0].items():
        assert relative_error(found[1][key], value) < 1e-6, key
