"""Train one model: `python train.py CONFIG.toml [--section.key value ...]`; under torchrun, in many processes.

This file is the experiment from top to bottom. What is computed is in `moe/`, what is read in `data/`, the machinery
of a run in `training/`, and what the result is worth in `eval/`.
"""

from __future__ import annotations

import contextlib
import io
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError

from data.batches import IGNORED_LABEL, Batches, heldout_windows
from data.corpus import Corpus
from data.errors import DataError
from eval.likelihood import evaluate
from moe.config import ConfigError
from moe.flops import training_flops_per_token
from moe.kernels import choose_backend
from parallel.engine import Engine
from training.build import build_batches, build_engine
from training.checkpoint import CheckpointError, load_model, load_optimizer, save_checkpoint
from training.config import Config
from training.device import compute_dtype, keep_freed_memory, peak_flops
from training.job import Job
from training.layout_table import layout_table
from training.load_config import config_values, load_config
from training.optimizer import build_optimizer
from training.routing_telemetry import RoutingTelemetry, layer_means
from training.run import Run, RunError
from training.step import NonFiniteGradient, StepResult, train_step
from training.telemetry import RunLog, progress_line, status_text

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: list[str]) -> int:
    """Command line; the exit status."""
    job = Job()
    console = Console(soft_wrap=True, highlight=False, markup=False, quiet=not job.is_main)
    said = io.StringIO()  # what parsing flags says on other processes than the main one
    try:
        with contextlib.nullcontext() if job.is_main else contextlib.redirect_stderr(said):
            config = load_config(arguments)
        config.layout(job.world)
        status = train(config, job, console)
    except (ConfigError, RunError, CheckpointError, DataError, NonFiniteGradient, OSError, SafetensorError) as error:
        job.let_main_speak()
        print(f"error: {f'process {job.rank}: ' if job.rank else ''}{error}", file=sys.stderr)
        status = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except SystemExit as bad_flag:
        if bad_flag.code:
            job.let_main_speak()
            print(said.getvalue(), end="", file=sys.stderr)
        raise
    except KeyboardInterrupt:  # before the first step, after the last one, or the second time
        if job.is_main:
            print("interrupted; what was saved can be continued with --run.resume auto", file=sys.stderr)
        return EXIT_INTERRUPTED
    job.leave()
    return status


@dataclass
class Experiment:
    """What a run works with.

    Attributes:
        first_step: optimizer steps already done, from the checkpoint.
    """

    job: Job
    run: Run
    corpus: Corpus
    batches: Batches
    model: Engine
    optimizer: torch.optim.Optimizer
    device: torch.device
    telemetry: RoutingTelemetry
    first_step: int


def train(config: Config, job: Job, console: Console) -> int:
    """Run an experiment to its end, to `run.stop_after`, or to Ctrl-C; the exit status."""
    keep_freed_memory()
    experiment = prepare(config, job)
    run, steps = experiment.run, config.training.steps
    if experiment.first_step == steps and job.on_main(lambda: any("final/loss" in line for line in run.metrics())):
        console.print(f"{run.folder} has all its {steps} steps; scoreboard: python -m eval.report {run.folder}")
        return 0
    describe(experiment, console)
    with RunLog(run, experiment.first_step, job.is_main) as log, interruptible() as asked_to_stop:
        done = take_steps(experiment, log, asked_to_stop, console)
        if done == steps:
            with console.status("scoring held-out text"):
                values = validate(experiment, config.eval.final_tokens, "final")
            log.scalars(steps, values)
            log.metrics({"step": steps, **values})
    if done == steps:
        bits, nats = values["final/bits_per_byte"], values["final/loss"]
        console.print(f"held-out, causal routing: {bits:.4f} bits per byte ({nats:.4f} nats per token)")
        console.print(f"run folder: {run.folder}   scoreboard: python -m eval.report {run.folder}")
        return 0
    console.print(f"saved {run.folder} at step {done}; continue with: {job.continue_command(sys.argv)}")
    return EXIT_INTERRUPTED if asked_to_stop() else 0


def prepare(config: Config, job: Job) -> Experiment:
    """Open the data, make or find the run's folder, build the model, and load the checkpoint if there is one."""
    device = job.connect(config.training.device)
    choose_backend(config.moe.backend, device.type)  # refuses one that this device has not
    corpus = Corpus.open(config.data.corpus)
    corpus.require_model_vocabulary(config.model.vocabulary_size)
    training = config.training
    dtype = compute_dtype(training.precision, device)
    job.require_same(
        config_values(config) | {"corpus sha256": corpus.sha256, "dtype": str(dtype), "torch": torch.__version__}
    )
    batches = build_batches(config, corpus)
    heldout_windows(corpus, training.sequence_length)  # refuses a corpus without held-out text, before training
    run, checkpoint = Run.create(config, job)
    model = build_engine(config, job.world, device, dtype)
    optimizer = build_optimizer(model, training)
    telemetry = RoutingTelemetry.of(model, training.sequence_length)
    if checkpoint is None:
        if job.is_main:
            run.write_environment(corpus)
        return Experiment(job, run, corpus, batches, model, optimizer, device, telemetry, 0)
    job.on_main(lambda: run.require_same_corpus(corpus))
    load_model(checkpoint, model.models)
    load_optimizer(checkpoint, model.models, optimizer)
    telemetry.load_state(checkpoint.state.get("routing"))
    return Experiment(job, run, corpus, batches, model, optimizer, device, telemetry, checkpoint.step)


def take_steps(e: Experiment, log: RunLog, asked_to_stop: Callable[[], bool], console: Console) -> int:
    """The training loop; the number of steps done at its end, which are saved."""
    config = e.run.config
    last_step = max(e.first_step, config.run.stop_after or config.training.steps)
    done = e.first_step
    stop, bad_steps = done == last_step, 0
    rows = e.model.mesh.own_rows(config.training.batch_sequences)
    with profiler(e) as profile, progress_line(console) as progress:
        task = progress.add_task("", total=config.training.steps, completed=done, status="")
        while not stop:
            step, started = done, time.perf_counter()
            batch = e.batches.batch(step, rows.start, rows.stop)
            done = step + 1
            to_log = done % config.log.every == 0
            e.telemetry.start_step(detailed=to_log)
            end_of_text = e.corpus.tokenizer.end_of_text
            labels = batch.label_BS[batch.label_BS != IGNORED_LABEL].numpy()
            text_bytes = int(e.corpus.tokenizer.token_bytes_V[labels].sum())
            try:
                result = train_step(
                    e.model, e.optimizer, batch, config, step, end_of_text, e.telemetry.observe, text_bytes
                )
                values, bad_steps = step_values(e, step, result, time.perf_counter() - started), 0
            except NonFiniteGradient as error:
                # Its data and its place in the schedule are used up; weights, moments and routers stay.
                bad_steps += 1
                values = {"step": done, "skipped": str(error)}
                if bad_steps == config.training.bad_steps:
                    log.metrics(values)
                    raise NonFiniteGradient(f"{error} ({bad_steps} steps in a row: training.bad_steps)") from None
                console.print(f"left out {error}")
            if routing := e.telemetry.end_step(e.model):
                log.routing({"step": done, "threshold_phase": step >= config.threshold_step} | routing)
                values |= layer_means(routing)
            if config.eval.every and (done % config.eval.every == 0 or done == config.training.steps):
                values |= validate(e, config.eval.tokens, "val")
            if to_log or "val/bits_per_byte" in values:
                log.scalars(done, values)
            log.metrics(values)
            progress.update(task, completed=done, status=status_text(values))
            profile.step()
            at_interval = config.run.checkpoint_every and done % config.run.checkpoint_every == 0
            stop = done == last_step or e.job.any(asked_to_stop())
            if stop or at_interval:
                state = {"tokens": done * config.tokens_per_step, "routing": e.telemetry.state()}
                save_checkpoint(e.run.checkpoints, done, e.model.models, e.optimizer, state)
    return done


def describe(e: Experiment, console: Console) -> None:
    """Say what is about to happen, and how load is balanced."""
    config, moe = e.run.config, e.run.config.moe
    total, active = e.model.parameter_counts()
    dtype = str(e.model.compute_dtype).removeprefix("torch.")
    console.print(
        f"{e.run.folder}: {total / 1e6:.1f}M parameters, {active / 1e6:.1f}M active a token, on {e.device.type} in "
        f"{dtype}; corpus {e.corpus.sha256[:12]} ({len(e.corpus.domains)} domains); "
        f"{config.training.steps} steps of {config.tokens_per_step:,} tokens"
    )
    if moe.is_moe:
        backend = choose_backend(moe.backend, e.device.type)
        experts = f"{moe.num_experts} experts, {moe.assignments_per_token} a token, computed by {backend}"
        console.print(f"router: {moe.router}, {experts}")
        console.print(f"balance by {moe.balance_description}")
    if config.training_router_leaks and config.threshold_step:
        switches = config.threshold_step < config.training.steps
        switch = f"threshold routing starts at step {config.threshold_step}; " if switches else ""
        console.print(
            f"router {moe.router} is not causal in training: its losses are logged as noncausal_*; {switch}"
            "validation is causal throughout; python -m eval.causality measures the leak"
        )
    if e.job.world > 1:
        console.print(layout_table(e.model, e.job))
    if e.first_step:
        console.print(f"continuing from step {e.first_step}")


def step_values(e: Experiment, step: int, result: StepResult, seconds: float) -> dict[str, Any]:
    """The line of metrics.jsonl of one step. A loss that its router may have leaked into is named noncausal."""
    config = e.run.config
    prefix = "noncausal_" if config.training_router_leaks and step < config.threshold_step else ""
    values: dict[str, Any] = {
        "step": step + 1,
        f"{prefix}loss": result.loss,
        f"{prefix}bits_per_byte": result.nats / math.log(2) / max(1, result.text_bytes),
        "learning_rate": result.learning_rate,
        "gradient_norm": result.gradient_norm,
        "tokens": (step + 1) * config.tokens_per_step,
        "tokens_per_second": result.tokens / seconds,
    }
    values |= {f"{name}_loss": value for name, value in result.auxiliary.items()}
    if (peak := peak_flops(e.device, e.model.compute_dtype)) is not None:
        flops = training_flops_per_token(config.model, config.moe, config.training.sequence_length)
        values["mfu"] = flops * result.tokens / seconds / (peak * e.job.world)
    return values


def validate(e: Experiment, tokens: int, name: str) -> dict[str, float]:
    """Held-out loss under causal routing, over all domains together and for each, as "name/...".

    "val" is the curve during training, always on the same windows; "final" reads more of them, so the two are not
    points of one curve.
    """
    score = evaluate(e.model, e.corpus, e.run.config, tokens)
    values = {f"{name}/loss": score.nats_per_token, f"{name}/bits_per_byte": score.bits_per_byte}
    return values | {f"{name}/{domain}/bits_per_byte": part.bits_per_byte for domain, part in score.domains.items()}


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C, and SIGUSR1, into a question asked at step boundaries; a second one ends the process at once.

    SIGTERM stays deadly: torchrun sends it where another process has died, and then there is no next step.
    """
    asked = False

    def note(signum: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    polite = [signal.SIGINT] + ([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])
    before = {which: signal.signal(which, note) for which in polite}
    try:
        yield lambda: asked
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


@contextlib.contextmanager
def profiler(e: Experiment) -> Iterator[Any]:
    """A torch.profiler over `log.profile` steps of the main process, or something that ignores `step()`."""
    run = e.run
    if not run.config.log.profile or not e.job.is_main:
        yield type("NoProfile", (), {"step": staticmethod(lambda: None)})
        return
    schedule = torch.profiler.schedule(wait=0, warmup=2, active=run.config.log.profile, repeat=1)
    handler = torch.profiler.tensorboard_trace_handler(str(run.folder / "profile"))
    with torch.profiler.profile(schedule=schedule, on_trace_ready=handler) as profile:
        yield profile


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
