"""Where a model is cut into stages, and who holds them."""

from __future__ import annotations

import itertools
import random

import pytest

from moe.config import ModelConfig, MoEConfig
from moe.flops import forward_flops_per_token, head_flops, layer_flops
from parallel.config import ParallelConfig
from parallel.pipeline import _balanced, stage_layers, stages_of


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 7])
def test_the_busiest_stage_is_as_light_as_any_cut_allows(parts):
    generator = random.Random(parts)
    for _ in range(20):
        costs = [generator.choice([1.0, 2.5, 7.0, 0.5]) for _ in range(7)]
        cuts = itertools.combinations(range(1, 7), parts - 1)
        every = [[0, *cut, 7] for cut in cuts]
        busiest = [max(sum(costs[a:b]) for a, b in itertools.pairwise(edges)) for edges in every]
        edges = _balanced(costs, parts)
        assert edges in every
        assert max(sum(costs[a:b]) for a, b in itertools.pairwise(edges)) == pytest.approx(min(busiest))


def test_the_head_weighs_on_the_last_stage_and_dense_layers_count_as_what_they_are():
    model = ModelConfig(vocabulary_size=6000, width=64, layers=6, heads=2, dense_layers=1, feed_forward_width=64)
    moe = MoEConfig(num_experts=4, expert_width=64)
    parallel = ParallelConfig(pipeline=2)
    first, last = stage_layers(model, moe, parallel, 128)
    assert (first.start, first.stop, last.stop) == (0, last.start, 6)
    assert len(first) > len(last)  # the head is worth several blocks
    costs = [layer_flops(model, moe, 128, layer) for layer in range(6)]
    assert costs[0] < costs[1]
    assert sum(costs) + head_flops(model) == forward_flops_per_token(model, moe, 128)
    told = ParallelConfig(pipeline=2, stage_layers=(1, 5))
    assert stage_layers(model, moe, told, 128) == [range(1), range(1, 6)]


@pytest.mark.parametrize(
    ("schedule", "held"),
    [
        ("1F1B", [[0], [1], [2]]),
        ("Interleaved1F1B", [[0, 3], [1, 4], [2, 5]]),
        ("ZBVZeroBubble", [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_ranks_hold_one_stage_or_several_dealt_round_or_down_and_up_again(schedule, held):
    parallel = ParallelConfig(pipeline=3, schedule=schedule)
    assert [stages_of(rank, parallel) for rank in range(3)] == held
