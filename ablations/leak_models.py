"""The six small models of the leak experiment: how each is trained, and what is measured of it."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from typing import Any, Literal

import torch

from ablations.leak_table import CHUNK, FLAT, POSITION, SEQUENCE, THRESHOLD, TOKEN_CHOICE, Result
from data.batches import Batches
from data.corpus import Corpus
from eval.causality_audits import certify_model, ways
from eval.leak import Estimate, Nats, measure_leak, mixed_rows
from eval.likelihood import MixedWindows, Mode, evaluate, model_nats
from moe.config import ModelConfig, MoEConfig
from moe.initialization import build_model
from moe.model import Transformer
from moe.routers.expert_choice import ExpertChoiceRouter
from moe.routing import RoutingContext
from training.config import Config, DataConfig, RunConfig, TrainingConfig
from training.device import keep_freed_memory
from training.optimizer import build_optimizer
from training.step import train_step

SEQUENCES, LENGTH = 32, 64  # of a step
HELDOUT_TOKENS = 40 * SEQUENCES * LENGTH
LAST_STEPS = 100
WARMUP_STEPS = 100
CALIBRATION_STEPS = 50
LEAK_PAIRS = 16
AUDITS = 2  # batches

_EXPERT_CHOICE = {"router": "expert_choice", "allow_leak": True, "threshold_decay": 0.98}
# Expert choice to the very end, where a run of ours would end with thresholds: its leak is what is studied.
_ALWAYS = {**_EXPERT_CHOICE, "threshold_after": 1.0}
_MOE: dict[str, dict[str, Any]] = {
    CHUNK: {**_ALWAYS, "group": "chunk", "chunk_length": 16},
    SEQUENCE: {**_ALWAYS, "group": "flat", "group_sequences": 1},
    FLAT: {**_ALWAYS, "group": "flat"},
    POSITION: {**_ALWAYS, "group": "position"},
    THRESHOLD: {**_EXPERT_CHOICE, "group": "flat", "threshold_after": 1 / 6},
    TOKEN_CHOICE: {"router": "token_choice", "balance_coefficient": 0.01},
}


def model_config(row: str, seed: int, steps: int, corpus: Corpus) -> Config:
    """The configuration of one model: 3 layers, D 64, E 8, k 2, sigmoid scores."""
    sizes = {"num_experts": 8, "experts_per_token": 2, "expert_width": 64, "score": "sigmoid"}
    return Config(
        run=RunConfig(seed=seed),
        data=DataConfig(corpus=str(corpus.folder), document_mask=False),
        model=ModelConfig(vocabulary_size=corpus.vocabulary_size, width=64, layers=3, heads=4),
        moe=MoEConfig(**{**sizes, "group_sequences": SEQUENCES, **_MOE[row]}),
        training=TrainingConfig(
            steps=steps,
            batch_sequences=SEQUENCES,
            micro_batch_sequences=SEQUENCES,
            sequence_length=LENGTH,
            learning_rate=3e-3,
            final_learning_rate=0.1,
            warmup_steps=min(WARMUP_STEPS, steps),
            schedule="cosine",
            weight_decay=0.01,
            beta2=0.98,
            device="cpu",
        ),
    )


def measure_alone(row: str, seed: int, steps: int, corpus: str) -> Result:
    """`measure` in a process of its own, with one thread: several models are trained at a time."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return measure(row, seed, steps, Corpus.open(corpus))


def measure(row: str, seed: int, steps: int, corpus: Corpus) -> Result:
    """Train one model and measure it.

    Raises:
        NothingToScore: the corpus holds too little text out to fill a routing group.
    """
    start = time.perf_counter()
    config = model_config(row, seed, steps, corpus)
    model, losses = train(config, corpus)
    # The router that trained the model last: ET ends with thresholds, which see nothing of the future.
    causal = config.moe.causal_in_training or config.threshold_step < steps
    mode: Mode = "causal" if config.threshold_step < steps else "train_router"

    def heldout(model: Transformer, mode: Mode = "causal") -> float:
        return evaluate(model, corpus, config, HELDOUT_TOKENS, mode).nats_per_token

    if row == TOKEN_CHOICE:
        token_choice, threshold = heldout(model), heldout(with_thresholds(model, config, corpus))
    else:
        token_choice, threshold = heldout(serving(model, "token_choice")), heldout(serving(model, "threshold"))
    leak, (audit_leaks, audit_probes) = measure_future(model, config, corpus, mode)
    return Result(
        row,
        seed,
        causal,
        train=statistics.mean(losses[-LAST_STEPS:]),
        training_router=heldout(model, mode),
        threshold=threshold,
        token_choice=token_choice,
        leak_bits=leak.mean,
        leak_error=leak.standard_error,
        audit_leaks=audit_leaks,
        audit_probes=audit_probes,
        seconds=time.perf_counter() - start,
    )


def train(config: Config, corpus: Corpus) -> tuple[Transformer, list[float]]:
    """Train from scratch; the model, and the loss of each step in nats per token."""
    training = config.training
    batches = Batches(corpus, training.sequence_length, training.batch_sequences, config.run.seed)
    model = build_model(config.model, config.moe, config.run.seed)
    optimizer = build_optimizer(model, training)
    end_of_text = corpus.tokenizer.end_of_text
    losses = [
        train_step(model, optimizer, batches.batch(step), config, step, end_of_text).loss
        for step in range(training.steps)
    ]
    return model.eval(), losses


def serving(model: Transformer, inference: Literal["threshold", "token_choice"]) -> Transformer:
    """The same model, an expert-choice one, with another way of routing in evaluation."""
    for layer in model.moe_layers():
        assert isinstance(layer.router, ExpertChoiceRouter)
        layer.router.inference = inference
    return model


def with_thresholds(model: Transformer, config: Config, corpus: Corpus) -> Transformer:
    """A copy of a token-choice model that routes by thresholds, with cutoffs found on training text."""
    moe = dataclasses.replace(config.moe, router="threshold", balance_coefficient=0.0)
    served = build_model(config.model, moe).eval()
    missing, unexpected = served.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected and all(name.endswith((".cutoff_E", ".updates")) for name in missing), (missing, unexpected)
    batches = Batches(corpus, LENGTH, SEQUENCES, config.run.seed)
    for step in range(CALIBRATION_STEPS):
        with torch.no_grad():
            served(batches.batch(step).token_BS, RoutingContext(SEQUENCES, LENGTH, mode="train"))
        served.after_step()
    return served


def measure_future(model: Transformer, config: Config, corpus: Corpus, mode: Mode) -> tuple[Estimate, tuple[int, int]]:
    """What the router that trained the model last sees of the future, in bits and as a fact.

    Args:
        model: trained.
        config: of the model.
        corpus: its held-out text is read.
        mode: in which the model routes as in the last part of its training.

    Returns:
        The leak in bits a token; and of the audited ends of sequences, those that changed something before them, and
        all.
    """
    exact = copy.deepcopy(model)
    for layer in exact.moe_layers():
        layer.experts.backend = "reference"  # the same bits for a token whatever goes to the other experts
    pair = 2 * SEQUENCES
    token_RS, label_RS = mixed_rows(corpus, LENGTH, max(LEAK_PAIRS, AUDITS) * pair)

    def nats(mode: Mode) -> Nats:
        return lambda token_BS, label_BS: model_nats(
            exact, MixedWindows([], token_BS, label_BS, torch.ones_like(token_BS, dtype=torch.bool)), mode=mode
        )

    bytes_V = corpus.tokenizer.token_bytes_V
    leak = measure_leak(nats(mode), nats("causal"), token_RS, label_RS, bytes_V, SEQUENCES, LEAK_PAIRS).leak

    generator = torch.Generator().manual_seed(config.run.seed)
    thresholds = config.threshold_step < config.training.steps
    last = {way.name for way in ways(config.moe) if way.training and way.threshold_phase == thresholds}
    leaks = probes = 0
    for true_BS, other_BS in token_RS[: AUDITS * pair].view(AUDITS, 2, SEQUENCES, LENGTH):
        for audit in certify_model(exact, true_BS, other_BS, generator).audits:
            if audit.way in last:
                leaks += audit.leaks
                probes += audit.suffix_probes
    return leak, (leaks, probes)
