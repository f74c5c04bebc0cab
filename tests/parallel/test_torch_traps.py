"""Combinations that torch gets silently wrong, and that `[parallel]` therefore refuses: the proofs.

These fail once torch has mended what they prove: the refusal in `parallel/config.py` can be lifted then.
"""

from __future__ import annotations

import pytest
import torch

from parallel.config import SPLIT_BACKWARD
from tests.parallel.cases import case
from tests.parallel.layouts import differences, train
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
