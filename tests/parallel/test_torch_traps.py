"""Combinations that torch gets silently wrong, and that `[parallel]` therefore refuses: the proofs.

These fail once torch has mended what they prove: the refusal in `parallel/config.py` can be lifted then.
"""

from __future__ import annotations

import pytest
import torch

from parallel.config import SPLIT_BACKWARD
from parallel.ledger import Ledger
from tests.parallel.cases import case
from tests.parallel.engines import batch_of, build, micro_batches, share
from tests.parallel.layouts import differences, make_config, train
from training.config import Config

MEASURED = "2.13"


def without_refusal(config: Config, zero: int) -> Config:
    """The configuration with a ZeRO stage that its check would refuse; what is pickled is not checked again."""
    object.__setattr__(config.parallel, "zero", zero)
    return config


def wrong_gradients(pool, schedule: str, zero: int) -> list[str]:
    named = case(4, "pp2 x zero1", parallel={"schedule": schedule}, training={"micro_batch_sequences": 2})
    reference = train(named.reference(), 1, named.seed)
    config = without_refusal(named.config(), zero)
    parts = pool(4).run(train, config, 4, named.seed, timeout=60.0)
    return [fault for fault in differences([reference], parts) if "gradient of" in fault]


@pytest.mark.skipif(not torch.__version__.startswith(MEASURED), reason=f"measured on torch {MEASURED} only")
@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_zero_3_with_a_split_backward_gives_wrong_gradients(pool, schedule):
    assert wrong_gradients(pool, schedule, 3), "torch mended this: lift the refusal in parallel/config.py"


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_zero_1_with_a_split_backward_does_not(pool, schedule):
    assert wrong_gradients(pool, schedule, 1) == []


def gradients_scattered(config: Config) -> int:
    """How often this process scatters gradients in a step of two micro-batches or more."""
    engine = build(config, 4)
    batch = share(engine, batch_of([6, 2, 5, 1] * 2, 6))
    told = micro_batches(batch, config.micro_batch_sequences(engine.mesh.layout), step_tokens=48, step_groups=8)
    assert len(told) >= 2
    with Ledger() as ledger:
        engine.forward_backward(told, torch.tensor(28))
        engine.finish_gradients()
    return ledger.count_by_kind()["reduce_scatter"]


def scattered(pool, zero: int, **parallel: int) -> list[int]:
    config = make_config(
        model={"layers": 2},
        moe={"router": "token_choice", "group_sequences": 1},
        parallel={**parallel, "zero": 1},
        training={"batch_sequences": 8, "sequence_length": 6, "micro_batch_sequences": 1},
    )
    return pool(4).run(gradients_scattered, without_refusal(config, zero))


@pytest.mark.skipif(not torch.__version__.startswith(MEASURED), reason=f"measured on torch {MEASURED} only")
def test_a_pipeline_stage_scatters_gradients_once_a_step_whatever_it_is_told(pool):
    """Which is what `zero = 1` is; `zero = 2` scatters those of every micro-batch where there is no pipeline."""
    once, every = scattered(pool, 1), scattered(pool, 2)
    assert every == [2 * count for count in once]  # each of four processes has two micro-batches
    told_once, told_every = scattered(pool, 1, pipeline=2), scattered(pool, 2, pipeline=2)
    assert told_every == told_once, "torch mended this: lift the refusal in parallel/config.py"
