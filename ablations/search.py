"""Search among the arms of a file by successive halving: `python -m ablations.search ablations/search.toml`.

All arms train for the first share of a run (`[halving] rungs`), with every seed; the better ones, by mean held-out
bits a byte under causal routing, continue from their checkpoints to the next. Shares are of each arm's own steps, so
that with `budget.rule = "flops"` every rung compares equal FLOPs. Writes OUTPUT/NAME: search.md, search.json, and
confirm.toml, an ablation of the winner and the baseline with fresh seeds: the winner was chosen for the figure that
the search saw, which therefore flatters it.

The same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch
from rich.console import Console

from ablations.budget import Cost
from ablations.halving import Rung, successive_halving
from ablations.job import AblationJob, job_of, noting_cost
from ablations.jobs import run_jobs
from ablations.run import (
    add_flags,
    available_cpus,
    check_corpus,
    default_processes,
    prepare,
    require_positive,
    tell_failure,
)
from ablations.spec import Ablation, nested
from data.atomic import write_atomically, write_json
from eval.command import run_command, terminal
from eval.likelihood import evaluate
from eval.report_tables import MISSING, Table, markdown_table, rich_table
from moe.config import require
from train import train
from training.job import Job
from training.load_config import read_toml
from training.run import Run

OUTPUT, QUICK_OUTPUT = Path("runs/search"), Path("runs/search-quick")
FORMAT_VERSION = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    ablation = prepare(options)
    require(
        ablation.halving is not None, f"{options.file}: needs a [halving] section; run it with ablations.run instead"
    )
    cpus = available_cpus()
    processes = options.processes or default_processes(ablation, cpus)
    search = Search(
        ablation,
        options.output or (QUICK_OUTPUT if options.quick else OUTPUT),
        processes,
        max(1, cpus // processes),
        options.timeout,
        terminal(160),
    )
    check_corpus(ablation)
    rungs = search.run()
    for path in search.write(rungs):
        search.console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    search.console.print(rich_table(table(ablation, rungs)))
    for said in statements(ablation, rungs):
        search.console.print(f"- {said}", highlight=False, markup=False)
    if search.failed:
        sys.exit(1)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Flags, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m ablations.search", description="Successive halving over the arms of a file.", allow_abbrev=False
    )
    add_flags(
        parser,
        "ablations/NAME.toml with a [halving] section",
        f"folder (default: {OUTPUT}, or {QUICK_OUTPUT} with --quick)",
    )
    options = parser.parse_args(arguments)
    require_positive(options, "seeds", "processes", "timeout")
    return options


class Search:
    """One search.

    Attributes:
        ablation: what is searched.
        failed: runs that failed, and why.
    """

    def __init__(
        self, ablation: Ablation, output: Path, processes: int, threads: int, timeout: float, console: Console
    ) -> None:
        self.ablation, self.console = ablation, console
        self._output, self._processes, self._threads, self._timeout = output, processes, threads, timeout
        self.failed: list[str] = []
        for arm in ablation.arms:
            for seed in ablation.seed_list:
                job_of(ablation, arm, seed, output, threads).require_free()

    def run(self) -> list[Rung]:
        """All rungs."""
        halving = self.ablation.halving
        assert halving is not None
        names = [arm.name for arm in self.ablation.arms]
        return successive_halving(names, halving.rungs, halving.keep, self._score)

    def _score(self, names: Sequence[str], share: float) -> list[float]:
        """Mean over seeds of each arm, brought to a share of its steps; nan where a run failed."""
        seeds = self.ablation.seed_list
        jobs = [self._job(name, seed, share) for seed in seeds for name in names]
        known = {(job.arm, job.seed): found for job in jobs if (found := scored(job)) is not None}
        waiting = [job for job in jobs if (job.arm, job.seed) not in known]
        self.console.print(
            f"{len(names)} arms to {share:.0%} of their steps: {len(jobs)} runs, {len(known)} of them done before"
        )
        with self.console.status("running"):
            done = run_jobs(work, [(job,) for job in waiting], self._processes, self._timeout, keep_going=True)
            for place, result in done:
                job = waiting[place]
                if isinstance(result, Exception):
                    self.failed.append(tell_failure(job, result, self.console))
                else:
                    known[job.arm, job.seed] = result
        by_arm = [[known.get((name, seed), math.nan) for seed in seeds] for name in names]
        return [statistics.fmean(values) for values in by_arm]

    def _job(self, name: str, seed: int, share: float) -> AblationJob:
        job = job_of(self.ablation, self.ablation.arm(name), seed, self._output, self._threads)
        run = dataclasses.replace(job.config.run, stop_after=steps_at(job.config.training.steps, share))
        return dataclasses.replace(job, config=dataclasses.replace(job.config, run=run))

    def write(self, rungs: Sequence[Rung]) -> list[Path]:
        """search.json, search.md and, where another arm than the baseline won, confirm.toml."""
        ablation = self.ablation
        folder = self._output / ablation.name
        report = {
            "format_version": FORMAT_VERSION,
            "name": ablation.name,
            "quick": ablation.quick,
            "question": ablation.question,
            "budget": ablation.budget.describe(),
            "seeds": ablation.seed_list,
            "rungs": [dataclasses.asdict(rung) for rung in rungs],
            "arms": {arm.name: {"changes": arm.changes, **vars(Cost.of(arm.config))} for arm in ablation.arms},
            "statements": statements(ablation, rungs),
            "failed": self.failed,
        }
        write_json(folder / "search.json", report, allow_nan=False)
        files = {"search.md": markdown(ablation, rungs)}
        if rungs[-1].kept[0] != ablation.baseline:
            files["confirm.toml"] = confirmation(ablation, rungs[-1].kept[0])
        for name, content in files.items():
            with write_atomically(folder / name) as file:
                file.write(content.encode())
        return [folder / name for name in ("search.json", *files)]


def steps_at(steps: int, share: float) -> int:
    """Steps of a rung, at least one."""
    return max(1, round(steps * share))


def scored(job: AblationJob) -> float | None:
    """The run's score at this rung, if it is known."""
    path = _score_path(job)
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["bits_per_byte"] if found["final_tokens"] == job.config.eval.final_tokens else None


def work(job: AblationJob) -> float:
    """Body of a process: bring a run to its rung, score it, and write that down."""
    job.take_output()
    torch.set_num_threads(job.threads)
    with noting_cost(job):
        train(job.config, Job(), Console(soft_wrap=True, highlight=False, markup=False))
        run = Run.open(job.run_folder)
        checkpoint = run.checkpoint()
        if checkpoint.step != job.config.run.stop_after:
            raise RuntimeError(f"{job}: stopped at step {checkpoint.step}; the same command continues it")
        corpus, tokens = run.corpus(), job.config.eval.final_tokens
        bits = evaluate(run.model(checkpoint=checkpoint), corpus, run.config, tokens).bits_per_byte
    write_json(_score_path(job), {"bits_per_byte": bits, "step": checkpoint.step, "final_tokens": tokens}, False)
    return bits


def _score_path(job: AblationJob) -> Path:
    return job.run_folder / "eval" / f"rung-{job.config.run.stop_after}.json"


def table(ablation: Ablation, rungs: Sequence[Rung]) -> Table:
    """A row an arm, a column a rung; the arms that came furthest first."""
    scores = [dict(rung.scores) for rung in rungs]
    order = [name for name, _ in rungs[-1].scores]
    for rung in reversed(rungs[:-1]):
        order += [name for name, _ in rung.scores if name not in order]
    order += [arm.name for arm in ablation.arms if arm.name not in order]
    rows = []
    for name in order:
        cost = Cost.of(ablation.arm(name).config)
        figures = [f"{found[name]:.4f}" if name in found else MISSING for found in scores]
        rows.append((name, *figures, f"{cost.parameters:,}", f"{cost.active_parameters:,}", f"{cost.steps:,}"))
    heads = ("arm", *(f"at {rung.budget:.0%}" for rung in rungs), "parameters", "active", "steps in all")
    return Table("Held-out bits per byte, causal routing, mean over seeds", heads, rows)


def statements(ablation: Ablation, rungs: Sequence[Rung]) -> list[str]:
    """What the search shows and what it does not."""
    said = ["SMOKE RUN: a few steps, to see that everything works. No number here means anything."] * ablation.quick
    winner, last = rungs[-1].kept[0], dict(rungs[-1].scores)
    spent, before = 0.0, 0.0
    for rung in rungs:
        spent += len(rung.scores) * (rung.budget - before)
        before = rung.budget
    said.append(
        f"{winner} won among {len(ablation.arms)} arms, at {last[winner]:.4f} bits a byte over {ablation.seeds} "
        f"{'seed' if ablation.seeds == 1 else 'seeds'}, for the cost of {spent:.1f} whole runs a seed in place of "
        f"{len(ablation.arms)}."
    )
    said.append(
        "It was chosen for this figure, which therefore flatters it; arms dropped early were compared at a learning "
        "rate that had not fallen yet, and might have overtaken. Evidence is an ablation of the winner and the "
        "baseline with fresh seeds"
        + (": confirm.toml." if winner != ablation.baseline else "; here the baseline itself won.")
    )
    return said


def markdown(ablation: Ablation, rungs: Sequence[Rung]) -> str:
    """Table and sentences."""
    smoke = "SMOKE RUN, not a result: " if ablation.quick else ""
    lines = [f"# {smoke}{ablation.name}", "", ablation.question, "", f"Budget: {ablation.budget.describe()}.", ""]
    lines += [*markdown_table(table(ablation, rungs)), "", *(f"- {said}" for said in statements(ablation, rungs))]
    return "\n".join(lines) + "\n"


def confirmation(ablation: Ablation, winner: str) -> str:
    """An ablation file of winner and baseline, with seeds that the search has not seen."""
    file = read_toml(ablation.path)
    beside = ablation.path.parent / file["base"]
    values: dict[str, Any] = {
        "question": f"Is {winner}, found by {ablation.name}, better than {ablation.baseline}?",
        "base": str((beside if beside.is_file() else Path(file["base"])).resolve()),
        "baseline": ablation.baseline,
        "seeds": max(5, ablation.seeds),
        "first_seed": ablation.first_seed + ablation.seeds,
        "budget": file.get("budget", {}),
        "overrides": file.get("overrides", {}),
        "arms": {name: nested(ablation.arm(name).changes) for name in (ablation.baseline, winner)},
        "claims": [{"says": f"{winner} is better", "arm_better_than": [winner, ablation.baseline]}],
    }
    return tomli_w.dumps(values)


if __name__ == "__main__":
    run_command(main)
