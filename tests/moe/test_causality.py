"""Which routers let an earlier token see its future: exact audits on the backend whose bits do not move.

The audit changes a suffix, and looks for any changed bit before it: in the logits and in every layer's routing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.model import Transformer
from moe.routing import RoutingContext
from tests.moe.helpers import calibrate, make_model, make_router, pairs, select

B, S = 6, 12
ROUTERS: dict[str, dict[str, Any]] = {
    "token choice": {"router": "token_choice", "group_sequences": 2},
    "token choice with capacity": {"router": "token_choice", "capacity_factor": 0.7, "group_sequences": 1},
    "threshold": {"router": "threshold", "group": "flat", "group_sequences": 2},
    "expert choice, position": {"router": "expert_choice", "group": "position", "group_sequences": 3},
    "expert choice, flat": {"router": "expert_choice", "group": "flat", "group_sequences": 2},
    "expert choice, chunk": {"router": "expert_choice", "group": "chunk", "chunk_length": 6, "group_sequences": 2},
}
LEAKY = ["expert choice, flat", "expert choice, chunk"]


def build(name: str, **more: Any) -> Transformer:
    """A model whose cutoffs come from other data."""
    model = make_model(backend="reference", **ROUTERS[name], **more)
    return model if ROUTERS[name]["router"] == "token_choice" else calibrate(model)


def look(model: Transformer, token_BS: Tensor, mode: Any) -> dict[str, Tensor]:
    """Logits, and scores and routes of every layer, all as (B, S, ...)."""
    found: dict[str, Tensor] = {}
    batch, length = token_BS.shape

    def observe(layer: int, routing: Any) -> None:
        found[f"scores {layer}"] = routing.scores_TE.view(batch, length, -1)
        found[f"routes {layer}"] = routing.assigned_TE().view(batch, length, -1)

    with torch.no_grad():
        found["logits"] = model(token_BS, RoutingContext(batch, length, mode=mode, observe=observe))
    assert len(found) == 1 + 2 * len(model.moe_layers())
    return found


def changed_before(model: Transformer, start: int, mode: Any, rows: slice = slice(None)) -> dict[str, bool]:
    """Resample tokens from position `start` on in `rows`: what differs before it, in those rows?"""
    token_BS = torch.randint(37, (B, S))
    other_BS = token_BS.clone()
    other_BS[rows, start:] = (other_BS[rows, start:] + torch.randint(1, 37, other_BS[rows, start:].shape)) % 37
    first, second = look(model, token_BS, mode), look(model, other_BS, mode)
    assert not first["logits"][rows, start:].isclose(second["logits"][rows, start:]).all(-1).any()
    return {name: not first[name][rows, :start].equal(second[name][rows, :start]) for name in first}


@pytest.mark.parametrize("start", [1, 5, 11])
@pytest.mark.parametrize("name", ROUTERS)
def test_causal_mode_never_sees_the_future(name: str, start: int) -> None:
    """H02: logits, scores and routes of every layer before the change are bit-equal."""
    changed = changed_before(build(name), start, "causal")
    assert not any(changed.values()), changed


@pytest.mark.parametrize("name", [name for name in ROUTERS if name not in LEAKY])
@pytest.mark.parametrize("mode", ["train", "train_router"])
def test_routers_that_are_causal_in_training(name: str, mode: str) -> None:
    """Token choice (dropping in token order), threshold, and expert choice at one position across sequences."""
    for start in (1, 7):
        changed = changed_before(build(name), start, mode)
        assert not any(changed.values()), changed


@pytest.mark.parametrize("name", LEAKY)
def test_the_audit_bites_on_routers_that_leak(name: str) -> None:
    """H02: flat and chunk groups let the suffix change earlier routes and logits, in the first layer already."""
    changed = changed_before(build(name), 7, "train_router")
    assert changed["logits"] and changed["routes 0"] and not changed["scores 0"]


@pytest.mark.parametrize("name", LEAKY)
def test_the_threshold_phase_closes_the_leak(name: str) -> None:
    """The last part of an expert-choice training run is causal as well."""
    model = build(name)
    token_BS = torch.randint(37, (B, S))
    other_BS = token_BS.clone()
    other_BS[:, 7:] = (other_BS[:, 7:] + 1) % 37
    with torch.no_grad():
        first, second = (
            model(t, RoutingContext(B, S, mode="train", threshold_phase=True)) for t in (token_BS, other_BS)
        )
    assert first[:, :7].equal(second[:, :7]) and not first[:, 7:].isclose(second[:, 7:]).all()


def test_a_raised_last_token_pushes_an_earlier_one_out() -> None:
    """H02: 16 tokens, capacity 4: the last token's higher score costs exactly one earlier token its slot."""
    router = make_router(router="expert_choice", num_experts=8, experts_per_token=2, group="flat", group_sequences=1)
    scores_TE = torch.rand(16, 8) * 0.9
    scores_TE[15, 3] = 0.0
    raised_TE = scores_TE.clone()
    raised_TE[15, 3] = 0.95
    context = RoutingContext(1, 16, mode="train_router")
    before, after = (set(pairs(select(router, s, context, logits_TE=s))) for s in (scores_TE, raised_TE))
    loser = sorted((t for t in range(15)), key=lambda t: -scores_TE[t, 3].item())[3]
    assert before - after == {(loser, 3)} and after - before == {(15, 3)}
    causal = RoutingContext(1, 16)
    before, after = (set(pairs(select(router, s, causal, logits_TE=s))) for s in (scores_TE, raised_TE))
    assert after - before == {(15, 3)} and not before - after


def test_capacity_in_token_order_sees_other_sequences_but_not_its_own_future() -> None:
    """A group of 2 sequences: a changed suffix leaves its own row's prefix, and reaches the next row."""
    model = make_model(backend="reference", router="token_choice", capacity_factor=0.7, group_sequences=2)
    assert not any(changed_before(model, 5, "train", rows=slice(1, None, 2)).values())
    assert not any(changed_before(model, 5, "train", rows=slice(0, None, 2)).values())
    token_BS = torch.randint(37, (B, S))
    other_BS = token_BS.clone()
    other_BS[::2, 5:] = (other_BS[::2, 5:] + 1) % 37
    first, second = look(model, token_BS, "train"), look(model, other_BS, "train")
    assert not first["routes 0"][1::2].equal(second["routes 0"][1::2])


@pytest.mark.parametrize("name", ROUTERS)
def test_causal_mode_is_independent_of_the_batch(name: str) -> None:
    """A2, H01: alone, among others and in another order, a sequence has the same routes and logits."""
    model = build(name)
    token_BS = torch.randint(37, (B, S))
    order_B = torch.tensor([4, 0, 5, 2, 1, 3])
    whole, turned = look(model, token_BS, "causal"), look(model, token_BS[order_B], "causal")
    for row in range(B):
        alone = look(model, token_BS[row : row + 1], "causal")
        for layer in range(3):
            assert alone[f"routes {layer}"][0].equal(whole[f"routes {layer}"][row])
        torch.testing.assert_close(alone["logits"][0], whole["logits"][row], rtol=0, atol=1e-5)
    torch.testing.assert_close(turned["logits"], whole["logits"][order_B], rtol=0, atol=1e-5)


def test_position_groups_depend_on_the_batch_and_that_is_documented() -> None:
    """H02, A2 bites: causal is not the same as independent; other rows of the group change a row's routes."""
    model = build("expert choice, position")
    token_BS = torch.randint(37, (B, S))
    other_BS = token_BS.clone()
    other_BS[1] = torch.randint(37, (S,))
    first, second = look(model, token_BS, "train_router"), look(model, other_BS, "train_router")
    assert not first["routes 0"][0].equal(second["routes 0"][0])
    for name in first:  # rows 3 to 5 are another group
        assert first[name][3:].equal(second[name][3:])
