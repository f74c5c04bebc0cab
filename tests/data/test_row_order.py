"""Rows of a step sorted by domain: the same rows, and groups that hold one domain where that is possible."""

from __future__ import annotations

import pytest
import torch

from data.batches import Batches
from data.errors import DataError

S, ROWS = 16, 12


@pytest.fixture(scope="module")
def orders(tiny_corpus):
    return tuple(Batches(tiny_corpus, S, ROWS, seed=3, row_order=order) for order in ("mixed", "domain"))


def test_a_step_has_the_same_rows_in_both_orders(orders):
    mixed, by_domain = orders
    for step in range(8):
        rows = [sorted(batches.batch(step).token_BS.tolist()) for batches in (mixed, by_domain)]
        assert rows[0] == rows[1]


def test_rows_of_a_domain_lie_together_in_the_order_in_which_they_were_drawn(orders):
    mixed, by_domain = orders
    for step in range(8):
        drawn, batch = mixed.batch(step), by_domain.batch(step)
        assert batch.domain_B.tolist() == sorted(drawn.domain_B.tolist())
        for domain in set(batch.domain_B.tolist()):
            assert torch.equal(batch.label_BS[batch.domain_B == domain], drawn.label_BS[drawn.domain_B == domain])


def test_mixed_rows_are_not_sorted_already(orders):
    mixed, _ = orders
    assert any(mixed.batch(step).domain_B.diff().min() < 0 for step in range(8))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_find_their_parts_of_one_sorted_batch(orders, ranks):
    batches = orders[1]
    parts = [batches.batch(7, rank * ROWS // ranks, (rank + 1) * ROWS // ranks) for rank in range(ranks)]
    for field in range(3):
        assert torch.equal(torch.cat([part[field] for part in parts]), batches.batch(7)[field])


def test_another_order_is_refused(tiny_corpus):
    with pytest.raises(DataError, match='"mixed" and "domain"'):
        Batches(tiny_corpus, S, ROWS, seed=3, row_order="sorted")
