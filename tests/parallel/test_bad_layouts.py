"""A layout that cannot be is refused before anything is built, by one message with both numbers and a way out."""

from __future__ import annotations

import pytest

from moe.config import ConfigError
from tests.parallel.layouts import make_config


@pytest.mark.parametrize(
    ("world", "sections", "message"),
    [
        (
            6,
            {"parallel": {"pipeline": 2, "tensor": 2}},
            r"pipeline = 2 x parallel.tensor = 2 = 4 .* processes, 6: start",
        ),
        (4, {"parallel": {"data": 3}}, r"parallel.data = 3 x .* = 3, but 4 processes .* set parallel.data = 4"),
        (4, {"parallel": {"expert": 8}}, r"parallel.expert = 8 .* = 8 does not divide the 4 .* among \[1, 2, 4\]"),
        (3, {"parallel": {"expert": 3}}, r"parallel.expert = 3 does not divide moe.num_experts = 8: .*\[1, 2, 4, 8\]"),
        (5, {"parallel": {"expert_tensor": 5}}, r"expert_tensor = 5 does not divide moe.expert_width = 12: choose"),
        (6, {"parallel": {"expert_tensor": 3, "tensor": 2}}, r"expert_tensor = 3 and parallel.tensor = 2: one must"),
        (8, {"parallel": {"tensor": 8}}, r"parallel.tensor = 8 does not divide the 4 key/value heads .*\[1, 2, 4\]"),
        (
            4,
            {"parallel": {"tensor": 4}, "model": {"feed_forward_width": 10}},
            r"tensor = 4 .*feed_forward_width = 10: choose",
        ),
        (
            2,
            {"parallel": {"tensor": 2}, "moe": {"shared_width": 5}},
            r"tensor = 2 does not divide moe.shared_width = 5: choose",
        ),
        (8, {"parallel": {"pipeline": 8}}, r"cuts 8 stages, and model.layers = 4: use parallel.pipeline = 4"),
        (
            4,
            {"parallel": {"pipeline": 4, "schedule": "Interleaved1F1B"}},
            r'cuts 8 stages, and model.layers = 4: use parallel.pipeline = 2, or parallel.schedule = "1F1B"',
        ),
        (
            2,
            {"parallel": {"pipeline": 2, "stage_layers": [3, 2]}},
            r"stage_layers = \[3, 2\]: must be 2 numbers .* = 4; as a flag, --parallel.stage-layers 2 2",
        ),
        (
            1,
            {"parallel": {"stage_layers": [2]}},
            r"stage_layers = \(2,\) has no effect with parallel.pipeline = 1 .*remove",
        ),
        (2, {"parallel": {"schedule": "GPipe"}}, r"schedule = 'GPipe' has no effect with parallel.pipeline = 1"),
        (
            2,
            {"parallel": {"pipeline": 2, "stages_per_rank": 3}},
            r'stages_per_rank = 3 has no effect .* parallel.schedule = "1F1B"',
        ),
        (
            2,
            {"parallel": {"pipeline": 2}, "training": {"micro_batch_sequences": 16}},
            r"micro_batch_sequences = 16: .* with 2 stages needs 2 micro-batches, not 1; choose among \[2, 4, 8\]",
        ),
        (
            2,
            {"parallel": {"pipeline": 2, "schedule": "DualPipeV"}, "training": {"micro_batch_sequences": 8}},
            r"with 4 stages needs 4 micro-batches, not 2",
        ),
        (
            16,
            {},
            r"batch_sequences = 16 .* 16 data-parallel parts .* multiple of 32, or start 8 processes",
        ),
        (3, {}, r"batch_sequences = 16 .* 3 data-parallel parts .* multiple of 6, or start 2 processes"),
        (4, {"parallel": {"replicate": 3, "zero": 1}}, r"replicate = 3 does not divide parallel.data = 4: choose"),
        (2, {"parallel": {"replicate": 2, "zero": 1}}, r"zero = 1 has nothing to split: parallel.data = 2"),
        (2, {"parallel": {"tensor": 2}, "moe": {"group_sequences": 1, "experts_per_token": 1}}, None),
        (
            4,
            {
                "parallel": {"tensor": 4},
                "moe": {"group_sequences": 1, "experts_per_token": 1},
                "training": {"micro_batch_sequences": 1},
            },
            r"= 4 processes share the slots of an expert, and do not divide its 1 .* choose among \[4, 8, 16\]",
        ),
        (
            2,
            {"parallel": {"expert": 2}, "moe": {"router": "soft", "z_coefficient": None}},
            r'router = "soft" .* set parallel.expert',
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_both_numbers_and_what_would(world, sections, message):
    config = make_config(**sections)
    if message is None:
        config.layout(world)
        return
    with pytest.raises(ConfigError, match=message):
        config.layout(world)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"zero": 2, "pipeline": 2}, "zero = 2 with parallel.pipeline > 1: .* use that"),
        ({"zero": 3, "pipeline": 2, "schedule": "ZBVZeroBubble"}, "wrong gradients without an error"),
        ({"replicate": 2}, "replicate = 2 has no effect with parallel.zero = 0"),
        ({"tensor": 0}, "parallel.tensor = 0: must be at least 1"),
        ({"data": -1}, "parallel.data = -1: must be 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(parallel, message):
    with pytest.raises(ConfigError, match=message):
        make_config(parallel=parallel)


def test_micro_batches_are_as_large_as_the_layout_allows_unless_told():
    sizes = {}
    for world, parallel in ((1, {}), (4, {}), (2, {"pipeline": 2}), (4, {"pipeline": 4}), (2, {"tensor": 2})):
        config = make_config(parallel=parallel)
        sizes[world, str(parallel)] = config.micro_batch_sequences(config.layout(world))
    assert list(sizes.values()) == [16, 4, 8, 4, 16]
