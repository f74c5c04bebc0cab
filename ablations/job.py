"""One run of an ablation: one arm with one seed, trained and measured in a folder of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ablations.measures import Result
from ablations.spec import Ablation, Arm
from data.atomic import write_json
from data.corpus import Corpus
from eval.causality_certificate import measure_run_leak
from eval.leak import mixed_rows
from eval.likelihood import NothingToScore, evaluate
from eval.routing_metrics import fan_out_mean, max_violation, zero_expert_fraction
from eval.routing_recorder import RoutingRecorder
from moe.config import ConfigError
from train import train
from training.job import Job
from training.load_config import differences
from training.run import Run, read_json_lines

FORMAT_VERSION = 1
LEAST_LEAK_ROWS = 8  # of one pass: with one routing group of one row the leak's standard error would be large


class Interrupted(RuntimeError):
    """A run that stopped before its end and can be continued."""


@dataclass(frozen=True, repr=False)
class AblationJob:
    """What one process does.

    Attributes:
        arm: its name.
        seed: of parameters and data order.
        folder: of the ablation; the run's is in it.
        run: name of the run's folder.
        config: of the run.
        leak_pairs: see `Ablation`.
        threads: of one process.
    """

    arm: str
    seed: int
    folder: Path
    run: str
    leak_pairs: int
    threads: int
    config: Any  # a Config; Any because its defaults are built by its sections

    def __repr__(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def run_folder(self) -> Path:
        """The run's folder."""
        return self.folder / self.run

    @property
    def log(self) -> Path:
        """What the run printed, all attempts in one file."""
        return self.folder / "logs" / f"{self.run}.log"

    @property
    def attempts(self) -> Path:
        """When the run was begun and what that cost, one line each."""
        return self.folder / "logs" / f"{self.run}.attempts.jsonl"

    def finished(self) -> Result | None:
        """The run's figures, if it has been trained to its end and measured as asked."""
        path = self.run_folder / "eval" / "ablation.json"
        if not path.is_file() or not self.trained():
            return None
        result = json.loads(path.read_text(encoding="utf-8"))
        wanted = (FORMAT_VERSION, self._asked())
        return result if (result.get("format_version"), result.get("asked")) == wanted else None

    def trained(self) -> bool:
        """Whether the final evaluation is recorded."""
        steps = self.config.training.steps
        lines = read_json_lines(self.run_folder / "metrics.jsonl")
        return any(line["step"] == steps and "final/loss" in line for line in lines)

    def require_free(self) -> None:
        """Refuse a folder that holds a run with another configuration.

        Raises:
            ConfigError: names the folder and the keys.
        """
        if not (self.run_folder / "config.toml").is_file():
            return
        changed = differences(Run.open(self.run_folder).config, self.config, ("run", "eval", "log", "parallel"))
        if changed:
            raise ConfigError(
                f"{self.run_folder} holds a run with another configuration ({'; '.join(changed)}): the file has "
                "changed since; remove that folder, or choose another --output"
            )

    def take_output(self) -> None:
        """From now on everything that this process prints goes to the run's log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)

    def _asked(self) -> dict[str, int]:
        return {"final_tokens": self.config.eval.final_tokens, "leak_pairs": self.leak_pairs}


def jobs_of(ablation: Ablation, output: Path, threads: int) -> list[AblationJob]:
    """Every arm with every seed; seed by seed, so that an interrupted table compares like with like."""
    return [job_of(ablation, arm, seed, output, threads) for seed in ablation.seed_list for arm in ablation.arms]


def job_of(ablation: Ablation, arm: Arm, seed: int, output: Path, threads: int) -> AblationJob:
    """One arm with one seed."""
    folder, name = output / ablation.name, f"{arm.slug}-{seed}"
    run = dataclasses.replace(arm.config.run, name=name, folder=str(folder), seed=seed, resume="auto")
    config = dataclasses.replace(arm.config, run=run)
    return AblationJob(arm.name, seed, folder, name, ablation.leak_pairs, threads, config)


def work(job: AblationJob) -> Result:
    """Body of a process of its own: everything it prints goes to the job's log.

    Raises:
        Interrupted: the run was asked to stop.
    """
    job.take_output()
    return train_and_measure(job)


def train_and_measure(job: AblationJob) -> Result:
    """Train the run, or what is left of it, measure it, and write its eval/ablation.json; nothing where that is done.

    Raises:
        Interrupted: the run was asked to stop.
    """
    if (done := job.finished()) is not None:
        return done
    torch.set_num_threads(job.threads)
    with noting_cost(job):
        if not job.trained():
            train(job.config, Job(), Console(soft_wrap=True, highlight=False, markup=False))
        if not job.trained():
            raise Interrupted(f"{job}: stopped before its end; the same command continues it")
        result = measure(Run.open(job.run_folder), job.config.eval.final_tokens, job.leak_pairs)
    result |= {"asked": job._asked(), "threads": job.threads, **_cost(job)}
    write_json(job.run_folder / "eval" / "ablation.json", result, allow_nan=False)
    return result


def measure(run: Run, tokens: int, leak_pairs: int = 0) -> Result:
    """The figures of a run: held-out text under causal routing, unless their name says otherwise.

    Args:
        run: with a checkpoint.
        tokens: held-out tokens of each domain at most.
        leak_pairs: pairs of batches for the leak in bits; 0 measures none.

    Returns:
        Plain data. "max_violation" and "zero_expert_fraction" are means over layers of the load of all held-out
        tokens together; None in a dense model. "noncausal_*" is the same text under a training router that sees the
        future: never a result. "leak_bits" is what the true future is worth to that router (audit A3).
    """
    config, corpus, checkpoint = run.config, run.corpus(), run.checkpoint()
    model = run.model(checkpoint=checkpoint)
    recorder = RoutingRecorder(model, corpus.domains)
    causal = evaluate(model, corpus, config, tokens, recorder=recorder)
    layers = recorder.layers
    counts = [recorder.counts_by_domain(index).sum(0) for index in layers]
    noncausal = None
    if config.training_router_leaks and config.threshold_step > 0:
        with contextlib.suppress(NothingToScore):  # too little text to fill a routing group
            noncausal = evaluate(model, corpus, config, tokens, "train_router")
    steps = run.metrics()
    result: Result = {
        "format_version": FORMAT_VERSION,
        "step": checkpoint.step,
        "bits_per_byte": causal.bits_per_byte,
        "nats_per_token": causal.nats_per_token,
        "domains": {name: part.bits_per_byte for name, part in causal.domains.items()},
        "heldout_tokens": causal.total.tokens,
        "max_violation": _mean([max_violation(counts_E) for counts_E in counts]),
        "zero_expert_fraction": _mean([zero_expert_fraction(layer.fan_out) for layer in layers.values()]),
        "experts_per_token": _mean([fan_out_mean(layer.fan_out) for layer in layers.values()]),
        "noncausal_bits_per_byte": None if noncausal is None else noncausal.bits_per_byte,
        "tokens_per_second": statistics.median(s["tokens_per_second"] for s in steps if "tokens_per_second" in s),
        "logit_norm": _logit_norm(run.routing_records()),
        "leak_bits": None,
        "leak_error": None,
        "corpus_sha256": corpus.sha256,
        "environment": json.loads((run.folder / "environment.json").read_text(encoding="utf-8")),
    }
    return result | (_leak(run, corpus, leak_pairs) if leak_pairs and config.moe.is_moe else {})


def _leak(run: Run, corpus: Corpus, pairs: int) -> Result:
    config = run.config
    group = config.moe.group_sequences
    rows = group * max(1, LEAST_LEAK_ROWS // group)
    text = mixed_rows(corpus, config.training.sequence_length, 2 * pairs * rows)
    leak = measure_run_leak(config, corpus, run.checkpoint(), text, rows, pairs).leak
    return {"leak_bits": leak.mean, "leak_error": leak.standard_error}


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _logit_norm(records: list[dict[str, Any]]) -> float | None:
    """Of the last record, mean over layers; hash routing has no logits."""
    return _mean([value for value in records[-1]["logit_norm"] if value is not None]) if records else None


@contextlib.contextmanager
def noting_cost(job: AblationJob) -> Iterator[None]:
    """A line when an attempt begins, and one with its cost when it ends; a killed one leaves the first only."""
    wall, cpu = time.time(), time.process_time()
    _append(job.attempts, {"event": "begin", "time": wall})
    try:
        yield
    finally:
        minutes, seconds = (time.process_time() - cpu) / 60, time.time() - wall
        _append(job.attempts, {"event": "end", "time": time.time(), "cpu_minutes": minutes, "seconds": seconds})


def _append(path: Path, line: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _cost(job: AblationJob) -> Result:
    lines = read_json_lines(job.attempts)
    ended = [line for line in lines if line["event"] == "end"]
    return {
        "cpu_minutes": sum(line["cpu_minutes"] for line in ended),
        "seconds": sum(line["seconds"] for line in ended),
        "attempts_killed": len(lines) - 2 * len(ended),
        "date": time.strftime("%Y-%m-%d", time.gmtime(ended[-1]["time"])),
    }
