"""What is sent is what the formulas say, to the byte; expert choice exchanges no counts and waits for nothing."""

from __future__ import annotations

import pytest

from tests.parallel.layouts import make_config
from tests.parallel.traffic_jobs import layer_collectives, measured_and_predicted

HEADS = {"qk_norm": "head"}


@pytest.mark.parametrize(
    ("world", "parallel", "model"),
    [
        (2, {}, {}),
        (2, {"expert": 2}, {}),
        (2, {"tensor": 2}, {}),
        (2, {"tensor": 2}, HEADS | {"vocabulary_size": 42}),
        (2, {"expert": 2, "tensor": 2}, HEADS),
        (2, {"expert_tensor": 2}, {}),
        (2, {"pipeline": 2}, {}),
        (2, {"pipeline": 2, "schedule": "ZBVZeroBubble"}, {"tie_embeddings": True}),
        (2, {"pipeline": 2}, {"tie_embeddings": True}),
        (2, {"zero": 1}, {}),
        (2, {"zero": 2}, {}),
        (2, {"zero": 3}, {}),
        (4, {"expert": 2, "tensor": 2}, {}),
        (4, {"expert": 2, "zero": 3}, {}),
        (4, {"pipeline": 2, "zero": 1}, {}),
        (4, {"replicate": 2, "zero": 2}, {}),
        (4, {"tensor": 2, "zero": 3}, HEADS),
        (4, {"pipeline": 2, "zero": 3}, {}),
        (4, {"pipeline": 2, "zero": 3, "schedule": "LoopedBFS"}, {}),
    ],
)
def test_every_kind_of_collective_sends_the_bytes_of_its_formula(pool, world, parallel, model):
    config = make_config(parallel=parallel, model=model, training={"micro_batch_sequences": 2})
    for rank, (measured, predicted) in enumerate(pool(world).run(measured_and_predicted, config)):
        assert measured == pytest.approx(predicted, rel=1e-12), f"rank {rank}"


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {"expert": 2}), (2, {"tensor": 2}), (2, {"zero": 3}), (4, {"tensor": 2, "zero": 3})],
)
def test_the_formulas_hold_in_bf16(pool, world, parallel):
    training = {"micro_batch_sequences": 2, "precision": "bf16"}
    for measured, predicted in pool(world).run(
        measured_and_predicted, make_config(parallel=parallel, training=training)
    ):
        assert measured == pytest.approx(predicted, rel=1e-12)


def test_stages_tell_each_other_the_sparsity_of_their_routers(pool):
    config = make_config(moe={"router": "remoe", "l1_initial": 0.01}, parallel={"pipeline": 2})
    for measured, predicted in pool(2).run(measured_and_predicted, config):
        assert measured == pytest.approx(predicted, rel=1e-12)


def test_expert_choice_sends_equal_parts_without_counts_and_waits_for_nothing(pool):
    for collectives, waits in pool(2).run(layer_collectives, make_config(parallel={"expert": 2})):
        assert collectives == ["all_to_all float32"] * 4
        assert waits == []


def test_token_choice_tells_its_counts_once_and_waits_once(pool):
    config = make_config(moe={"router": "token_choice"}, parallel={"expert": 2})
    for collectives, waits in pool(2).run(layer_collectives, config):
        assert collectives == ["all_to_all int64"] + ["all_to_all float32"] * 4
        assert waits == ["nonzero", "tolist"]  # the decision's pairs, and the counts
