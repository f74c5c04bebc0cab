"""Failures of other libraries that no other file asks about in these words: losses, weights, ties and padding.

Each test names the failure; `grep -rw A02 tests` finds all that answer one.
"""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import train
from moe.layer import MoELayer
from moe.losses import attach_loss
from moe.model import Transformer
from moe.routers.registry import ROUTERS
from moe.routing import Routing, RoutingContext
from parallel.engine import Engine
from tests.moe.helpers import gradients, make_layer, make_model, model_config, pairs, relative_error
from training.job import Job
from training.load_config import config_from_dict

# Every router that decides (soft mixes, dense has none), in a small size.
SMALLEST: dict[str, dict[str, Any]] = {
    "mixture_of_depths": {"num_experts": 1, "experts_per_token": 1, "depth_capacity": 0.5},
    "base": {"experts_per_token": 1},
}
SIZES: dict[str, dict[str, Any]] = {
    name: {"router": name, "num_experts": 8, "experts_per_token": 2, "allow_leak": True, **SMALLEST.get(name, {})}
    for name in ROUTERS
    if name not in ("soft", "dense")
}
every_router = pytest.mark.parametrize("name", SIZES)


def layer_of(name: str, width: int = 8, **moe: Any) -> MoELayer:
    return make_layer(width, **{**SIZES[name], "expert_width": 8, "group_sequences": 1, **moe})


def set_router(layer: MoELayer, rows: list[list[float]] | Tensor) -> None:
    """Make the logits of the unit vector e_i the i-th row."""
    rows_IE = torch.as_tensor(rows, dtype=torch.float32)
    with torch.no_grad():
        layer.router.weight_ED.zero_()
        layer.router.weight_ED[:, : len(rows_IE)] = rows_IE.T


def look(layer: MoELayer, x_BSD: Tensor, **context: Any) -> tuple[Tensor, Routing, dict[str, Tensor]]:
    """Output, routing and logged losses of one training pass."""
    seen: list[Routing] = []
    told = RoutingContext(*x_BSD.shape[:2], **{"mode": "train", **context}, observe=lambda _, r: seen.append(r))
    told.token_BS = torch.arange(told.num_tokens).view(x_BSD.shape[:2])
    return layer(x_BSD, told), seen[0], told.auxiliary


# The logits of the first and of the second half of the rows, k, and the loss.
BALANCE = [
    *(([0, 0, 0, 0], [0, 0, 0, 0], k, 1.0) for k in (1, 2, 3, 4)),
    ([10, 10, 0, 0], [10, 10, 0, 0], 2, 1.99991),
    ([10, 0, 0, 0], [10, 0, 0, 0], 1, 3.99946),
    ([10, 10, 0, 0], [0, 0, 10, 10], 2, 1.0),
    ([10, 0, 0, 0], [10, 0, 0, 0], 4, 1.0),
]


@pytest.mark.parametrize("tokens", [8, 4], ids=["T = 8", "T = E"])
@pytest.mark.parametrize(("first", "second", "k", "expected"), BALANCE)
def test_a_layer_logs_the_published_balance_loss(
    first: list[float], second: list[float], k: int, expected: float, tokens: int
) -> None:
    """A01: E = 4; also where E = k and E = T, so that no coincidence of shapes can hide a broadcast."""
    layer = layer_of("token_choice", num_experts=4, experts_per_token=k, balance_coefficient=0.01)
    set_router(layer, [first, second])
    x_BSD = torch.eye(8)[[0] * (tokens // 2) + [1] * (tokens // 2)][None]
    assert look(layer, x_BSD)[2]["balance"].item() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("sequences", [1, 2], ids=["a group a row", "one group"])
def test_a_models_losses_are_a_plain_loop_over_layers_and_rows(sequences: int) -> None:
    """A02: 2 layers, batch 2, row 0 with 1 pad and row 1 with 3: no value of a pad is anywhere in the loop."""
    moe = {"group_sequences": sequences, "balance_coefficient": 0.01, "z_coefficient": 0.01}
    model, seen = make_model(model=model_config(layers=2), router="token_choice", **moe), []
    valid = [[False, True, True, True, True], [False, False, False, True, True]]
    context = RoutingContext(2, 5, torch.tensor(valid), mode="train", observe=lambda _, routing: seen.append(routing))
    model(torch.randint(37, (2, 5)), context)
    balance = z = 0.0
    for routing in seen:
        rows = [[t for t in range(5 * row, 5 * row + 5) if valid[row][t % 5]] for row in range(2)]
        for group in rows if sequences == 1 else [rows[0] + rows[1]]:
            share, mean = [0.0] * 6, [0.0] * 6
            for logits in routing.logits_TE[group].tolist():
                total = sum(math.exp(value) for value in logits)
                for e in sorted(range(6), key=lambda e: -logits[e])[:2]:
                    share[e] += 1 / (2 * len(group))
                for e in range(6):
                    mean[e] += math.exp(logits[e]) / total / len(group)
                z += math.log(total) ** 2 / 6
            balance += 6 * sum(f * p for f, p in zip(share, mean, strict=True)) / (2 // sequences)
    assert len(seen) == 2
    assert context.auxiliary["balance"].item() == pytest.approx(balance, rel=1e-5)
    assert context.auxiliary["z"].item() == pytest.approx(z, rel=1e-5)


@pytest.mark.parametrize("name", ["token_choice", "threshold", "loss_free", "quantile"])
def test_padding_does_not_count_as_load(name: str) -> None:
    """A02: four tokens for four experts and four pads for expert 0: [1, 1, 1, 1], not [5, 1, 1, 1]."""
    layer = layer_of(name, num_experts=4, experts_per_token=1, balance_coefficient=0.01, balance_scope="global")
    set_router(layer, 10 * torch.eye(4))
    valid_BS = torch.tensor([[True] * 4 + [False] * 4])
    look(layer, torch.eye(8)[[0, 1, 2, 3, 0, 0, 0, 0]][None], valid_BS=valid_BS)
    assert layer.router.step_load_E.tolist() == [1, 1, 1, 1]
    layer.router.after_step()
    assert layer.router.load_E.tolist() == [0.25] * 4


# Passes of one step: which of the 8 tokens each process and micro-batch sees, and how often the step holds the batch.
SHARES = {
    "4 identical micro-batches": ([slice(0, 8)] * 4, 4),
    "2 processes with identical data": ([slice(0, 8)] * 2, 2),
    "2 processes of 2 micro-batches": ([slice(0, 8)] * 4, 4),
    "the tokens split over 2 processes": ([slice(0, 4), slice(4, 8)], 1),
    "a sequence split in 1 and 7": ([slice(0, 1), slice(1, 8)], 1),
}


@pytest.mark.parametrize("share", SHARES)
def test_the_layout_does_not_change_the_strength(share: str) -> None:
    """A04, A05: E = 4, k = 2, coefficients 0.01, no main loss; the sum over all passes is one pass' gradient.

    The balance loss is that of the global batch: its load is given, so that even a sequence can be cut. `group` and
    `sequence` scopes are defined over whole sequences, which no layout cuts.
    """
    moe = {"balance_scope": "global", "balance_coefficient": 0.01, "z_coefficient": 0.01, "num_experts": 4}
    layer, x_BSD = layer_of("token_choice", **moe), torch.randn(1, 8, 8)
    layer.router.load_E.copy_(torch.tensor([0.4, 0.3, 0.1, 0.2]))
    passes, times = SHARES[share]
    found = []
    for parts, tokens in (([slice(0, 8)], 8), (passes, 8 * times)):
        total_ED = torch.zeros(4, 8)
        for part in parts:
            process = copy.deepcopy(layer)
            (look(process, x_BSD[:, part], step_tokens=tokens)[0] * 0).sum().backward()
            total_ED += process.router.weight_ED.grad
        found.append(total_ED)
    assert found[0].abs().max() > 1e-3
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-8)


LAYOUTS: dict[str, dict[str, Any]] = {
    "experts in every layer": {},
    "the first layer dense": {"dense_layers": 1},
    "every second layer dense": {"layers": 4, "moe_every": 2},
    "tied embeddings, normed queries": {"tie_embeddings": True, "qk_norm": "head"},
}


def router_gradients(model: Transformer, recompute: bool) -> list[Tensor]:
    """Of every layer, with the main loss at weight 0."""
    token_BS, context = torch.arange(18).view(2, 9), RoutingContext(2, 9, mode="train")
    out = checkpoint(model, token_BS, context, use_reentrant=False) if recompute else model(token_BS, context)
    (out * 0).sum().backward()
    return [layer.router.weight_ED.grad for layer in model.moe_layers()]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shared_width", [0, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_coefficient_is_the_strength_in_every_layout(layout: str, shared_width: int, recompute: bool) -> None:
    """A06: 0 gives no router a gradient, 0.02 gives every one exactly twice that of 0.01."""
    found = []
    for coefficient in (0.0, 0.01, 0.02):
        moe = {"group_sequences": 1, "shared_width": shared_width, "balance_coefficient": coefficient}
        model = make_model(model=model_config(**LAYOUTS[layout]), router="token_choice", **moe)
        found.append(router_gradients(model, recompute))
    assert len(found[0]) == {"the first layer dense": 2, "every second layer dense": 2}.get(layout, 3)
    for nothing, once, twice in zip(*found, strict=True):
        assert nothing.eq(0).all() and once.abs().max() > 1e-6 and twice.equal(2 * once)


def test_an_attached_loss_keeps_its_gradient_where_the_activation_enters_and_leaves_a_compiled_graph() -> None:
    """A06: a view of a view of a graph's input would be made outside the graph, and the loss with it be lost."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: attach_loss(x, w**3).view(3, 1), fullgraph=True, backend="aot_eager")
    activation, weight = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    out = compiled(activation * 1, weight)
    (out * 5).sum().backward()
    assert out.flatten().equal(activation) and activation.grad.tolist() == [5, 5, 5]
    assert weight.grad == 12


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", ["token_choice", "threshold", "loss_free"])
def test_a_compiled_layer_has_the_eager_layers_gradients(name: str, backend: str) -> None:
    """A06: routers whose shapes depend on the routing break the graph, and still hand the loss on."""
    x_BSD = torch.randn(2, 12, 8)
    for coefficient in (0.0, 0.01):
        layer = layer_of(name, balance_coefficient=coefficient, backend=backend)
        other = copy.deepcopy(layer)
        torch._dynamo.reset()
        compiled = torch.compile(other, backend="aot_eager")
        for module in (layer, compiled):
            (module(x_BSD, RoutingContext(2, 12, mode="train")) * 0).sum().backward()
        assert (layer.router.weight_ED.grad.abs().max() > 1e-6) == (coefficient > 0)
        for key, expected in gradients(layer).items():
            assert relative_error(gradients(other)[key], expected) < 1e-6 or expected.eq(0).all(), key


@pytest.mark.parametrize(
    ("moe", "expected"),
    [
        ({"router": "token_choice"}, "balance by nothing but losses; losses besides: none, so load is left to chance"),
        ({"router": "token_choice", "balance_coefficient": 0.02}, "losses besides: balance 0.02"),
        (
            {"router": "loss_free", "z_coefficient": 0.001},
            "balance by a bias on the selection; losses besides: z 0.001",
        ),
        (
            {"router": "token_choice", "forced_balance": True},
            "balance by round-robin, scores ignored; losses besides: none",
        ),
        ({}, "balance by the choice itself; losses besides: none"),
    ],
)
def test_start_up_names_what_balances_the_load(moe: dict[str, Any], expected: str) -> None:
    """A06: the method and the coefficients really in use, in one line."""
    config = config_from_dict({"moe": {"expert_width": 8, **moe}})
    corpus, model = SimpleNamespace(sha256="0" * 64, domains=["a"]), Engine.around(make_model(**moe))
    run, console = SimpleNamespace(folder="runs/x", config=config), Console(width=200)
    e = train.Experiment(Job(), run, corpus, None, model, None, torch.device("cpu"), None, 0)  # type: ignore[arg-type]
    with console.capture() as said:
        train.describe(e, console)
    (line,) = [line for line in said.get().splitlines() if line.startswith("balance by")]
    assert expected in line


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("batch, length", [(1, 4), (4, 100)])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_z_loss_depends_on_neither_tokens_nor_choices_and_layers_are_summed(
    layers: int, batch: int, length: int, k: int
) -> None:
    """A07: silent routers, E = 8: (ln 8)^2 for each layer."""
    moe = {"num_experts": 8, "experts_per_token": k, "group_sequences": 1, "z_coefficient": 0.01}
    model = make_model(model=model_config(layers=layers), router="token_choice", **moe)
    for layer in model.moe_layers():
        set_router(layer, torch.zeros(1, 8))
    context = RoutingContext(batch, length, mode="train")
    model(torch.randint(37, (batch, length)), context)
    assert context.auxiliary["z"].item() == pytest.approx(4.32408 * layers, abs=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_logits_give_a_finite_z_loss_in_any_precision(dtype: torch.dtype, padded: bool) -> None:
    """A07: the row [100, 0, ...] in a layer of that precision: 10000, and finite gradients."""
    layer = layer_of("token_choice", z_coefficient=0.01)
    set_router(layer, [[100.0] + [0.0] * 7])
    layer.to(dtype)
    valid_BS = torch.tensor([[True, True, True, False]]) if padded else None
    out, routing, log = look(layer, torch.eye(8, dtype=dtype)[:1].expand(1, 4, 8), valid_BS=valid_BS)
    assert out.dtype == dtype and routing.logits_TE[0].tolist() == [100.0] + [0.0] * 7
    assert log["z"].item() == pytest.approx(10000, abs=1e-2)
    out.sum().backward()
    assert all(gradient.isfinite().all() for gradient in gradients(layer).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_see_the_softmax_once(dtype: torch.dtype) -> None:
    """A07: logits [2, 0, 0, 0], k = 1: P0 = 0.71123 enters the balance loss; a second softmax would make it 0.38139."""
    layer = layer_of("token_choice", num_experts=4, experts_per_token=1, balance_coefficient=0.01, z_coefficient=0.01)
    set_router(layer, [[2.0, 0.0, 0.0, 0.0]])
    log = look(layer.to(dtype), torch.eye(8, dtype=dtype)[:1].expand(1, 4, 8))[2]
    assert log["balance"].item() == pytest.approx(4 * 0.71123, abs=1e-4)
    assert log["z"].item() == pytest.approx(math.log(math.exp(2) + 3) ** 2, abs=1e-4)


WEIGHTS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "quantile": ({}, [0.64391, 0.23688]),
    "quantile, normalised": ({"renormalize": True}, [0.73106, 0.26894]),
    "quantile, sigmoid, normalised": ({"score": "sigmoid", "renormalize": True}, [0.54645, 0.45355]),
    "token_choice, sigmoid, normalised": ({"score": "sigmoid", "renormalize": True}, [0.54645, 0.45355]),
    "noisy_top_k, softmax of the chosen": ({}, [0.73106, 0.26894]),
    "gshard, shares of the two": ({}, [0.73106, 0.26894]),
    "loss_free": ({}, [0.88080, 0.73106]),
    "loss_free, normalised": ({"renormalize": True}, [0.54645, 0.45355]),
    "sinkhorn": ({}, [0.64391, 0.23688]),
    "threshold": ({}, [0.64391, 0.23688]),
    "threshold, sigmoid": ({"score": "sigmoid"}, [0.88080, 0.73106]),
    "expert_choice": ({}, [0.64391, 0.23688]),
    "hash": ({}, [0.5, 0.5]),
}


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("case", WEIGHTS)
def test_the_weights_of_every_convention_and_a_scale_after_normalising(case: str, scale: float) -> None:
    """A09: logits [2, 1, 0, -1], k = 2, as served."""
    (moe, expected), name = WEIGHTS[case], case.split(",")[0]
    layer = layer_of(name, num_experts=4, route_scale=scale, **moe)
    if name != "hash":
        set_router(layer, [[2.0, 1.0, 0.0, -1.0]])
    if hasattr(layer.router, "cutoff_E"):
        layer.router.cutoff_E.copy_(torch.tensor([0.2, 0.2, 9.0, 9.0]))
    weight_A = look(layer, torch.eye(8)[:1][None], mode="causal")[1].weight_A
    assert weight_A.tolist() == pytest.approx([scale * weight for weight in expected], abs=5e-5)


@pytest.mark.parametrize("mode", ["train", "train_router", "causal"])
@every_router
def test_weights_are_from_0_to_1_before_they_are_scaled(name: str, mode: Any) -> None:
    """A09: whatever the logits are. ReMoE's ReLU alone has no upper bound."""
    weight_A = look(layer_of(name), torch.randn(4, 8, 8) * 10, mode=mode)[1].weight_A
    assert weight_A.min() >= 0 and weight_A.max() > 0.4
    assert name == "remoe" or weight_A.max() <= 1


@pytest.mark.parametrize(("first", "second", "expected"), [([4, 0], [0, 4], [0, 0]), ([6, 0], [0, 2], [-1, 1])])
def test_processes_that_add_their_counts_hold_the_same_bias(
    first: list[int], second: list[int], expected: list[int]
) -> None:
    """A11: local loads are lopsided, the step's is what moves the bias, and both have the same bits after it."""
    layers = [layer_of("loss_free", num_experts=2, experts_per_token=1) for _ in range(2)]
    for layer, counts in zip(layers, (first, second), strict=True):
        set_router(layer, 10 * torch.eye(2))
        look(layer, torch.eye(8)[torch.arange(2).repeat_interleave(torch.tensor(counts))][None])
        assert layer.router.step_load_E.tolist() == counts
    total_E = layers[0].router.step_load_E + layers[1].router.step_load_E
    for layer in layers:
        layer.router.step_load_E.copy_(total_E)
        layer.router.after_step()
        assert layer.router.bias_E.tolist() == pytest.approx([0.001 * sign for sign in expected], abs=1e-9)
    assert layers[0].router.bias_E.equal(layers[1].router.bias_E)


@every_router
def test_a_bf16_model_scores_in_fp32(name: str) -> None:
    """A12: logits are the fp32 product of the bf16 input and of weights that were never rounded."""
    layer = layer_of(name).to(torch.bfloat16)
    x_BSD = torch.randn(4, 16, 8).bfloat16()
    _, routing, _ = look(layer, x_BSD, mode="causal")
    assert routing.scores_TE.dtype == routing.logits_TE.dtype == routing.weight_A.dtype == torch.float32
    if name != "hash":
        assert layer.router.weight_ED.bfloat16().float().ne(layer.router.weight_ED).any()
        assert routing.logits_TE.equal(x_BSD.flatten(0, 1).float() @ layer.router.weight_ED.T)


@pytest.mark.parametrize("name", ["token_choice", "loss_free", "quantile", "sinkhorn", "base"])
def test_a_bf16_model_tells_nearly_equal_logits_apart(name: str) -> None:
    """A12: [1.000, 1.001, 0, 0] chooses expert 1, although in bf16 both probabilities are 0.36523."""
    assert torch.tensor([1.0, 1.001, 0.0, 0.0]).softmax(0).bfloat16().tolist()[:2] == [0.365234375] * 2
    layer = layer_of(name, num_experts=4, experts_per_token=1).to(torch.bfloat16)
    set_router(layer, [[1.0, 1.001, 0.0, 0.0]])
    assert pairs(look(layer, torch.eye(8).bfloat16()[:1][None], mode="causal")[1]) == [(0, 1)]


@pytest.mark.parametrize("order", ["position", "choice", "score", "priority"])
@pytest.mark.parametrize("name", ["token_choice", "loss_free", "quantile"])
def test_pads_before_a_sequence_take_no_place_and_teach_nothing(name: str, order: str) -> None:
    """H01: 4 tokens for expert 0 with places for 2, alone and behind 4 pads that want it more: 2 dropped in both.

    The same outputs and the same gradient of every weight; output 0 and no gradient at pads.
    """
    moe = {"num_experts": 2, "experts_per_token": 1, "capacity_factor": 1.0, "drop_order": order}
    layer, x_BSD = layer_of(name, **moe), torch.randn(1, 4, 8)
    set_router(layer, [[3.0, 0.0]])
    x_BSD[..., 0], pads_BSD = 1, torch.full((1, 4, 8), 50.0)
    found = []
    for pads in (0, 4):
        layer.zero_grad()
        given_BSD = torch.cat((pads_BSD[:, :pads], x_BSD), 1).requires_grad_()
        y_BSD, routing, _ = look(layer, given_BSD, valid_BS=torch.arange(4 + pads)[None] >= pads)
        (y_BSD * torch.linspace(0.5, 2, 8)).sum().backward()
        assert routing.dropped() == 2 and [token - pads for token, _ in pairs(routing)] == [0, 1]
        assert y_BSD[:, :pads].eq(0).all() and given_BSD.grad[:, :pads].eq(0).all()
        found.append(gradients(layer) | {"y": y_BSD[:, pads:].detach(), "x": given_BSD.grad[:, pads:]})
    assert found[0]["experts.w2_EDF"][0].ne(0).any()
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, msg=lambda message, key=key: f"{key}: {message}")
