"""Exchanges of rows between processes: zero splits, one process, strides and bad splits (known failure B07)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.routing import Routing
from parallel.collectives import Exchange
from parallel.config import Layout
from parallel.expert import ExpertDispatcher
from parallel.mesh import Mesh
from tests.parallel.pool import Pool

Pools = Callable[[int], Pool]


def exchange_rows(dtype: torch.dtype, send: list[list[int]]) -> tuple[list[int], list[int], list[int]]:
    """What this process gets when process n sends `send[n]`; and the gradients of what it sent and what it expected."""
    rank = dist.get_rank()
    mine, receive = send[rank], [row[rank] for row in send]
    rows = torch.arange(sum(mine), dtype=torch.float32).add(10 * rank)[:, None].expand(-1, 3).contiguous().to(dtype)
    rows.requires_grad_(dtype.is_floating_point)
    exchange = Exchange(dist.group.WORLD, mine, receive)
    out = exchange.finish(exchange.start(rows))
    assert out.dtype == dtype
    if not rows.requires_grad:
        return out[:, 0].tolist(), [], []
    (out * out.detach()).sum().backward()  # so that a row's gradient is the row, wherever it went
    assert rows.grad is not None
    return out[:, 0].tolist(), rows.grad[:, 0].tolist(), rows[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_an_exchange_takes_splits_of_zero_and_one_process(pool: Pools, dtype: torch.dtype) -> None:
    """B07: process 0 sends [4, 2], process 1 nothing; then nobody sends anything; then to oneself."""
    (first, *gradients), (second, *_) = pool(2).run(exchange_rows, dtype, [[4, 2], [0, 0]], timeout=20.0)
    assert first == [0, 1, 2, 3] and second == [4, 5]
    assert gradients[0] == gradients[1]
    assert [rows for rows, *_ in pool(2).run(exchange_rows, dtype, [[0, 0], [0, 0]], timeout=20.0)] == [[], []]
    ((alone, *gradients),) = pool(1).run(exchange_rows, dtype, [[3]], timeout=20.0)
    assert alone == [0, 1, 2] and gradients[0] == gradients[1]


def strided_rows() -> list[Tensor]:
    """Output and gradient of transposed rows and of a sum, whose gradient has stride 0; and of contiguous ones."""
    found = []
    for contiguous in (False, True):
        base = torch.arange(12.0).view(3, 4).requires_grad_()
        exchange = Exchange(dist.group.WORLD)
        out = exchange.finish(exchange.start(base.t().contiguous() if contiguous else base.t()))
        weight = torch.ones(4, 3)
        (out * weight).sum().backward() if contiguous else out.sum().backward()
        assert base.grad is not None
        found += [out.detach(), base.grad]
    return found


def test_an_exchange_takes_rows_and_gradients_that_are_not_contiguous(pool: Pools) -> None:
    """B07: gloo refuses them."""
    for out, gradient, expected, expected_gradient in pool(2).run(strided_rows, timeout=20.0):
        assert torch.equal(out, expected) and torch.equal(gradient, expected_gradient)
        assert gradient.eq(1).all()


def bad_splits() -> tuple[list[str], list[float]]:
    """What is said to splits that do not fit, which differ between processes; then a good exchange."""
    rank = dist.get_rank()
    said = []
    for send in ([3 + rank, 3], [1, 2, 2], None):
        with pytest.raises(ValueError, match="5|3 splits") as error:
            Exchange(dist.group.WORLD, send, send).start(torch.ones(5, 1))
        said.append(str(error.value))
    exchange = Exchange(dist.group.WORLD)
    return said, exchange.finish(exchange.start(torch.full((2, 1), float(rank)))).flatten().tolist()


def test_splits_that_do_not_fit_are_refused_with_both_numbers_before_anything_is_sent(pool: Pools) -> None:
    """B07: nobody is left waiting, and nothing is left over for the next exchange."""
    for rank, (said, rows) in enumerate(pool(2).run(bad_splits, timeout=20.0)):
        assert said == [
            f"splits [{3 + rank}, 3] are for {6 + rank} rows; 5 were given",
            "3 splits to send were given for 2 processes",
            "5 rows cannot go in equal parts to 2 processes",
        ]
        assert rows == [0, 1]


def round_trip(capacity: int | None) -> bool:
    """Whether identity experts give back every bit of the input."""
    mesh = Mesh(Layout(2, 1, 2, 1, 1, 2, 1))
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = 4 * capacity if capacity else (5, 3)[dist.get_rank()]
    x_TD = torch.randn(tokens, 7, generator=generator)
    order_A = torch.randperm(tokens, generator=generator)
    edge_E = [capacity * (n + 1) for n in range(4)] if capacity else [0, 2, 2, tokens]
    routing = Routing(order_A, torch.tensor(edge_E, dtype=torch.int32), torch.ones(tokens), tokens, capacity)
    dispatcher = ExpertDispatcher(mesh)
    sent = dispatcher.send(x_TD, routing)
    return torch.equal(dispatcher.combine(dispatcher.receive(sent)[0], sent), x_TD)


@pytest.mark.parametrize("capacity", [None, 3], ids=["uneven splits", "equal splits"])
def test_experts_that_do_nothing_give_back_every_bit(pool: Pools, capacity: int | None) -> None:
    """B07: dispatch and combine."""
    assert pool(2).run(round_trip, capacity, timeout=20.0) == [True, True]
