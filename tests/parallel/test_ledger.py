"""Bytes and order of collectives, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from parallel.ledger import Ledger, Record, bytes_sent
from tests.parallel.pool import Pool

Pools = Callable[[int], Pool]
Summary = tuple[dict[str, int], dict[str, float], dict[str, list[str]]]
ROWS = [[(2 * rank + 3 * other) % 4 for other in range(4)] for rank in range(4)]  # that a rank sends to another


def record(case: str, *args: Any) -> Summary:
    """Calls, bytes and sequence of one of the cases below."""
    with Ledger() as ledger:
        globals()[case](*args)
    return ledger.count_by_kind(), ledger.bytes_by_kind(), ledger.sequence()


def one_of_each(name: str) -> None:
    """Ranks of four; every size is different."""
    rank = dist.get_rank()
    halves = torch.ones(5, dtype=torch.bfloat16)
    match name:
        case "all_to_all_single":
            dist.all_to_all_single(torch.empty(8, 3), torch.ones(8, 3))
        case "all_to_all":
            dist.all_to_all(list(torch.empty(4, 6)), list(torch.ones(4, 6)))
        case "all_gather_into_tensor":
            dist.all_gather_into_tensor(torch.empty(20, dtype=torch.bfloat16), halves)
        case "all_gather":
            dist.all_gather([torch.empty_like(halves) for _ in range(4)], halves)
        case "reduce_scatter_tensor":
            dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8))
        case "reduce_scatter":
            dist.reduce_scatter(torch.empty(2), list(torch.ones(4, 2)))
        case "all_reduce":
            dist.all_reduce(torch.ones(6, dtype=torch.int64))
        case "all_reduce, not waited for at once":
            work = dist.all_reduce(torch.ones(6, dtype=torch.int64), async_op=True)
            assert work is not None
            work.wait()
        case "broadcast":
            dist.broadcast(torch.ones(3), 1)
        case "reduce":
            dist.reduce(torch.ones(3), 1)
        case "gather":
            dist.gather(torch.ones(7), [torch.empty(7) for _ in range(4)] if rank == 2 else None, 2)
        case "scatter":
            dist.scatter(torch.empty(7), list(torch.ones(4, 7)) if rank == 2 else None, 2)
        case "barrier":
            dist.barrier()
        case "functional.broadcast":
            functional.broadcast(torch.ones(3), 1, dist.group.WORLD).wait()
        case "functional.all_reduce":
            (functional.all_reduce(torch.ones(6, dtype=torch.int64), "sum", dist.group.WORLD) + 1).sum()


@pytest.mark.parametrize(
    ("name", "kind", "sent"),
    [
        ("all_to_all_single", "all_to_all", [72] * 4),  # 3 of 4 parts of 96 bytes
        ("all_to_all", "all_to_all", [72] * 4),
        ("all_gather_into_tensor", "all_gather", [30] * 4),  # 10 bytes on to 3 others
        ("all_gather", "all_gather", [30] * 4),
        ("reduce_scatter_tensor", "reduce_scatter", [24] * 4),  # 3 of 4 parts of 32 bytes
        ("reduce_scatter", "reduce_scatter", [24] * 4),
        ("all_reduce", "all_reduce", [72] * 4),  # 2 * 3/4 of 48 bytes
        ("all_reduce, not waited for at once", "all_reduce", [72] * 4),
        ("broadcast", "broadcast", [0, 12, 12, 12]),  # 1 to 2 to 3 to 0
        ("reduce", "reduce", [12, 0, 12, 12]),
        ("gather", "gather", [28, 28, 0, 28]),
        ("scatter", "scatter", [0, 0, 84, 0]),
        ("barrier", "barrier", [0] * 4),
        ("functional.broadcast", "broadcast", [0, 12, 12, 12]),
        ("functional.all_reduce", "all_reduce", [72] * 4),
    ],
)
def test_every_collective_counts_the_bytes_that_leave_the_rank(
    pool: Pools, name: str, kind: str, sent: list[int]
) -> None:
    summaries = pool(4).run(record, "one_of_each", name)
    assert [count for count, _, _ in summaries] == [{kind: 1}] * 4
    assert [size for _, size, _ in summaries] == [{kind: amount} for amount in sent]
    assert list(summaries[0][2]) == ["0, 1, 2, 3"]
    _assert_agreement(summaries)


def uneven(function: str) -> None:
    rank = dist.get_rank()
    send, receive = ROWS[rank], [row[rank] for row in ROWS]
    x, out = torch.ones(sum(send), 5, requires_grad=True), torch.empty(sum(receive), 5)
    match function:
        case "splits":
            dist.all_to_all_single(out, x.detach(), receive, send)
        case "autograd":
            functional.all_to_all_single_autograd(x, receive, send, dist.group.WORLD).sum().backward()
            assert x.grad is not None and x.grad.eq(1).all()


@pytest.mark.parametrize("function", ["splits", "autograd"])
def test_uneven_rows_count_where_they_go_and_not_those_that_stay(pool: Pools, function: str) -> None:
    """Rows of 20 bytes; some ranks send none to some others. Backward sends what forward received."""
    summaries = pool(4).run(record, "uneven", function)
    for rank, (count, size, _) in enumerate(summaries):
        forward = sum(rows for other, rows in enumerate(ROWS[rank]) if other != rank)
        backward = sum(row[rank] for other, row in enumerate(ROWS) if other != rank)
        passes = 2 if function == "autograd" else 1
        assert count == {"all_to_all": passes}
        assert size == {"all_to_all": 20 * (forward + (backward if passes == 2 else 0))}
    _assert_agreement(summaries)


def point_to_point() -> None:
    """Ranks of four: 0 to 3 blocking, then 1 and 2 to each other in one batch."""
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.ones(5), 3)
    elif rank == 3:
        dist.recv(torch.empty(5), 0)
    else:
        there = dist.P2POp(dist.isend, torch.ones(rank, 3), 3 - rank)
        back = dist.P2POp(dist.irecv, torch.empty(3 - rank, 3), 3 - rank)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()


def test_a_send_counts_its_bytes_and_a_receive_none(pool: Pools) -> None:
    summaries = pool(4).run(record, "point_to_point")
    assert [size for _, size, _ in summaries] == [
        {"send": 20}, {"send": 12, "recv": 0}, {"send": 24, "recv": 0}, {"recv": 0},
    ]  # fmt: skip
    assert summaries[0][2] == summaries[3][2] == {"0 to 3": ["point to point of 5 float32"]}
    assert summaries[1][2]["2 to 1"] == ["point to point of 6 float32"]
    _assert_agreement(summaries)


def fsdp_step() -> None:
    model = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 4, bias=False))
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=module is not model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    model(torch.ones(3, 6)).sum().backward()


def test_an_fsdp_step_gathers_twice_and_scatters_gradients_once(pool: Pools) -> None:
    """Weights of 240 and 160 bytes on 2 ranks: each rank sends its half, in forward and backward."""
    summaries = pool(2).run(record, "fsdp_step")
    assert [count for count, _, _ in summaries] == [{"all_gather": 4, "reduce_scatter": 2}] * 2
    assert [size for _, size, _ in summaries] == [{"all_gather": 400, "reduce_scatter": 200}] * 2
    _assert_agreement(summaries)


def redistribute() -> None:
    """(8, 3) on the second axis of two by two ranks: gathered, in backward scattered; then partial sums three ways."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    x = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)], run_check=False).requires_grad_()
    x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).sum().backward()
    part = DTensor.from_local(torch.ones(8, 3), mesh, [Partial()], run_check=False)
    part.redistribute(placements=[Replicate()]).to_local().sum()
    part.redistribute(placements=[Shard(1)]).to_local().sum()
    part.relu()  # of the sum, so DTensor adds up within the operator


def test_what_dtensor_sends_is_counted_in_forward_and_in_backward(pool: Pools) -> None:
    """96 bytes in all: a half of 48 is sent by a gather, 48 of 96 by a scatter, 96 by each all-reduce of two.

    Of 3 columns one rank takes 2, so that the scatter of columns is padded to 2 each: 64 of 128 bytes.
    """
    summaries = pool(4).run(record, "redistribute")
    assert [count for count, _, _ in summaries] == [{"all_gather": 1, "reduce_scatter": 2, "all_reduce": 2}] * 4
    assert [size for _, size, _ in summaries] == [
        {"all_gather": 48, "reduce_scatter": 48 + 64, "all_reduce": 2 * 96}
    ] * 4
    assert [list(sequence) for _, _, sequence in summaries] == [["0, 1"], ["0, 1"], ["2, 3"], ["2, 3"]]
    _assert_agreement(summaries)


def pipeline(steps: int) -> None:
    """Two stages, three micro-batches of (2, 5)."""
    rank, hidden = dist.get_rank(), torch.empty(2, 5, device="meta", requires_grad=True)
    linear, device = nn.Linear(5, 5), torch.device("cpu")
    stage = PipelineStage(linear, rank, 2, device, input_args=(hidden,), output_args=(hidden,))
    schedule = Schedule1F1B(stage, 3, loss_fn=lambda y, target: (y - target).square().sum())
    x = torch.ones(6, 5)
    for _ in range(steps):
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
    assert linear.weight.grad is not None


def test_a_pipeline_step_sends_activations_one_way_and_gradients_the_other(pool: Pools) -> None:
    """40 bytes a micro-batch; before its first step torch sends one int32 each way, to open the connections."""
    one = "point to point of 10 float32"
    for steps in (1, 2):
        summaries = pool(2).run(record, "pipeline", steps)
        assert [count for count, _, _ in summaries] == [{"send": 1 + 3 * steps, "recv": 1 + 3 * steps}] * 2
        assert [size for _, size, _ in summaries] == [{"send": 4 + 120 * steps, "recv": 0}] * 2
        for _, _, sequence in summaries:
            assert sorted(sequence) == ["0 to 1", "1 to 0"]
            assert all(calls == ["point to point of 1 int32"] + [one] * 3 * steps for calls in sequence.values())


def receive_from_anyone() -> None:
    dist.recv(torch.empty(1))


def test_an_operation_that_the_ledger_does_not_know_is_refused(pool: Pools) -> None:
    with pytest.raises(Exception, match="does not know what c10d.recv_any_source_"):
        pool(2).run(record, "receive_from_anyone")


def test_sequences_show_another_order_another_size_and_another_type() -> None:
    def sequence(*calls: tuple[str, torch.dtype, int]) -> dict[str, list[str]]:
        ledger = Ledger()
        ledger.records = [Record(kind, (0, 2), 2, dtype, size, 0) for kind, dtype, size in calls]
        return ledger.sequence()

    first, second = ("all_reduce", torch.float32, 3), ("all_gather", torch.float32, 3)
    others = [
        (second, first),
        (first,),
        (first, ("all_gather", torch.float32, 4)),
        (("all_reduce", torch.int32, 3), second),
    ]
    assert sequence(first, second) == {"0, 2": ["all_reduce of 3 float32", "all_gather of 3 float32"]}
    assert all(sequence(*other) != sequence(first, second) for other in others)
    # How much each process exchanges with each other one is its own affair.
    assert sequence(("all_to_all", torch.float32, 3)) == sequence(("all_to_all", torch.float32, 4))


def test_bytes_need_not_be_whole_by_the_ring_convention() -> None:
    assert bytes_sent("all_reduce", 20, 3) == pytest.approx(80 / 3)
    with pytest.raises(ValueError, match="no convention for the bytes of 'shout'"):
        bytes_sent("shout", 20, 3)


def _assert_agreement(summaries: list[Summary]) -> None:
    known: dict[str, list[str]] = {}
    for _, _, sequence in summaries:
        for members, calls in sequence.items():
            assert known.setdefault(members, calls) == calls
