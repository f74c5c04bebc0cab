"""bf16 compute: masters, moments, gradients and routers in fp32; the numbers of one process within bf16's rounding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parallel.layouts import assemble, make_config
from tests.parallel.precision_jobs import one_step

TOP_K = {"router": "token_choice", "renormalize": True}


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {}), (2, {"zero": 1}), (2, {"zero": 3}), (2, {"tensor": 2}), (4, {"zero": 3, "expert": 2})],
    ids=["dp2", "zero1", "zero3", "tp2", "zero3 x ep2"],
)
def test_bf16_under_a_layout_is_bf16_in_one_process(pool, world, parallel):
    whole = one_step(make_config(moe=TOP_K), 7)
    found = pool(world).run(one_step, make_config(moe=TOP_K, parallel=parallel), 7, timeout=60.0)
    for part in found:
        assert part["loss"] == pytest.approx(whole["loss"], rel=3e-3)
        assert part["seen"] == {
            "router weight": {"float32"},
            "router logits": {"float32"},
            "activations": {"bfloat16"},
            "parameters": {"float32"},
            "moments": {"float32"},
        }
    gradients = assemble([part["gradients"] for part in found], whole["shapes"])
    reference = assemble([whole["gradients"]], whole["shapes"])
    errors = {name: relative(gradients[name], value) for name, value in reference.items()}
    assert max(errors.values()) < 0.15, errors  # a close routing decision may turn out otherwise
    assert np.median(list(errors.values())) < 0.02
