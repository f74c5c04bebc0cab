"""What a step sends under each layout beside the formulas, and two processes against one: `-m benchmarks.parallel`.

All on this machine, over gloo, at the shape of a configuration's model, with random tokens. Bytes are those that the
first process sends in one step (`parallel/ledger.py`), the formulas are `parallel/traffic.py`'s. The share of waiting
is the part of a step in which a process' thread does not run, because it waits for others or for what they send; with
more processes than idle cores it says nothing.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.train_step import random_tokens
from data.batches import Batch
from eval.command import run_command
from parallel.engine import Engine
from parallel.ledger import Ledger
from parallel.traffic import step_traffic
from training.build import build_engine
from training.config import Config
from training.device import keep_freed_memory
from training.load_config import load_config
from training.optimizer import build_optimizer
from training.step import train_step

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp2": (2, []),
    "ep2": (2, ["--parallel.expert", "2"]),
    "tp2": (2, ["--parallel.tensor", "2"]),
    "pp2": (2, ["--parallel.pipeline", "2"]),
    "zero1": (2, ["--parallel.zero", "1"]),
    "zero2": (2, ["--parallel.zero", "2"]),
    "zero3": (2, ["--parallel.zero", "3"]),
    "ep2 x tp2": (4, ["--parallel.expert", "2", "--parallel.tensor", "2"]),
}
TIMED = ("dp2", "ep2")
PATIENCE = 300.0  # seconds that an answer may take


@dataclass
class Options:
    """Command line."""

    config: str = "configs/quickstart.toml"
    """Whose shape is taken."""
    repeats: int = 7
    """Rounds of timing, in which the layouts take turns."""
    steps: int = 3
    """Steps of a round."""
    precision: str = "fp32"
    """Of activations and products: fp32 or bf16."""


class Job:
    """The processes of one layout, which take steps when they are told to."""

    def __init__(self, world: int, threads: int, arguments: list[str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, world, threads, store, arguments, there), daemon=True)
            process.start()
            self._ends.append(here)
            self._processes.append(process)

    def ask(self, what: str, *arguments: Any) -> list[Any]:
        """Every process' answer, by rank."""
        for end in self._ends:
            end.send((what, arguments))
        answers = []
        for end, process in zip(self._ends, self._processes, strict=True):
            deadline = time.monotonic() + PATIENCE
            while not end.poll(1.0):
                if not process.is_alive() or time.monotonic() > deadline:
                    raise RuntimeError("a process of the benchmark died or hangs; its error is above")
            answers.append(end.recv())
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(rank: int, world: int, threads: int, store: str, arguments: list[str], end: Connection) -> None:
    """One process: build, then take steps for as long as it is asked to."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    config = load_config(arguments)
    engine = build_engine(config, world, torch.device("cpu"))
    optimizer = build_optimizer(engine, config.training)
    mine = engine.mesh.own_rows(config.training.batch_sequences)
    token_BS, label_BS = (values[mine] for values in random_tokens(config))
    batch = Batch(token_BS, label_BS, torch.zeros(len(token_BS), dtype=torch.int64))
    rows, length = config.micro_batch_sequences(engine.mesh.layout), config.training.sequence_length
    while True:
        what, given = end.recv()
        if what == "steps":
            end.send([_timed(engine, optimizer, batch, config) for _ in range(given[0])])
        else:
            with Ledger() as ledger:
                train_step(engine, optimizer, batch, config, 0, 0)
            told = step_traffic(engine, rows, len(token_BS) // rows, length)
            end.send((ledger.count_by_kind(), ledger.bytes_by_kind(), told))


def _timed(engine: Engine, optimizer: torch.optim.Optimizer, batch: Batch, config: Config) -> tuple[float, float]:
    """(seconds of a step, of which this thread did not run)."""
    wall, running = time.perf_counter(), time.thread_time()
    train_step(engine, optimizer, batch, config, 0, 0)
    wall, running = time.perf_counter() - wall, time.thread_time() - running
    return wall, max(0.0, wall - running)


def traffic_table(options: Options, base: list[str]) -> Table:
    """Calls and bytes of one step, as measured and by the formulas, for every layout."""
    table = Table(title=f"sent by process 0 in one step, {options.precision}", title_justify="left", box=None)
    for name in ("layout", "collective", "calls", "bytes", "by formula", "difference", "of which"):
        table.add_column(name, justify="right" if name in ("calls", "bytes", "by formula", "difference") else "left")
    for name, (world, flags) in LAYOUTS.items():
        job = Job(world, 1, [*base, *flags])
        try:
            job.ask("steps", 1)
            counts, measured, told = job.ask("traffic")[0]
        finally:
            job.close()
        for kind in sorted(measured.keys() | told.keys()):
            if not measured.get(kind) and kind not in told:
                continue
            formula = sum(told.get(kind, {}).values())
            parts = ", ".join(f"{what} {amount:,.0f}" for what, amount in told.get(kind, {}).items())
            row = (f"{counts[kind]:,}", f"{measured[kind]:,.0f}", f"{formula:,.0f}", f"{measured[kind] - formula:,.0f}")
            table.add_row(name, kind, *row, parts)
            name = ""
    return table


def speed_table(options: Options, base: list[str], tokens: int) -> Table:
    """Two processes with a thread each against one with two threads, in turn."""
    jobs = {"one process, 2 threads": Job(1, 2, base)}
    jobs |= {f"{name}, 1 thread each": Job(LAYOUTS[name][0], 1, [*base, *LAYOUTS[name][1]]) for name in TIMED}
    try:
        for job in jobs.values():
            job.ask("steps", 2)
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
        for _ in range(options.repeats):
            for name, job in jobs.items():
                steps = job.ask("steps", options.steps)[0]
                rounds[name].append(min(steps))  # others on the machine only ever make a step longer
    finally:
        for job in jobs.values():
            job.close()
    table = Table(title=f"{options.repeats} rounds in turn, {options.precision}", title_justify="left", box=None)
    for name in ("", "tokens/s", "against one process (range)", "waiting"):
        table.add_column(name)
    reference = [wall for wall, _ in next(iter(rounds.values()))]
    for name, found in rounds.items():
        ratios = [one / wall for one, (wall, _) in zip(reference, found, strict=True)]
        speed = tokens / statistics.median(wall for wall, _ in found)
        waiting = statistics.median(waited / wall for wall, waited in found)
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        table.add_row(name, f"{speed:,.0f}", ratio, f"{waiting:.0%}" if "each" in name else "")
    return table


def main() -> None:
    """Command line."""
    options = tyro.cli(Options, description=__doc__)
    if options.repeats < 1 or options.steps < 1:
        raise ValueError(f"--repeats {options.repeats} and --steps {options.steps} must be at least 1")
    base = [options.config, "--training.precision", options.precision]
    config = load_config(base)
    console = Console(width=180)
    console.print(traffic_table(options, base))
    console.print(speed_table(options, base, config.tokens_per_step))


if __name__ == "__main__":
    run_command(main)
