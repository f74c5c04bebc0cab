"""What does expert choice leak, and what is a model trained by it worth without the leak?

    python -m ablations.leak [--corpus corpora/characters] [--seeds 3] [--steps 800] [--output runs/leak]

trains six small character models, which differ in their router only: expert choice over chunks of 16 tokens, over one
sequence, over the whole batch and over one position of 32 sequences; expert choice for the first sixth and thresholds
from there on (ET); and token choice. Each is scored on held-out text under the router that trained it, under its
thresholds and by token choice, and what it leaks is measured in bits. Prints the table, writes FOLDER/leak.json and
leak.md, and fails where the ordering is not the known one: chunks look best and are worst honestly, and thresholds
beat token choice for every model that expert choice trained.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ablations.jobs import run_jobs
from ablations.leak_models import measure_alone, model_config
from ablations.leak_table import COLUMNS, NOTE, ROWS, Check, Result, cells, check_ordering, markdown, rows_of
from data.atomic import write_atomically
from data.corpus import Corpus
from eval.command import run_command, terminal

FORMAT_VERSION = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ablations.leak", description="What does expert choice leak, and what is it worth without?"
    )
    parser.add_argument("--corpus", type=Path, default=Path("corpora/characters"), help="(corpora/characters)")
    parser.add_argument("--seeds", type=int, default=3, help="models of each kind (3)")
    parser.add_argument("--steps", type=int, default=800, help="training steps of a model (800)")
    parser.add_argument("--output", type=Path, default=Path("runs/leak"), help="folder (runs/leak)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="models at a time (one a CPU)")
    parser.add_argument("--timeout", type=int, default=1200, help="seconds that one model may take (1200)")
    options = parser.parse_args(arguments)
    for name in ("seeds", "steps", "processes", "timeout"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
    corpus = open_corpus(options.corpus)
    console = terminal(160)

    start = time.monotonic()
    # Seed by seed, so that an interrupted table compares like with like.
    jobs = [(row, seed, options.steps, str(options.corpus)) for seed in range(options.seeds) for row in ROWS]
    results: list[Result] = []
    with console.status(f"training {len(jobs)} models, {options.processes} at a time"):
        for _, result in run_jobs(measure_alone, jobs, options.processes, options.timeout):
            results.append(result)
            console.print(progress_line(len(results), len(jobs), result), highlight=False, markup=False)
    checks = check_ordering(results)
    settings = describe(options, corpus, time.monotonic() - start)
    show(console, results, checks)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "leak.json": as_json(results, checks, settings),
        "leak.md": markdown(results, checks, settings),
    }.items():
        with write_atomically(options.output / name) as file:
            file.write(content.encode())
        console.print(f"wrote {options.output / name}", highlight=False, soft_wrap=True)
    if not all(check.passed for check in checks):
        sys.exit(1)


def open_corpus(folder: Path) -> Corpus:
    """The corpus to train on.

    Raises:
        ValueError: there is none; says how to make it.
        DataError: it is damaged.
    """
    if not (folder / "corpus.json").is_file():
        raise ValueError(
            f"there is no corpus at {folder}; make it with: python -m data.prepare --output {shlex.quote(str(folder))} "
            "--vocabulary-size 257 --domains drama"
        )
    return Corpus.open(folder)


def describe(options: argparse.Namespace, corpus: Corpus, seconds: float) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "seeds": options.seeds,
        "steps": options.steps,
        "tokens_per_step": model_config(ROWS[0], 0, options.steps, corpus).tokens_per_step,
        "corpus_sha256": corpus.sha256,
        "domains": corpus.domains,
        "vocabulary_size": corpus.vocabulary_size,
        "torch": torch.__version__,
        "processes": options.processes,
        "seconds": round(seconds),
    }


def progress_line(done: int, jobs: int, result: Result) -> str:
    """One finished model."""
    under = f"{result.training_router:.3f}" + ("" if result.causal else " (noncausal)")
    return (
        f"{done}/{jobs} {result.row}, seed {result.seed}: held out {under} under its router, {result.threshold:.3f} by "
        f"thresholds, {result.token_choice:.3f} by token choice; leak {result.leak_bits:.4f} ± {result.leak_error:.4f} "
        f"bits; {result.seconds:.0f} s"
    )


def show(console: Console, results: Sequence[Result], checks: Sequence[Check]) -> None:
    """Print the table and the claims."""
    table = Table()
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading == COLUMNS[0] else "right")
    for group in rows_of(results):
        table.add_row(*cells(group))
    console.print(table)
    console.print(NOTE, style="dim", highlight=False)
    for check in checks:
        word, style = ("PASS", "green") if check.passed else ("FAIL", "bold red")
        console.print(f"{word}: {check.claim} ({check.detail})", style=style, highlight=False, markup=False)


def as_json(results: Sequence[Result], checks: Sequence[Check], settings: dict[str, Any]) -> str:
    """Everything, as plain data."""
    report = {
        "format_version": FORMAT_VERSION,
        "settings": settings,
        "models": [result.to_json() for group in rows_of(results) for result in group],
        "checks": [vars(check) for check in checks],
    }
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


if __name__ == "__main__":
    run_command(main)
