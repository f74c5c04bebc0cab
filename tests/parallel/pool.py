"""Processes that stay for many tests: a test costs what it computes, not a start and an import of torch."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import mmap
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.ledger import leave_breadcrumbs

# The server imports these once, has one thread only, and workers are forked from it: eight start in 0.1 s.
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor"]
START_S = 60.0
OTHERS_S = 1.0  # that the other ranks have to report once one has failed
BREADCRUMB_BYTES = 512


class WorkerError(Exception):
    """A rank raised, or died; the message has the rank and what it said."""


class Hang(Exception):
    """Ranks had not finished in time; the message has where they were."""


@dataclass
class Worker:
    """One process, as seen from pytest; `report` is its first message of this run, `clean` its second."""

    process: BaseProcess
    connection: Connection
    report: tuple[str, Any] | None = None
    clean: bool | None = None


class Pool:
    """Some processes that run functions together.

    Every run has a default process group of its own (gloo, all ranks), one thread, the same random seed on every rank,
    and no groups, meshes or caches of DTensor of an earlier run. After anything but success all processes are killed,
    and the next run starts new ones.

    Args:
        world: number of ranks.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.folder = tempfile.TemporaryDirectory(prefix="choir-pool-")
        self.workers: list[Worker] = []
        self.runs = 0

    def run(self, function: str | Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call a function on every rank, with the same arguments; what each returned, by rank.

        Args:
            function: of a module, itself or as "tests.parallel.cases:name".
            args: anything that pickles, as must what is returned.
            timeout: seconds.

        Raises:
            WorkerError: a rank raised or died. Others may have been left waiting for it.
            Hang: time is up.
        """
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        if "<" in name:
            raise ValueError(f"{name} cannot be imported by another process: make it a function of a module")
        try:
            if not self.workers:
                self._start()
            self.runs += 1
            task = pickle.dumps((f"{self.folder.name}/store-{self.runs}", pickle.dumps((name, args))))
            for worker in self.workers:
                worker.report = worker.clean = None
            for worker in self.workers:
                with contextlib.suppress(OSError):  # of one that died since the last run; `_wait` finds it
                    worker.connection.send_bytes(task)
            self._wait(name, timeout)
            results = [worker.report[1] for worker in self.workers if worker.report]
        except BaseException:  # pytest's own timeout and Ctrl-C too
            self.close()
            raise
        if not all(worker.clean for worker in self.workers):
            self.close()
        return results

    def close(self) -> None:
        """Kill the processes. A later run starts new ones."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.process.close()
            worker.connection.close()
        self.workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world, self.folder.name, theirs)
            process = context.Process(target=_work, args=arguments, name=f"rank {rank} of {self.world}", daemon=True)
            process.start()
            theirs.close()
            self.workers.append(Worker(process, ours))
        self._wait("start-up", START_S)

    def _wait(self, what: str, timeout: float) -> None:
        """Until every rank has reported and cleaned up."""
        deadline = time.monotonic() + timeout
        failed: list[str] = []
        while (busy := [w for w in self.workers if w.clean is None]) and time.monotonic() < deadline:
            for worker in _heard(busy, deadline - time.monotonic()):
                if failure := self._receive(worker, what):
                    failed.append(failure)
                    if len(failed) == 1:
                        deadline = min(deadline, time.monotonic() + OTHERS_S)
        unfinished = [rank for rank, worker in enumerate(self.workers) if worker.report is None]
        if failed:
            waiting = [f"rank {rank} had not finished: {self._breadcrumb(rank)}" for rank in unfinished]
            raise WorkerError("\n".join(failed + waiting))
        if busy:
            stuck = unfinished or [self.workers.index(worker) for worker in busy]
            stacks = self._stacks(stuck)
            ranks = f"rank{'s' * (len(stuck) > 1)} {', '.join(map(str, stuck))} of {self.world}"
            raise Hang(
                f"{ranks} had not finished {what} after {timeout:g} s"
                + "".join(f"\nrank {rank}: {self._breadcrumb(rank)}\n{stacks[rank]}" for rank in stuck)
            )

    def _receive(self, worker: Worker, what: str) -> str | None:
        """One message of a worker, or that there are no more; in words if it is bad."""
        rank = self.workers.index(worker)
        try:
            kind, value = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            worker.process.join()
            worker.report, worker.clean = ("died", None), False
            return f"rank {rank} {_death(worker.process.exitcode)} in {what}"
        if kind == "clean":
            worker.clean = value
            return None
        worker.report = (kind, value)
        if kind == "done":
            return None
        worker.clean = False
        return f"rank {rank} raised in {what}:\n{value}"

    def _breadcrumb(self, rank: int) -> str:
        path = _breadcrumb_file(self.folder.name, rank)
        text = path.read_bytes().rstrip(b"\0").decode() if path.exists() else ""
        return f"last entered {text}" if text else "entered no collective"

    def _stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """What faulthandler writes of each when asked."""
        files = {rank: _stack_file(self.folder.name, rank) for rank in ranks}
        for rank, path in files.items():
            if path.exists():  # else the signal would end the process
                os.kill(self.workers[rank].process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not all(p.exists() and p.stat().st_size for p in files.values()):
            time.sleep(0.02)
        time.sleep(0.05)  # for the rest of the last one
        return {rank: p.read_text() if p.exists() else "(not started)\n" for rank, p in files.items()}


def _heard(workers: list[Worker], timeout: float) -> list[Worker]:
    """Those that sent something or died. A connection is readable at its end too, so nothing said before is lost."""
    ready = wait([worker.connection for worker in workers], max(0.0, timeout))
    return [worker for worker in workers if worker.connection in ready]


def _death(code: int | None) -> str:
    return (
        f"was killed by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"died with exit code {code}"
    )


def _breadcrumb_file(folder: str, rank: int) -> Path:
    return Path(folder, f"breadcrumb-{rank}")


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stack-{rank}")


def _work(rank: int, world: int, folder: str, connection: Connection) -> None:
    """What a worker does, until the other end of its connection is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with _stack_file(folder, rank).open("w") as stacks, _breadcrumb_file(folder, rank).open("w+b") as file:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        file.truncate(BREADCRUMB_BYTES)
        breadcrumb = mmap.mmap(file.fileno(), BREADCRUMB_BYTES)
        number = 0

        def note(collective: str) -> None:
            nonlocal number
            number += 1
            text = f"{collective} (call {number})".encode()[:BREADCRUMB_BYTES]
            breadcrumb[:] = text.ljust(BREADCRUMB_BYTES, b"\0")

        leave_breadcrumbs(note)
        caches = _caches()
        gc.freeze()  # what is there now stays, and need not be looked at after every run
        connection.send_bytes(pickle.dumps(("done", None)))
        connection.send_bytes(pickle.dumps(("clean", True)))
        while True:
            try:
                store, call = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            number, breadcrumb[:] = 0, bytes(BREADCRUMB_BYTES)
            connection.send_bytes(_report(rank, world, store, call))
            if dist.is_initialized():
                # A rank that leaves early would close connections that others still read from.
                dist.barrier()
                dist.destroy_process_group()
            connection.send_bytes(pickle.dumps(("clean", _clean(caches))))


def _report(rank: int, world: int, store: str, call: bytes) -> bytes:
    """Run one call: pickled ("done", result) or ("raised", traceback)."""
    torch.manual_seed(0)
    random.seed(0)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        name, args = pickle.loads(call)
        module, function = name.split(":")
        return pickle.dumps(("done", getattr(importlib.import_module(module), function)(*args)))
    except BaseException:  # SystemExit and pytest's own exceptions too
        return pickle.dumps(("raised", traceback.format_exc()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _caches() -> list[Any]:
    """The caches of functions of torch.distributed: DTensor keeps meshes in them, and takes one for another."""
    return [
        thing
        for thing in gc.get_objects()
        if type(thing) is functools._lru_cache_wrapper and str(thing.__module__).startswith("torch.distributed")
    ]


def _clean(caches: list[Any]) -> bool:
    """Empty DTensor's caches, whose meshes keep destroyed groups and their threads; whether none is left.

    Equal meshes are one key in those caches, whatever their groups. Torch has no public way to empty them, so which
    there are is looked up here, and a mesh that stays means that the process must go.
    """
    from torch.distributed.tensor import _redistribute, debug

    for cache in caches + _caches():
        cache.cache_clear()
    for module, name in ((debug, "_clear_sharding_prop_cache"), (_redistribute, "clear_redistribute_planner_cache")):
        getattr(module, name, lambda: None)()
    gc.collect()
    return not any(type(thing) is DeviceMesh for thing in gc.get_objects())
