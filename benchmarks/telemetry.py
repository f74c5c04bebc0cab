"""Cost of the routing telemetry: `python -m benchmarks.telemetry [CONFIG.toml] [--section.key ...]`.

The calls themselves are timed, inside real training steps on random tokens: not the difference of two noisy runs.
Steps with and without a record take turns. The JSON line is included, the writing to disk is not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.train_step import random_tokens
from data.batches import Batch
from moe.config import ConfigError
from moe.initialization import build_model
from training.config import Config
from training.device import choose_device, compute_dtype, keep_freed_memory
from training.load_config import load_config
from training.optimizer import build_optimizer
from training.routing_telemetry import RoutingTelemetry, layer_means
from training.step import train_step


def main(arguments: list[str]) -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="counted steps of each kind")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice")
    # The configuration's name is taken off first: the parser would take a flag's value for it.
    named = bool(arguments) and not arguments[0].startswith("-")
    path, rest = (arguments[0], arguments[1:]) if named else ("configs/quickstart.toml", arguments)
    options, flags = parser.parse_known_args(rest)
    try:
        config = load_config([path, *flags], "python -m benchmarks.telemetry")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    report(config, measure(config, options.repeats))
    return 0


class Stopwatch:
    """Adds up the time of calls; on a GPU it waits for the work that they start, and for what was queued before."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def wrapped(*arguments: Any) -> Any:
            self._wait()
            started = time.perf_counter()
            result = call(*arguments)
            self._wait()
            self.seconds += time.perf_counter() - started
            return result

        return wrapped


def measure(config: Config, repeats: int) -> dict[bool, list[tuple[float, float]]]:
    """(seconds of telemetry, seconds of the rest of the step) of each counted step, with a record and without."""
    keep_freed_memory()
    device = choose_device(config.training.device)
    model = build_model(config.model, config.moe, 0, device, compute_dtype(config.training.precision, device))
    optimizer = build_optimizer(model, config.training)
    token_BS, label_BS = random_tokens(config)
    batch = Batch(token_BS, label_BS, torch.zeros(token_BS.shape[0], dtype=torch.int64))
    telemetry = RoutingTelemetry.of(model, config.training.sequence_length)
    taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(2 * (repeats + 2)):  # two uncounted steps of each kind first
        detailed, watch = number % 2 == 1, Stopwatch(device)
        started = time.perf_counter()
        watch.timed(telemetry.start_step)(detailed)
        train_step(model, optimizer, batch, config, 0, end_of_text=0, observe=watch.timed(telemetry.observe))
        watch.timed(lambda: record_line(telemetry, model))()
        if number >= 4:
            taken[detailed].append((watch.seconds, time.perf_counter() - started - watch.seconds))
    return taken


def record_line(telemetry: RoutingTelemetry, model: Any) -> str:
    """The end of a step as train.py does it: the line of routing/steps.jsonl, and the means for metrics.jsonl."""
    record = telemetry.end_step(model)
    return json.dumps(record | layer_means(record)) if record else ""


def report(config: Config, taken: dict[bool, list[tuple[float, float]]]) -> None:
    """Print a table, and what a record every `log.every` steps costs on average."""
    console = Console(highlight=False)
    training, moe = config.training, config.moe
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    console.print(
        f"{training.batch_sequences} x {training.sequence_length} tokens a step, {config.model.layers} layers, "
        f"{moe.router}, {moe.num_experts} experts, {moe.experts_per_token} a token; {torch.get_num_threads()} threads, "
        f"load average {load}"
    )
    table = Table("steps", "telemetry, ms", "rest of the step, ms", "share of the step, %")
    shares = {}
    for detailed, pairs in taken.items():
        step = statistics.median(rest for _, rest in pairs)
        shares[detailed] = statistics.median(own for own, _ in pairs) / step
        table.add_row(
            "with a record" if detailed else "without one",
            spread([1e3 * own for own, _ in pairs]),
            spread([1e3 * rest for _, rest in pairs]),
            spread([100 * own / step for own, _ in pairs]),
        )
    console.print(table)
    mean = (shares[True] + (config.log.every - 1) * shares[False]) / config.log.every
    console.print(f"a record every {config.log.every} steps: {mean:.2%} of the run")


def spread(values: list[float]) -> str:
    """Median (smallest - largest)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
