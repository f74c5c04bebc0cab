"""Held-out likelihood of a job of several processes is that of one, whatever each of them gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.batches import HeldoutBatch
from eval.likelihood import Scores, evaluate_windows
from parallel.shards import specialize
from tests.parallel import engines
from tests.parallel.layouts import MODEL, make_config
from tests.parallel.pool import Pool

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "ep2": {"expert": 2},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "zero3": {"zero": 3},
}
BYTES = np.arange(MODEL["vocabulary_size"])
DOCUMENTS = (3, 9, 5, 9, 2, 7, 3)  # tokens of each


def batches(rows: int, left: bool) -> list[HeldoutBatch]:
    """Documents as rows padded to 8 labels, in batches of so many rows; the last one is short by some."""
    found = []
    for first in range(0, len(DOCUMENTS), rows):
        sizes = DOCUMENTS[first : first + rows]
        token_BS, label_BS = torch.zeros(len(sizes), 8, dtype=torch.int64), torch.full((len(sizes), 8), -100)
        for row, size in enumerate(sizes):
            generator = torch.Generator().manual_seed(first + row)
            document = torch.randint(1, MODEL["vocabulary_size"], (size,), generator=generator)
            place = slice(8 - (size - 1), 8) if left else slice(0, size - 1)
            token_BS[row, place], label_BS[row, place] = document[:-1], document[1:]
        found.append(HeldoutBatch("ab"[first % 2], token_BS, label_BS, label_BS >= 0))
    return found


def evaluate(router: str, parallel: dict[str, Any], world: int) -> list[Scores]:
    """In every way of batching and padding; called on every process together."""
    engine = engines.build(make_config(moe={"router": router}, parallel=parallel), world)
    return [evaluate_windows(engine, batches(rows, left), BYTES) for rows in (1, 2, 3, 8) for left in (False, True)]


@pytest.mark.parametrize("router", ["expert_choice", "token_choice"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_give_the_sums_of_one(pool: Callable[[int], Pool], layout: str, router: str) -> None:
    """H07: 7 documents of 2 to 9 tokens; batches of 1, 2, 3 and 8 rows, so that ranks have unequal shares, or none."""
    (alone,) = [evaluate(router, {}, 1)]
    for found in pool(2).run(evaluate, router, LAYOUTS[layout], 2):
        for one, two in zip(alone, found, strict=True):
            assert one.domains.keys() == two.domains.keys()
            for domain, expected in one.domains.items():
                assert (two.domains[domain].tokens, two.domains[domain].bytes) == (expected.tokens, expected.bytes)
                assert two.domains[domain].nats == pytest.approx(expected.nats, rel=1e-5)
            assert two.total.tokens == sum(DOCUMENTS) - len(DOCUMENTS)
            assert two.total.perplexity == pytest.approx(alone[0].total.perplexity, rel=1e-5)


def planted_losses() -> Scores:
    """Two rows, one a rank: two labels of loss 0, and one label of loss ln 10."""
    engine = engines.build(make_config(), 2)
    labels = torch.tensor([[1, 1], [2, -100]])

    def losses(self: Any, normed_BSD: Tensor, label_BS: Tensor) -> Tensor:
        return torch.where(label_BS == 2, math.log(10), 0.0)

    for model in engine.models:
        specialize(model, {"losses": losses})
    return evaluate_windows(engine, [HeldoutBatch("a", torch.ones_like(labels), labels, labels >= 0)], BYTES)


def test_perplexity_is_taken_of_the_sums_of_both_ranks(pool: Callable[[int], Pool]) -> None:
    """H07: 10^(1/3) on both; the mean of the ranks' perplexities is 5.5, that of their mean losses gives 3.16228."""
    for scores in pool(2).run(planted_losses):
        assert scores.total.perplexity == pytest.approx(2.15443, abs=1e-5)
        assert scores.total.tokens == 3
