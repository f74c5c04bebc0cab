"""A5, the canary: train on tokens in which there is nothing to learn, and see whether the loss learns it.

Every token is drawn uniformly and independently, so no model that sees only the past has an expected loss below ln V.
Every batch is fresh, so the loss of a training step is an honest estimate for the weights it was measured with. A mean
below ln V beyond its sampling error proves that the router told the model about the future. The reverse proves
nothing: a router that leaks little, or a canary too short to learn to exploit it, stays at ln V. For that there is the
exact audit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from data.batches import Batch
from moe.config import ModelConfig, MoEConfig
from moe.initialization import build_model
from moe.model import Transformer, token_losses
from moe.routers.registry import ROUTERS
from moe.routing import RoutingContext
from training.config import Config, DataConfig, TrainingConfig
from training.optimizer import build_optimizer
from training.step import train_step

VOCABULARY = 16
MODEL = ModelConfig(vocabulary_size=VOCABULARY, width=32, layers=3, heads=4)
EXPERT_WIDTH = 32
STEPS = 500
LEAST_STEPS = 20
LEAST_TOKENS = 2048  # of a step; fewer make the gradient noisy
MOST_GROUP_TOKENS = 4096
PROOF = -4.0  # standard errors
CAUSAL_BATCHES = 8


@dataclass(frozen=True)
class Canary:
    """What the canary did.

    Attributes:
        steps: optimizer steps.
        floor: ln V, nats a token.
        loss: of the training router over the last fifth of the steps, nats a token.
        standard_error: of `loss`, from the spread over steps.
        causal_loss: of causal routing on fresh tokens at the end.
        causal_standard_error: of it.
        rows, length: of a batch.
        notes: how it differs from the configuration.
    """

    steps: int
    floor: float
    loss: float
    standard_error: float
    causal_loss: float
    causal_standard_error: float
    rows: int
    length: int
    notes: list[str] = field(default_factory=list)

    @property
    def z(self) -> float:
        """Standard errors between the loss and ln V."""
        return (self.loss - self.floor) / self.standard_error

    @property
    def proves_leak(self) -> bool:
        """The loss is below what any causal model can reach."""
        return self.z < PROOF


def run_canary(
    moe: MoEConfig,
    sequence_length: int,
    steps: int = STEPS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Canary:
    """Train a small model with this routing on uniform random tokens.

    Args:
        moe: router, experts, experts per token, capacity, groups and losses are used as they are.
        sequence_length: S of training.
        steps: optimizer steps.
        seed: of weights and tokens.
        progress: told what is being done.

    Raises:
        ConfigError: the routing does not fit the sequence length.
        ValueError: too few steps to say anything.
    """
    if steps < LEAST_STEPS:
        raise ValueError(f"--canary-steps {steps}: must be at least {LEAST_STEPS}, or 0 for no canary")
    config, notes = canary_config(moe, sequence_length, steps, seed)
    rows, length = config.training.batch_sequences, config.training.sequence_length
    generator = torch.Generator().manual_seed(seed)
    model = build_model(config.model, config.moe, seed)
    optimizer = build_optimizer(model, config.training)
    losses = []
    for step in range(steps):
        result = train_step(model, optimizer, _uniform(rows, length, generator), config, step, end_of_text=0)
        losses.append(result.loss)
        if (step + 1) % 10 == 0:
            progress(f"canary: step {step + 1} of {steps}, {np.mean(losses[-10:]):.3f} nats a token")
    tail = losses[-max(2, steps // 5) :]
    causal = [_causal_loss(model, _uniform(rows, length, generator)) for _ in range(CAUSAL_BATCHES)]
    return Canary(
        steps, math.log(VOCABULARY), float(np.mean(tail)), _error(tail), float(np.mean(causal)), _error(causal),
        rows, length, notes,
    )  # fmt: skip


def canary_config(moe: MoEConfig, sequence_length: int, steps: int, seed: int) -> tuple[Config, list[str]]:
    """The canary's whole configuration, and in which ways its routing groups are not those of training.

    Sequences are cut where no routing group spans what is cut off; flat groups are kept up to 4,096 tokens.
    """
    notes: list[str] = []
    length = sequence_length
    if moe.group == "position":
        length = min(length, 64)
    elif moe.group == "chunk":
        length = min(length, max(1, 64 // moe.chunk_length) * moe.chunk_length)
    elif moe.group_sequences * length > MOST_GROUP_TOKENS:
        length = _whole_capacity(moe, MOST_GROUP_TOKENS // moe.group_sequences)
        notes.append(
            f"routing groups of {moe.group_sequences * sequence_length:,} tokens shrunk to {moe.group_sequences} x "
            f"{length}: smaller groups leak more"
        )
    rows = -(-LEAST_TOKENS // (moe.group_sequences * length)) * moe.group_sequences
    small = replace(moe, allow_leak=True, expert_width=EXPERT_WIDTH, shared_width=0)
    if "threshold_after" in ROUTERS[moe.router].reads and moe.threshold_after > 0:
        small = replace(small, threshold_after=1.0)  # the training router to the end
    config = Config(
        data=DataConfig(document_mask=False),
        model=MODEL,
        moe=small,
        training=TrainingConfig(
            steps=steps,
            batch_sequences=rows,
            micro_batch_sequences=rows,
            sequence_length=length,
            learning_rate=5e-3,
            warmup_steps=steps // 10,
            weight_decay=0.01,
            beta2=0.98,
        ),
    )
    return replace(config, run=replace(config.run, seed=seed)), notes


def _whole_capacity(moe: MoEConfig, longest: int) -> int:
    """The longest sequence up to `longest` with which experts take a whole number of a flat group's tokens."""
    for length in range(longest, 0, -1):
        slots = moe.group_sequences * length * moe.assignments_per_token
        if abs(slots / moe.num_experts - round(slots / moe.num_experts)) < 1e-9:
            return length
    return longest  # no length does; the configuration's own check says so


def _uniform(rows: int, length: int, generator: torch.Generator) -> Batch:
    token_BS = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return Batch(token_BS[:, :-1].clone(), token_BS[:, 1:].clone(), torch.zeros(rows, dtype=torch.int64))


@torch.no_grad()
def _causal_loss(model: Transformer, batch: Batch) -> float:
    rows, length = batch.token_BS.shape
    logits_BSV = model(batch.token_BS, RoutingContext(rows, length))
    return token_losses(logits_BSV, batch.label_BS).double().mean().item()


def _error(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))
