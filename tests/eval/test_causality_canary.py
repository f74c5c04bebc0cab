"""A5: nothing can be learnt from random tokens, except from a router that has seen them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from eval.canary import Canary, canary_config, run_canary
from moe.config import MoEConfig

CHUNK = MoEConfig(num_experts=8, group="chunk", chunk_length=8, group_sequences=1, score="sigmoid", allow_leak=True)


@pytest.mark.slow
def test_chunked_expert_choice_learns_random_tokens() -> None:
    """H02: below ln 16 by far more than sampling error, and above it when it is served causally."""
    canary = run_canary(CHUNK, 32, steps=100)
    assert canary.proves_leak and canary.z < -10
    assert canary.causal_loss > canary.floor


@pytest.mark.slow
def test_expert_choice_at_one_position_does_not() -> None:
    canary = run_canary(replace(CHUNK, group="position", chunk_length=0, group_sequences=8), 32, steps=100)
    assert not canary.proves_leak
    assert canary.loss == pytest.approx(math.log(16), abs=0.02)


def test_a_proof_takes_four_standard_errors() -> None:
    canary = Canary(100, 2.75, 2.65, 0.03125, 2.8, 0.01, 8, 32)
    assert canary.z == pytest.approx(-3.2) and not canary.proves_leak
    assert replace(canary, loss=2.62).proves_leak
    assert not replace(canary, loss=2.95).proves_leak


def test_a_few_steps_give_losses_near_ln_16_and_their_error() -> None:
    canary = run_canary(CHUNK, 32, steps=20)
    assert canary.floor == pytest.approx(2.7726, abs=1e-4)
    assert canary.loss == pytest.approx(canary.floor, abs=0.2) and canary.causal_loss > canary.floor
    assert 0 < canary.standard_error < 0.05 and 0 < canary.causal_standard_error < 0.05
    with pytest.raises(ValueError, match="--canary-steps 19: must be at least 20, or 0 for no canary"):
        run_canary(CHUNK, 32, steps=19)


def shape(moe: MoEConfig, sequence_length: int) -> tuple[int, int]:
    config, _ = canary_config(moe, sequence_length, 20, 0)
    return config.training.batch_sequences, config.training.sequence_length


def test_routing_groups_are_kept_where_that_is_affordable() -> None:
    flat = MoEConfig(num_experts=8, group_sequences=4)
    assert shape(flat, 256) == (8, 256)
    assert canary_config(flat, 256, 20, 0)[1] == []
    assert shape(replace(flat, group_sequences=1), 24) == (86, 24)
    assert shape(CHUNK, 4096) == (32, 64)
    assert shape(replace(CHUNK, chunk_length=1024), 4096) == (2, 1024)
    assert shape(replace(CHUNK, group="position", chunk_length=0, group_sequences=32), 4096) == (32, 64)


def test_groups_that_are_not_kept_are_named() -> None:
    """12 experts at 2 a token: C = 4 * L * 2 / 12 is whole where L is a multiple of 3, at most 1,024."""
    moe = MoEConfig(num_experts=12, group_sequences=4)
    config, notes = canary_config(moe, 4096, 20, 0)
    assert config.training.sequence_length == 1023
    assert notes == ["routing groups of 16,384 tokens shrunk to 4 x 1023: smaller groups leak more"]


def test_the_training_router_routes_to_the_end_and_the_rest_of_the_section_is_kept() -> None:
    moe = replace(CHUNK, z_coefficient=0.01, threshold_after=0.5)
    config, _ = canary_config(moe, 64, 20, 3)
    assert config.threshold_step == 20 and config.moe.z_coefficient == 0.01 and config.run.seed == 3
    always = replace(moe, threshold_after=0.0)
    assert canary_config(always, 64, 20, 0)[0].threshold_step == 0
    token_choice = MoEConfig(router="token_choice", capacity_factor=1.0, drop_order="score", num_experts=4)
    assert canary_config(token_choice, 64, 20, 0)[0].moe.allow_leak
