"""Floating-point operations, against hand counts and against what PyTorch counts on a real forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe.config import ModelConfig, MoEConfig
from moe.flops import forward_flops_per_token, training_flops_per_token
from moe.routing import RoutingContext
from tests.moe.helpers import make_model, model_config

ONE = ModelConfig(vocabulary_size=11, width=4, layers=1, heads=2)


def flops(length: int = 0, model: ModelConfig = ONE, **moe: Any) -> int:
    shape: dict[str, Any] = {"router": "token_choice", "num_experts": 8, "experts_per_token": 2, "expert_width": 8}
    return forward_flops_per_token(model, MoEConfig(**{**shape, **moe}), length)


def test_the_hand_counted_anchor() -> None:
    """G04: D = 4, F = 8, E = 8, k = 2: 448 for experts and router; a shared expert of 16 adds 384; the head 2 V D."""
    projections, head = 2 * 4 * 16, 2 * 11 * 4
    assert flops() == 448 + projections + head
    assert flops(shared_width=16) - flops() == 384
    assert flops(router="dense") == flops() - 2 * 32
    assert flops(num_experts=32) - flops() == 2 * 4 * 24, "more experts at the same k cost only the router"
    assert flops(length=10) - flops() == 2 * 10 * 4, "scores and values over half the sequence each"


def test_training_is_three_forward_passes() -> None:
    """Recompute does not raise it."""
    moe = MoEConfig(router="token_choice")
    assert training_flops_per_token(ONE, moe, 7) == 3 * forward_flops_per_token(ONE, moe, 7)


DEPTHS = {"router": "mixture_of_depths", "num_experts": 1, "experts_per_token": 1, "depth_capacity": 0.25}


@pytest.mark.parametrize(
    "moe",
    [
        {"router": "expert_choice", "group_sequences": 2},
        {"router": "soft", "slots_per_expert": 3, "group_sequences": 2},
        {**DEPTHS, "group_sequences": 4},
        {"router": "dense"},
    ],
    ids=lambda moe: moe["router"],
)
def test_the_count_is_what_pytorch_measures(moe: dict[str, Any]) -> None:
    """G04: within 1 %, with grouped heads, dense layers, a shared expert and an untied head."""
    shape = model_config(dense_layers=1, feed_forward_width=56, heads=6, kv_heads=2, head_dim=10)
    moe = {"num_experts": 6, "experts_per_token": 2, "expert_width": 16, "shared_width": 8, **moe}
    model, token_BS = make_model(model=shape, **moe), torch.randint(37, (4, 9))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(token_BS, RoutingContext(4, 9, mode="train_router"))
    # FlopCounterMode counts the whole square of scores, where the causal half is meant.
    square = 36 * 2 * 3 * 9 * 60
    counted = counter.get_total_flops()
    attention = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "attention" in str(op))
    expected = forward_flops_per_token(shape, MoEConfig(allow_leak=True, **moe), 9) * 36
    assert counted - attention == pytest.approx(expected - square, rel=0.01)
