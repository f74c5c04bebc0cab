"""Hash routing: experts by token id, with nothing to learn and no state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.attention import KeyValueCache
from moe.initialization import parameter_counts
from moe.model import token_losses
from moe.routing import RoutingContext
from tests.moe.helpers import make_layer, make_model, make_router, pairs

D, E, K = 8, 7, 3


def hashed(token_BS: Tensor, valid_BS: Tensor | None = None, mode: Any = "train", **moe: Any) -> Any:
    """Route ids; the activations are NaN, since nothing may look at them."""
    router = make_router(D, **{"router": "hash", "num_experts": E, "experts_per_token": K, **moe})
    x_TD = torch.full((token_BS.numel(), D), torch.nan)
    return router(x_TD, RoutingContext(*token_BS.shape, valid_BS, mode=mode, token_BS=token_BS))


def test_an_ids_experts_are_spread_evenly_from_its_remainder() -> None:
    """(id + j * floor(7 / 3)) mod 7: id 0 has 0, 2, 4; id 5 has 5, 0, 2; id 12 has those of 5."""
    routing = hashed(torch.tensor([[0, 5], [12, 6]]))
    found = [{e for t, e in pairs(routing) if t == token} for token in range(4)]
    assert found == [{0, 2, 4}, {5, 0, 2}, {5, 0, 2}, {6, 1, 3}]


@pytest.mark.parametrize(("experts", "k"), [(7, 3), (7, 7), (6, 4), (5, 1), (16, 2)])
def test_every_id_has_k_distinct_experts_each_weighing_one_over_k(experts: int, k: int) -> None:
    routing = hashed(torch.arange(100).view(4, 25), num_experts=experts, experts_per_token=k)
    assert routing.assigned_TE().sum(1).eq(k).all() and len(pairs(routing)) == 100 * k
    assert routing.weight_A.tolist() == pytest.approx([1 / k] * (100 * k))


def test_ids_used_alike_load_experts_alike() -> None:
    assert hashed(torch.arange(7 * 30).view(6, 35)).counts_E().tolist() == [6 * 35 * K // E] * E


@pytest.mark.parametrize("mode", ["train", "train_router", "causal"])
def test_padding_has_no_expert_whatever_its_id(mode: Any) -> None:
    """A02."""
    token_BS, valid_BS = torch.tensor([[3, -1, 99], [4, 5, 0]]), torch.tensor([[True, False, False], [True] * 3])
    routing = hashed(token_BS, valid_BS, mode=mode)
    assert routing.assigned_TE().sum(1).tolist() == [K, 0, 0, K, K, K]
    assert len(pairs(routing)) == 4 * K


def test_a_context_without_ids_is_refused() -> None:
    layer = make_layer(D, router="hash", num_experts=4, expert_width=8)
    with pytest.raises(ValueError, match="needs token ids: set RoutingContext.token_BS"):
        layer(torch.randn(2, 3, D), RoutingContext(2, 3))


def test_a_model_tells_its_layers_the_ids() -> None:
    """Every layer routes alike, by id; no layer has parameters or state in its router."""
    model, token_BS, seen = make_model(router="hash"), torch.randint(37, (2, 9)), []
    context = RoutingContext(2, 9, mode="train", observe=lambda _, routing: seen.append(routing))
    model(token_BS, context)
    assert len(seen) == 3 and all(pairs(routing) == pairs(seen[0]) for routing in seen)
    expected_TE = torch.zeros(18, 6, dtype=torch.bool)
    for j in range(2):
        expected_TE[torch.arange(18), (token_BS.flatten() + 3 * j) % 6] = True
    assert seen[0].assigned_TE().equal(expected_TE)
    assert not [name for name in model.state_dict() if ".router." in name]
    learned = parameter_counts(make_model(router="token_choice"))[0]
    assert parameter_counts(model)[0] == learned - 3 * 6 * 24


def test_generation_with_a_cache_is_the_full_pass() -> None:
    """H04: token by token, each step knows only its own ids."""
    model, token_BS = make_model(router="hash"), torch.randint(37, (2, 7))
    cache = KeyValueCache(model.config, 2, 7, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        full_BSV = model(token_BS)
        steps = [model(token_B1, cache=cache) for token_B1 in token_BS.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), full_BSV, rtol=0, atol=1e-5)


def test_it_trains() -> None:
    """Twenty steps on one batch more than halve the loss, and every expert in use has a gradient."""
    model, token_BS = make_model(router="hash"), torch.randint(37, (4, 9))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = token_losses(model(token_BS[:, :-1], RoutingContext(4, 8, mode="train")), token_BS[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        model.after_step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    for layer in model.moe_layers():
        assert layer.experts.w2_EDF.grad.flatten(1).abs().amax(1).gt(0).all()
