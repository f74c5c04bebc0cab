"""Run an ablation: `python -m ablations.run ablations/NAME.toml`.

Trains every arm with every seed, a few at a time, each in a run folder of its own; measures each on the same held-out
text under causal routing; and writes what they say together to OUTPUT/NAME: results.md, results.json, scores.png.
The file's format is in `ablations/spec.py` and docs/ablations.md.

The same command goes on after an interruption: finished runs are left alone, others continue from their checkpoint.
A run that fails is reported with the end of its log, the others go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ablations.figure import scores_figure
from ablations.job import AblationJob, jobs_of, train_and_measure, work
from ablations.jobs import run_jobs
from ablations.measures import Result, Results
from ablations.record import record
from ablations.slurm import sbatch_script
from ablations.spec import Ablation, load_ablation, shrink
from ablations.summary import summarise
from ablations.tables import markdown, tables
from data.atomic import write_atomically, write_json
from data.corpus import Corpus
from eval.command import run_command, terminal
from eval.figures import to_png
from eval.report_tables import print_table

OUTPUT, QUICK_OUTPUT = Path("runs/ablations"), Path("runs/ablations-quick")
LOG_LINES = 12  # of a failed run, shown


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(arguments)
    ablation = prepare(options)
    output = options.output or (QUICK_OUTPUT if options.quick else OUTPUT)
    cpus = available_cpus()
    processes = options.processes or default_processes(ablation, cpus)
    threads = options.threads or max(1, cpus // processes)
    jobs = jobs_of(ablation, output, threads)
    if options.slurm:
        kept = [each for each in arguments if each != "--slurm"]
        print(sbatch_script(ablation.name, len(jobs), kept, options.threads or 1), end="")
        return
    for job in jobs:  # before anything runs
        job.require_free()
    check_corpus(ablation)
    if options.job is not None:
        if not 0 <= options.job < len(jobs):
            raise ValueError(f"--job {options.job}: the jobs of {ablation.path} are 0 to {len(jobs) - 1}")
        train_and_measure(jobs[options.job])
        return
    console = terminal(200)
    missing = [] if options.collect else run_all(jobs, processes, options.timeout, console)
    results = collect(jobs)
    told = {text.split(":")[0] for text in missing}
    missing += [f"{job}: not finished" for job in jobs if job.finished() is None and str(job) not in told]
    command = f"python -m ablations.run {' '.join(each for each in arguments if each not in ('--collect', '--record'))}"
    summary = summarise(ablation, results, missing, command)
    figure = to_png(scores_figure(summary))
    for path in write(summary, figure, output / ablation.name):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    show(summary, console)
    if missing:
        sys.exit(1)
    if options.record:
        for path in record(summary, figure):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Flags, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m ablations.run", description="Train and compare the arms of an ablation.", allow_abbrev=False
    )
    add_flags(parser, "ablations/NAME.toml", f"folder (default: {OUTPUT}, or {QUICK_OUTPUT} with --quick)")
    parser.add_argument("--threads", type=int, help="CPU threads of a run (default: the CPUs over the processes)")
    parser.add_argument("--record", action="store_true", help="write the result's section of ablations/RESULTS.md")
    parser.add_argument("--collect", action="store_true", help="train nothing: make the table of the runs there are")
    parser.add_argument("--slurm", action="store_true", help="print an sbatch script that runs one job a task")
    parser.add_argument("--job", type=int, metavar="INDEX", help="run one job only, in this process (from 0)")
    options = parser.parse_args(arguments)
    require_positive(options, "seeds", "processes", "threads", "timeout")
    if options.quick and options.record:
        raise ValueError("--record with --quick: a smoke run is no result and is not recorded")
    return options


def add_flags(parser: argparse.ArgumentParser, file: str, output: str) -> None:
    """The file and the flags that an ablation and a search share, with help for the two that differ."""
    parser.add_argument("file", type=Path, help=file)
    parser.add_argument("--seeds", type=int, help="of every arm (default: the file's)")
    parser.add_argument("--processes", type=int, help="runs at a time (default: one a CPU, or one on a GPU)")
    parser.add_argument("--output", type=Path, help=output)
    parser.add_argument("--corpus", help="in place of the base's data.corpus")
    parser.add_argument("--timeout", type=int, default=86400, help="seconds that one run may take (a day)")
    parser.add_argument(
        "--quick", action="store_true", help="smoke run: six steps, two seeds; its numbers mean nothing"
    )


def require_positive(options: argparse.Namespace, *names: str) -> None:
    """Refuse a flag that is given and below 1."""
    for name in names:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")


def prepare(options: argparse.Namespace) -> Ablation:
    """The ablation as the flags change it.

    Raises:
        ConfigError: for anything wrong in the file.
    """
    ablation = load_ablation(options.file)
    if options.seeds is not None:
        ablation = dataclasses.replace(ablation, seeds=options.seeds)
    if options.corpus is not None:
        ablation = with_corpus(ablation, options.corpus)
    return shrink(ablation) if options.quick else ablation


def with_corpus(ablation: Ablation, corpus: str) -> Ablation:
    """The same arms on another corpus."""

    def moved(config: Any) -> Any:
        return dataclasses.replace(config, data=dataclasses.replace(config.data, corpus=corpus))

    arms = tuple(dataclasses.replace(arm, config=moved(arm.config)) for arm in ablation.arms)
    return dataclasses.replace(ablation, arms=arms)


def check_corpus(ablation: Ablation) -> None:
    """Open the corpus once, so that a missing one is one error and not one a run.

    Raises:
        DataError: it is missing, damaged, or of another vocabulary.
    """
    corpus = Corpus.open(ablation.arms[0].config.data.corpus)
    for arm in ablation.arms:
        corpus.require_model_vocabulary(arm.config.model.vocabulary_size)


def available_cpus() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_processes(ablation: Ablation, cpus: int) -> int:
    """One run a CPU; one at a time where they would share a GPU."""
    on_gpu = torch.cuda.is_available() and any(arm.config.training.device != "cpu" for arm in ablation.arms)
    return 1 if on_gpu else min(cpus, len(ablation.arms) * ablation.seeds)


def run_all(
    jobs: Sequence[AblationJob],
    processes: int,
    timeout: float,
    console: Console,
    body: Callable[[Any], Result] = work,
) -> list[str]:
    """Run what is not finished, a few at a time; the runs that failed, and why.

    Args:
        jobs: all.
        processes: at a time.
        timeout: seconds of one.
        console: told what is done, with the end of the log of what failed.
        body: of a process.
    """
    waiting = [job for job in jobs if job.finished() is None]
    console.print(
        f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them finished before; {processes} at a time, "
        f"{jobs[0].threads} threads each",
        highlight=False,
    )
    failed = []
    with console.status("running"):
        results = run_jobs(body, [(job,) for job in waiting], processes, timeout, keep_going=True)
        for done, (place, result) in enumerate(results, start=1):
            job = waiting[place]
            if isinstance(result, Exception):
                failed.append(tell_failure(job, result, console, f"{done}/{len(waiting)} "))
            else:
                line = f"{result['bits_per_byte']:.4f} bits a byte held out; {result['seconds']:.0f} s"
                console.print(f"{done}/{len(waiting)} {job}: {line}", highlight=False, markup=False)
    return failed


def tell_failure(job: AblationJob, error: Exception, console: Console, before: str = "") -> str:
    """Print why a run failed and the end of its log; gives the first as a line."""
    failed = f"{job}: failed ({reason(error)})"
    console.print(f"{before}{failed}; end of {job.log}:", style="bold red", markup=False)
    console.print(last_lines(job.log), highlight=False, markup=False, soft_wrap=True)
    return failed


def reason(error: Exception) -> str:
    """The last line of an error, short."""
    text = " ".join(str(error).split())
    return text if len(text) < 300 else f"{text[:297]}..."


def last_lines(path: Path, lines: int = LOG_LINES) -> str:
    """The end of a log."""
    if not path.is_file():
        return "(no log)"
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def collect(jobs: Sequence[AblationJob]) -> Results:
    """The figures of the finished runs."""
    results: Results = {job.arm: {} for job in jobs}
    for job in jobs:
        if (result := job.finished()) is not None:
            results[job.arm][job.seed] = result
    return results


def write(summary: dict[str, Any], figure: bytes, folder: Path) -> list[Path]:
    """results.json, results.md and scores.png, each complete or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "results.json", summary, allow_nan=False)
    for name, content in {"results.md": markdown(summary, "scores.png").encode(), "scores.png": figure}.items():
        with write_atomically(folder / name) as file:
            file.write(content)
    return [folder / name for name in ("results.json", "results.md", "scores.png")]


def show(summary: dict[str, Any], console: Console) -> None:
    """Print the tables and the sentences."""
    for table in tables(summary):
        print_table(console, table)
        console.print()
    for said in summary["statements"]:
        console.print(f"- {said}", highlight=False, markup=False)


if __name__ == "__main__":
    run_command(main)
