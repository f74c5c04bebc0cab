"""Jobs in processes of their own, a few at a time, each ended when it takes too long."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple


class _Running(NamedTuple):
    job: int
    process: BaseProcess
    deadline: float


def run_jobs(
    work: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    processes: int,
    timeout: float,
    keep_going: bool = False,
) -> Iterator[tuple[int, Any]]:
    """Call `work(*job)` for every job, and yield (the job's place, what it returned) as they are done.

    Whatever ends the iteration also ends the processes that are still at work.

    Args:
        work: a function of a module, so that a fresh process can import it.
        jobs: its arguments; they and its results must be picklable.
        processes: at a time.
        timeout: seconds that one job may take.
        keep_going: yield the errors below in place of a result, and go on with the other jobs.

    Raises:
        TimeoutError: a job took longer.
        ChildProcessError: a job raised an error (its traceback is on stderr) or its process died.
    """
    # Not a pool: a pool can neither end a job that hangs nor notice a process that the system killed. And not fork,
    # which copies a process whose threads may hold locks.
    context = multiprocessing.get_context("spawn")
    waiting = deque(enumerate(jobs))
    running: dict[Connection, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job, arguments = waiting.popleft()
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(there, work, arguments), daemon=True)
                process.start()
                there.close()  # so that the death of the process is the end of the pipe
                running[here] = _Running(job, process, time.monotonic() + timeout)
            next_deadline = min(each.deadline for each in running.values())
            ready = wait(list(running), max(0.0, next_deadline - time.monotonic()))
            if not ready:
                late = min(running.values(), key=lambda each: each.deadline)
                too_late = TimeoutError(f"job {jobs[late.job]} gave no result within {timeout:g} s")
                if not keep_going:
                    raise too_late
                late.process.kill()
                late.process.join()
                running = {pipe: each for pipe, each in running.items() if each is not late}
                yield late.job, too_late
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    value = _receive(pipe, jobs[running[pipe].job])
                except ChildProcessError as error:
                    if not keep_going:
                        raise
                    value = error
                each = running.pop(pipe)
                each.process.join()
                yield each.job, value
    finally:
        for each in running.values():
            each.process.kill()
            each.process.join()


def _receive(pipe: Connection, job: tuple[Any, ...]) -> Any:
    try:
        succeeded, value = pipe.recv()
    except EOFError:
        raise ChildProcessError(f"the process of job {job} died; was it killed for its memory?") from None
    if not succeeded:
        raise ChildProcessError(f"job {job} failed: {value}")
    return value


def _work(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Body of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends us
    try:
        value = work(*arguments)
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
        raise
    pipe.send((True, value))
