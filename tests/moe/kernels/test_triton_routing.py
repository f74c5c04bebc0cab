"""Routing kernels decide what the routers decide, ties included, in Triton's interpreter; and they compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe.kernels.triton import ahead_of_time as aot
from moe.kernels.triton.launch import only_noted
from moe.kernels.triton.routing import largest_per_row, softmax_top_k
from tests.moe.kernels import routing_jobs as jobs

Interpreter = Callable[..., Any]


@pytest.mark.parametrize("levels", [1, 1000])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(37, 8, 2), (70, 60, 4), (9, 512, 8), (5, 7, 7), (6, 2, 1), (40, 128, 1)]
)
def test_softmax_and_top_k(interpreter: Interpreter, tokens: int, experts: int, k: int, levels: int) -> None:
    """The same choice as `top_k_mask` on the same scores; softmax and its gradient as PyTorch's."""
    found = interpreter(jobs.top_k, tokens, experts, k, levels)
    assert found["ties"] > 0 or levels > 1 or k == experts
    assert found["decisions"] == 0 and found["experts"] == 0
    assert found["scores"] < 1e-6 and found["gradients"] < 1e-5


def test_nan_scores_choose_experts_that_exist(interpreter: Interpreter) -> None:
    """As `top_k_mask` does: NaN is the largest, and k experts are chosen."""
    found, expected = interpreter(jobs.top_k_of_nan, 5, 3)
    assert found == expected and sum(found[1]) == 3


@pytest.mark.parametrize("levels", [1, 3, 100_000])
@pytest.mark.parametrize(
    ("shape", "count"), [((3, 50), 7), ((2, 4, 64), 16), ((2, 2500), 600), ((5, 9), 9), ((4, 33), 1), ((1, 1), 1)]
)
def test_expert_choice(interpreter: Interpreter, shape: tuple[int, ...], count: int, levels: int) -> None:
    """The same tokens in the same order as `largest_per_row`, and the same smallest value kept."""
    found = interpreter(jobs.largest, shape, count, levels)
    assert found["index"] and found["kth"]
    assert found["ties"] or levels > 3 or shape[-1] < 50


@pytest.mark.parametrize(("experts", "k"), [(513, 2), (8, 0), (8, 9)])
def test_too_many_experts_are_refused(experts: int, k: int) -> None:
    """With what to use in its place."""
    with pytest.raises(ValueError, match=rf"up to 512 experts.*not {experts} and k = {k}.*top_k_mask"):
        softmax_top_k(torch.empty(4, experts, device="meta"), k)


@pytest.mark.parametrize("target", aot.TARGETS)
def test_routing_kernels_do_not_spill(target: str) -> None:
    """For the sizes of Qwen3-30B-A3B, and for the most experts."""
    with only_noted() as noted:
        for experts in (128, 512):
            softmax_top_k(torch.empty(32_768, experts, device="meta"), 8)
        largest_per_row(torch.empty(128, 32_768, device="meta"), 2048)
    for launch in noted:
        found = aot.measure(launch, target)
        assert found.spilled == 0 and found.warnings == () and found.blocks >= 4, (launch.name, found)
