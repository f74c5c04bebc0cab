"""Parameter groups and the learning rate's course."""

from __future__ import annotations

import pytest

from moe.config import ModelConfig, MoEConfig
from moe.initialization import build_model
from training.config import TrainingConfig
from training.optimizer import build_optimizer, learning_rate


def test_matrices_decay_and_vectors_do_not_and_each_parameter_is_in_one_group():
    model = build_model(
        ModelConfig(vocabulary_size=50, width=12, layers=2, heads=2, qk_norm="head"),
        MoEConfig(num_experts=3, expert_width=5, shared_width=4),
    )
    optimizer = build_optimizer(model, TrainingConfig(weight_decay=0.3))
    groups = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(groups) == sum(len(group["params"]) for group in optimizer.param_groups)
    for name, parameter in model.named_parameters():
        assert groups[id(parameter)] == (0.0 if "norm" in name else 0.3), name


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.25), (3, 1.0), (4, 1.0), (6, 1.0), (7, 1.0), (8, 2 / 3 * 0.9 + 0.1), (9, 1 / 3 * 0.9 + 0.1)],
)
def test_wsd_warms_up_holds_and_falls_linearly_to_the_final_rate(step, rate):
    config = TrainingConfig(
        steps=10, warmup_steps=4, learning_rate=1.0, schedule="wsd", decay_fraction=0.3, final_learning_rate=0.1
    )
    assert learning_rate(config, step) == pytest.approx(rate)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.5), (1, 1.0), (2, 1.0), (6, 0.5), (9, 0.0380602337)])
def test_cosine_is_half_a_cosine_after_the_warm_up(step, rate):
    config = TrainingConfig(steps=10, warmup_steps=2, learning_rate=1.0, schedule="cosine")
    assert learning_rate(config, step) == pytest.approx(rate)


def test_a_run_that_is_all_warm_up_ends_at_the_peak():
    config = TrainingConfig(steps=4, warmup_steps=4, learning_rate=2.0)
    assert [learning_rate(config, step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
