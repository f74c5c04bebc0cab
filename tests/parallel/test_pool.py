"""What the processes of the other tests do when one of them fails, hangs or dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.parallel.pool import Hang, Pool, WorkerError

Pools = Callable[[int], Pool]
HANG_S = 2.0  # enough for all that is not a hang


def add_up(x: float) -> float:
    total = torch.tensor(x * (1 + dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def process_id() -> int:
    return os.getpid()


def fail(failing: list[int]) -> None:
    if dist.get_rank() in failing:
        raise ArithmeticError(f"no number on {dist.get_rank()}")
    add_up(1.0)


def stay_away(rank: int) -> None:
    """All but one enter a collective that nobody leaves; the last one is elsewhere."""
    add_up(1.0)
    if dist.get_rank() == rank:
        stay()
    dist.all_gather_into_tensor(torch.empty(3 * 5), torch.ones(5))


def stay() -> None:
    while True:
        time.sleep(0.01)


def receive_nothing() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.empty(7, dtype=torch.int64), 2)
    dist.barrier()


def redistribute_alone() -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(6), mesh, [Shard(0)])
    if dist.get_rank() == 1:
        x.redistribute(placements=[Replicate()]).to_local().sum()


def leave(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    add_up(1.0)


def return_what_does_not_pickle() -> object:
    return lambda: None


def use_a_mesh(places: list[list[int]]) -> tuple[list[float], int]:
    """Sums within the rows of a mesh, by DTensor, and how many threads the process has."""
    mesh = DeviceMesh("cpu", torch.tensor(places), mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh["b"], [Shard(0)])
    ((x * 2 + 1).sum(0) * 3).redistribute(placements=[Replicate()])
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=mesh.get_group("b"))
    return [total.item(), (x + x).sum().full_tensor().item()], len(os.listdir("/proc/self/task"))


def test_results_come_back_by_rank_and_from_the_same_processes_every_time(pool: Pools) -> None:
    three = pool(3)
    assert three.run(add_up, 2.0) == [12.0] * 3
    ids = three.run(process_id)
    assert len(set(ids)) == 3 and os.getpid() not in ids
    assert three.run("tests.parallel.test_pool:process_id") == ids


def test_an_exception_is_raised_with_the_rank_and_its_traceback_and_what_the_others_wait_in(pool: Pools) -> None:
    with pytest.raises(WorkerError) as error:
        pool(3).run(fail, [1])
    message = str(error.value)
    assert "rank 1 raised in tests.parallel.test_pool:fail" in message
    assert "ArithmeticError: no number on 1" in message and "in fail\n" in message
    assert "rank 0 had not finished: last entered allreduce of float32 () among ranks 0, 1, 2" in message
    assert pool(3).run(add_up, 1.0) == [6.0] * 3


def test_every_rank_that_raises_is_reported(pool: Pools) -> None:
    with pytest.raises(WorkerError, match=r"(?s)no number on 0.*no number on 2|no number on 2.*no number on 0"):
        pool(3).run(fail, [0, 2])
    with pytest.raises(WorkerError, match=r"(?s)rank 0 raised.*[Pp]ickle"):
        pool(3).run(return_what_does_not_pickle)
    assert pool(3).run(add_up, 1.0) == [6.0] * 3


def test_a_hang_names_the_ranks_the_last_collective_of_each_and_their_stacks(pool: Pools) -> None:
    before = pool(3).run(process_id)
    start = time.monotonic()
    with pytest.raises(Hang) as error:
        pool(3).run(stay_away, 2, timeout=HANG_S)
    assert time.monotonic() - start < HANG_S + 4
    message = str(error.value)
    assert message.startswith("ranks 0, 1, 2 of 3 had not finished tests.parallel.test_pool:stay_away after 2 s")
    first, second, third = (message.split(f"\nrank {rank}: ")[1] for rank in range(3))
    for waiting in (first, second):
        assert "float32 (15,) among ranks 0, 1, 2 (call 2)" in waiting.splitlines()[0]
        assert "in stay_away" in waiting
    assert "last entered allreduce of float32 () among ranks 0, 1, 2" in third and "in stay\n" in third
    assert not set(before) & set(pool(3).run(process_id))
    for number in before:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_a_hang_of_one_rank_names_only_it(pool: Pools) -> None:
    """Another rank finished, and waits for the rest; a third waits in a barrier of the test's own."""
    with pytest.raises(Hang, match=r"^ranks 0, 1, 2 of 3 .*") as error:
        pool(3).run(receive_nothing, timeout=HANG_S)
    assert "rank 0: last entered recv of int64 (7,) among ranks 0, 1, 2, from 2" in str(error.value)
    assert "rank 1: last entered barrier" in str(error.value)
    with pytest.raises(Hang, match=r"^rank 1 of 3 .*") as error:
        pool(3).run(redistribute_alone, timeout=HANG_S)
    assert "rank 1: last entered all_gather" in str(error.value)
    assert pool(3).run(add_up, 1.0) == [6.0] * 3


@pytest.mark.parametrize(("code", "words"), [(9, "rank 2 died with exit code 9"), (-9, "rank 2 was killed by SIGKILL")])
def test_a_rank_that_dies_is_reported_at_once(pool: Pools, code: int, words: str) -> None:
    pool(3).run(process_id)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"(?m)^{words} in tests.parallel.test_pool:leave"):
        pool(3).run(leave, 2, code, timeout=30)
    assert time.monotonic() - start < 3
    assert pool(3).run(add_up, 1.0) == [6.0] * 3


def test_a_rank_that_died_between_runs_is_reported_by_the_next(pool: Pools) -> None:
    os.kill(pool(3).run(process_id)[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        pool(3).run(add_up, 1.0)
    assert pool(3).run(add_up, 1.0) == [6.0] * 3


def test_a_run_finds_no_groups_meshes_or_threads_of_earlier_ones(pool: Pools) -> None:
    """Meshes that are equal but for their groups, which DTensor takes one for another."""
    four = pool(4)
    ids = four.run(process_id)
    counts = []
    for _ in range(3):
        for places in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]):
            results, threads = zip(*four.run(use_a_mesh, places), strict=True)
            sums = {rank: float(sum(row)) for row in places for rank in row}
            assert [list(r) for r in results] == [[sums[rank], 132.0] for rank in range(4)]
            counts.append(threads)
    assert counts[0] == counts[-1], "threads of destroyed groups stay"
    assert four.run(process_id) == ids


def test_a_function_that_others_cannot_import_is_refused(pool: Pools) -> None:
    with pytest.raises(ValueError, match="make it a function of a module"):
        pool(3).run(lambda: None)
