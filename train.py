"""Train one model: `python train.py CONFIG.toml [--section.key value ...]`.

This file is the experiment from top to bottom. What is computed is in `moe/`, what is read in `data/`, the machinery
of a run in `training/`, and what the result is worth in `eval/`.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

from data.batches import Batch, Batches
from data.corpus import Corpus
from data.errors import DataError
from eval.likelihood import evaluate
from moe.config import ConfigError
from moe.flops import training_flops_per_token
from moe.initialization import build_model, parameter_counts
from moe.model import Transformer
from training.checkpoint import CheckpointError, load_model, load_optimizer, save_checkpoint
from training.config import Config
from training.device import choose_device, compute_dtype, keep_freed_memory, peak_flops
from training.load_config import load_config
from training.optimizer import build_optimizer
from training.run import Run, RunError
from training.step import NonFiniteGradient, StepResult, train_step
from training.telemetry import LoadCounter, RunLog, progress_line, status_text

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: list[str]) -> int:
    """Command line; the exit status."""
    console = Console(soft_wrap=True, highlight=False)
    try:
        config = load_config(arguments)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"torchrun started {os.environ['WORLD_SIZE']} processes; this version trains in one: "
                "use --nproc-per-node 1"
            )
        return train(config, console)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (RunError, CheckpointError, DataError, NonFiniteGradient) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED


def train(config: Config, console: Console) -> int:
    """Run an experiment to its end, to `run.stop_after`, or to Ctrl-C."""
    keep_freed_memory()
    device = choose_device(config.training.device)
    corpus = Corpus.open(config.data.corpus)
    corpus.require_model_vocabulary(config.model.vocabulary_size)
    batches = Batches(
        corpus,
        config.training.sequence_length,
        config.training.batch_sequences,
        config.run.seed,
        config.data.mixture_exponent,
    )

    run, checkpoint = Run.create(config)
    if checkpoint is not None and checkpoint.step == config.training.steps:
        console.print(
            f"{run.folder} has all its {checkpoint.step} steps; scoreboard: python -m eval.report {run.folder}"
        )
        return 0
    dtype = compute_dtype(config.training.precision, device)
    model = build_model(config.model, config.moe, config.run.seed, device, dtype)
    optimizer = build_optimizer(model, config.training)
    first_step = 0
    if checkpoint is not None:
        load_model(checkpoint, model)
        load_optimizer(checkpoint, model, optimizer)
        first_step = checkpoint.step
    else:
        run.write_environment(corpus)
    describe(run, model, corpus, device, first_step, console)

    last_step = max(first_step, config.run.stop_after or config.training.steps)
    interrupted = False
    log = RunLog(run, first_step)
    done = first_step
    with interruptible() as asked_to_stop, profiler(config, run) as profile:
        with progress_line(console) as progress:
            task = progress.add_task("", total=config.training.steps, completed=first_step, status="")
            for step in range(first_step, last_step):
                started = time.perf_counter()
                batch = batches.batch(step)
                loads = LoadCounter() if (step + 1) % config.log.every == 0 else None
                result = train_step(
                    model,
                    optimizer,
                    batch,
                    config,
                    step,
                    corpus.tokenizer.end_of_text,
                    loads.observe if loads else None,
                )
                seconds = time.perf_counter() - started
                values = step_values(config, corpus, batch, step, result, seconds, device)
                done = step + 1
                if loads:
                    record_loads(log, loads, values, done, step >= config.threshold_step)
                if config.eval.every and done % config.eval.every == 0 and done < config.training.steps:
                    values |= validate(model, corpus, config, config.eval.tokens)
                if loads or "val/bits_per_byte" in values:
                    log.scalars(done, {k: v for k, v in values.items() if isinstance(v, int | float)})
                log.metrics(values)
                progress.update(task, completed=done, status=status_text(values))
                profile.step()
                interrupted = asked_to_stop()
                at_interval = config.run.checkpoint_every and done % config.run.checkpoint_every == 0
                if done == last_step or interrupted or at_interval:
                    save_checkpoint(run.checkpoints, done, model, optimizer, {"tokens": done * config.tokens_per_step})
                if interrupted:
                    break
    if done == config.training.steps:
        with console.status("scoring held-out text"):
            values = validate(model, corpus, config, config.eval.final_tokens)
        log.scalars(config.training.steps, values)
        log.metrics({"step": config.training.steps, "final": True, **values})
        console.print(
            f"held-out, causal routing: {values['val/bits_per_byte']:.4f} bits per byte "
            f"({values['val/loss']:.4f} nats per token)"
        )
        console.print(f"run folder: {run.folder}   scoreboard: python -m eval.report {run.folder}")
    else:
        # Later flags win, so the command can be repeated as it was with these behind it.
        command = " ".join(["python", *map(shlex.quote, sys.argv)])
        console.print(
            f"saved {run.folder} at step {done}; continue with: {command} --run.resume auto --run.stop-after 0"
        )
    log.close()
    return EXIT_INTERRUPTED if interrupted else 0


def describe(
    run: Run, model: Transformer, corpus: Corpus, device: torch.device, first_step: int, console: Console
) -> None:
    """Say what is about to happen, and how load is balanced."""
    config, moe = run.config, run.config.moe
    total, active = parameter_counts(model)
    dtype = str(model.compute_dtype).removeprefix("torch.")
    console.print(
        f"{run.folder}: {total / 1e6:.1f}M parameters, {active / 1e6:.1f}M active a token, on {device.type} in "
        f"{dtype}; corpus {corpus.sha256[:12]} ({len(corpus.domains)} domains); "
        f"{config.training.steps} steps of {config.tokens_per_step:,} tokens"
    )
    if moe.is_moe:
        balance = f"balance loss {moe.balance_coefficient}, z-loss {moe.z_coefficient}"
        console.print(f"router: {moe.router}, {moe.num_experts} experts, {moe.experts_per_token} a token; {balance}")
    if config.training_router_leaks and config.threshold_step:
        console.print(
            f'expert choice over "{moe.group}" groups is not causal: its losses are logged as noncausal_*; threshold '
            f"routing starts at step {config.threshold_step}; validation is causal throughout"
        )
    if first_step:
        console.print(f"continuing from step {first_step}")


def step_values(
    config: Config,
    corpus: Corpus,
    batch: Batch,
    step: int,
    result: StepResult,
    seconds: float,
    device: torch.device,
) -> dict[str, Any]:
    """The line of metrics.jsonl of one step. A loss that its router may have leaked into is named noncausal."""
    labels = batch.label_BS[batch.label_BS != -100].numpy()
    text_bytes = int(corpus.tokenizer.token_bytes_V[labels].sum())
    prefix = "noncausal_" if config.training_router_leaks and step < config.threshold_step else ""
    values: dict[str, Any] = {
        "step": step + 1,
        f"{prefix}loss": result.loss,
        f"{prefix}bits_per_byte": result.nats / math.log(2) / max(1, text_bytes),
        "learning_rate": result.learning_rate,
        "gradient_norm": result.gradient_norm,
        "tokens": (step + 1) * config.tokens_per_step,
        "tokens_per_second": result.tokens / seconds,
    }
    values |= {f"{name}_loss": value for name, value in result.auxiliary.items()}
    if (peak := peak_flops(device)) is not None:
        flops = training_flops_per_token(config.model, config.moe, config.training.sequence_length)
        values["mfu"] = flops * result.tokens / seconds / peak
    return values


def record_loads(log: RunLog, loads: LoadCounter, values: dict[str, Any], done: int, threshold_phase: bool) -> None:
    """Routing of this step: the summary into the metrics, the counts into the routing record."""
    summary = loads.summary()
    if summary:
        counts = summary.pop("counts")
        tokens = max(loads.tokens.values())
        log.routing({"step": done, "tokens": tokens, "counts": counts, "threshold_phase": threshold_phase})
        values |= summary


def validate(model: Transformer, corpus: Corpus, config: Config, tokens: int) -> dict[str, float]:
    """Held-out loss under causal routing, over all domains together and for each."""
    score = evaluate(model, corpus, config, tokens)
    values = {"val/loss": score.nats_per_token, "val/bits_per_byte": score.bits_per_byte}
    return values | {f"val/{name}/bits_per_byte": part.bits_per_byte for name, part in score.domains.items()}


@contextlib.contextmanager
def interruptible() -> Iterator[Any]:
    """Turn Ctrl-C into a question asked at step boundaries; a second one ends the process at once."""
    asked = False

    def note(signum: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def profiler(config: Config, run: Run) -> Iterator[Any]:
    """A torch.profiler over `log.profile` steps, or something that ignores `step()`."""
    if not config.log.profile:
        yield type("NoProfile", (), {"step": staticmethod(lambda: None)})
        return
    schedule = torch.profiler.schedule(wait=0, warmup=2, active=config.log.profile, repeat=1)
    handler = torch.profiler.tensorboard_trace_handler(str(run.folder / "profile"))
    with torch.profiler.profile(schedule=schedule, on_trace_ready=handler) as profile:
        yield profile


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
