"""Failures that users of other libraries met, by their ids: expert parallelism (B) and parity between layouts (C).

B01, B03, B04, B10, C03, C04 and C05 are also cases of `test_layouts.py`; here is what they ask beyond it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from data.batches import Batch
from tests.parallel import failure_jobs as jobs
from tests.parallel.cases import ROUTERS
from tests.parallel.layouts import make_config
from training.step import train_step

BIASED = ROUTERS["sigmoid, bias"] | {"num_experts": 4, "experts_per_token": 1}
TOP_K = ROUTERS["top-k"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_starved_processes_take_part_and_have_gradients_of_exactly_zero(pool, recompute):
    """B01: five steps, the starved process alternating, with and without recompute."""
    config = make_config(moe=BIASED, parallel={"expert": 2, "recompute": recompute})
    first, second = pool(2).run(jobs.starve_in_turn, config, timeout=60.0)
    for step in range(5):
        busy, starved = (first, second) if step % 2 == 0 else (second, first)
        assert all(norm == 0 for norm in starved[step])
        assert all(norm > 0 for norm in busy[step])


def test_experts_that_nobody_uses_end_bit_equal_everywhere(pool):
    """B03: sharded parameters; the experts in between get no token on any process."""
    config = make_config(moe=BIASED, parallel={"zero": 3})
    for norms in pool(2).run(jobs.starve_in_turn, config, timeout=60.0):
        assert len(norms) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(
    "sends", [[[4, 2], [0, 0]], [[0, 0], [0, 0]], [[2, 2], [3, 1]]], ids=["one empty", "all empty", "unequal"]
)
def test_rows_arrive_whole_whatever_their_number_type_and_strides(pool, sends, dtype):
    """B06 (1) and B07: splits with zeros, three types, transposed inputs, expanded gradients."""
    for strided in (False, True):
        for rank, (arrived, gradient) in enumerate(pool(2).run(jobs.exchange, sends, dtype, strided)):
            assert arrived[:, 0].tolist() == [10 * peer + rank for peer in (0, 1) for _ in range(sends[peer][rank])]
            if dtype != torch.int64:
                assert gradient.shape == (sum(sends[rank]), 2) and (gradient == 1).all()


def test_bad_splits_are_refused_with_both_numbers_before_anything_is_sent(pool):
    """B07: no peer is left waiting."""
    for message in pool(2).run(jobs.bad_splits):
        assert message == "splits [3, 1] are for 4 rows; 5 were given"
    assert pool(2).run(jobs.round_trip) == [True, True]


def test_all_processes_are_in_the_same_collectives_whatever_the_routing(pool):
    """B06: the sequence of collectives does not depend on local sizes."""
    first, second = pool(2).run(jobs.collective_sequences, make_config(moe=TOP_K, parallel={"expert": 2}))
    assert first == second
    assert len(first["0, 1"]) > 100


@pytest.mark.parametrize("world", [2, 4])
def test_shared_expert_and_residual_are_added_once(pool, world):
    """B08: 100 + 10 + 1 is 111 however many processes split the layer."""
    assert pool(world).run(jobs.constants) == [111.0] * world
    assert max(pool(world).run(jobs.split_feed_forward)) < 1e-5


@pytest.mark.parametrize(("world", "size"), [(2, 101), (4, 101), (4, 41)])
def test_a_vocabulary_that_does_not_divide_has_the_losses_of_the_whole_one(pool, world, size):
    """C01: labels at both ends of a part, and one that does not count."""
    for losses, loss_error, gradient_error in pool(world).run(jobs.vocabulary, size, 3.0):
        assert loss_error < 1e-5 and gradient_error < 1e-6
        assert losses[0, 4] == 0
    for losses, _, _ in pool(world).run(jobs.vocabulary, size, 0.0):
        assert losses[0, :4] == pytest.approx(math.log(size), rel=1e-6)


def test_tied_gradients_add_up_over_data_and_stages(pool):
    """C03: (1 + 3) / 2 + (5 + 7) / 2 = 8 on all four processes."""
    assert pool(4).run(jobs.tied_gradient) == [[8.0] * 3] * 4


def test_tied_copies_stay_bit_equal_and_are_counted_once(pool):
    """C03: PP2 x DP2 with ZeRO-1, ten steps of AdamW with weight decay."""
    tied = {"tie_embeddings": True}
    config = make_config(model=tied, moe=TOP_K, parallel={"pipeline": 2, "zero": 1})
    found = pool(4).run(jobs.tied_copies, config, timeout=60.0)
    tables = [table for table, _, _ in found]
    assert all(np.array_equal(table, tables[0]) for table in tables)
    whole = jobs.build(make_config(model=tied, moe=TOP_K), 1)
    assert {count for _, count, _ in found} == {whole.parameter_counts()[0]}
    assert all(norms == found[0][2] for _, _, norms in found)


def test_a_mean_over_labels_is_no_mean_of_means():
    """C05, C04: one label with a loss and three with another; the loss is that of four labels, however they are cut."""
    label_BS = torch.full((4, 8), -100)
    label_BS[0, 0] = 5
    label_BS[2, :3] = torch.tensor([7, 8, 9])
    token_BS = torch.arange(32).view(4, 8) + 1
    batch = Batch(token_BS, label_BS, torch.zeros(4, dtype=torch.int64))
    found = []
    for micro in (4, 2, 1):
        training = {"batch_sequences": 4, "micro_batch_sequences": micro}
        config = make_config(moe={"router": "token_choice", "group_sequences": 1}, training=training)
        engine = jobs.build(config, 1, rows=4)
        optimizer = torch.optim.SGD([h.parameter for h in engine.held], lr=0.1)
        result = train_step(engine, optimizer, batch, config, 0, 0)
        assert result.tokens == 4
        found.append((result.loss, result.gradient_norm))
    for loss, norm in found[1:]:
        assert (loss, norm) == (pytest.approx(found[0][0], rel=1e-5), pytest.approx(found[0][1], rel=1e-5))


@pytest.mark.parametrize(
    ("case", "norm"), [("experts only", math.sqrt(120)), ("no gradient", math.sqrt(20)), ("3 and 4", 5.0)]
)
def test_the_norm_adds_squares_over_processes_and_all_clip_alike(pool, case, norm):
    """C07: 10.95 and not the average 7.24; a process without a gradient counts as 0."""
    found = pool(2).run(jobs.norm_by_hand, case)
    for measured, dense, _ in found:
        assert measured == pytest.approx(norm, rel=1e-6)
        assert dense == found[0][1]
    if case == "3 and 4":
        assert found[0][1] == pytest.approx([0.6, 0.0])
        assert found[0][2] == pytest.approx([0.8])


@pytest.mark.parametrize(
    ("parallel", "where"),
    [({}, "final_norm.weight"), ({"expert": 2}, "2.feed_forward.experts.w2_EDF"), ({"zero": 3}, "final_norm.weight")],
)
def test_a_bad_gradient_on_one_process_is_skipped_by_all(pool, parallel, where):
    """C08: step 4 of 5; weights, moments and rates agree afterwards, and the next step is normal."""
    first, second = pool(2).run(jobs.bad_gradient, make_config(parallel=parallel), where, timeout=60.0)
    assert first["skipped"] == second["skipped"]
    assert [step for step, _ in first["skipped"]] == [3]
    assert first["counts"] == second["counts"] == {4.0}
    assert first["rates"] == second["rates"]
    for name, value in first["weights"].items():
        assert np.isfinite(value).all(), name
        if not parallel:
            assert np.array_equal(value, second["weights"][name]), name


@pytest.mark.parametrize("parallel", [{"zero": 1}, {"expert": 2}, {"tensor": 2}, {"pipeline": 2}])
def test_matrices_decay_and_vectors_do_not_under_any_layout(pool, parallel):
    """C09: every parameter in one group; ones become 0.99 where they decay, and stay elsewhere."""
    config = make_config(parallel=parallel, moe={"predictor_coefficient": 0.1})
    for found in pool(2).run(jobs.decays, config):
        for name, decay in found.items():
            assert decay == (0.0 if "norm" in name or name.endswith("bias_E") else 0.1), name
    for found in pool(2).run(jobs.decayed_ones, config):
        for name, value in found.items():
            assert value == pytest.approx(1.0 if "norm" in name or name.endswith("bias_E") else 0.99, rel=1e-6), name
