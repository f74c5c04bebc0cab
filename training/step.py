"""One optimizer step, normalised so that neither micro-batches nor processes change a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from data.batches import Batch, document_numbers
from moe.auxiliary import LOSSES
from moe.model import Transformer
from moe.routing import Routing, RoutingContext
from parallel.collectives import total
from parallel.engine import Engine
from parallel.pipeline import MicroBatch
from training.config import Config
from training.optimizer import learning_rate


class NonFiniteGradient(RuntimeError):
    """The gradient norm is infinite or not a number; the weights were left as they were, on all processes.

    Attributes:
        shared: all processes of the job raise it, so that one says it.
    """

    shared = True


@dataclass
class StepResult:
    """What one step measured, over all processes.

    Attributes:
        nats: summed negative log-likelihood of the step's tokens.
        tokens: labels that counted.
        learning_rate: that was used.
        gradient_norm: before clipping.
        auxiliary: values of the losses besides, summed over layers.
        text_bytes: of the step's labels, where the caller counted its own.
    """

    nats: float
    tokens: int
    learning_rate: float
    gradient_norm: float
    auxiliary: dict[str, float] = field(default_factory=dict)
    text_bytes: int = 0

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens


def train_step(
    model: Engine | Transformer,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: Config,
    step: int,
    end_of_text: int,
    observe: Callable[[int, Routing], None] | None = None,
    text_bytes: int = 0,
) -> StepResult:
    """Forward, backward, clip, update, and move the routers' balance state.

    Args:
        model: in any state.
        optimizer: of its parameters.
        batch: this process' rows of the step's global batch: part `engine.mesh.data` of as many as there are.
        config: of the run.
        step: from 0.
        end_of_text: id that starts a document.
        observe: called with every layer's routing, once a micro-batch.
        text_bytes: that this process' labels stand for; added up over processes.

    Raises:
        NonFiniteGradient: on all processes alike; weights, moments and routers are as before the step.
    """
    engine = model if isinstance(model, Engine) else Engine.around(model)
    auxiliary: dict[str, Tensor] = {}
    micro_batches = _micro_batches(engine, batch, config, step, end_of_text, observe, auxiliary)
    labels = total((batch.label_BS != -100).sum().to(engine.device), engine.mesh.data_group)  # stays on the device
    nats = engine.forward_backward(micro_batches, labels)
    norm = engine.finish_gradients()
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        engine.forget_step()
        raise NonFiniteGradient(
            f"step {step + 1}: the gradient norm is {norm}; lower training.learning_rate, lengthen "
            "training.warmup_steps, set training.clip_norm, or lower the moe.*_coefficient that are not 0"
        )
    engine.clip(norm, config.training.clip_norm)
    rate = learning_rate(config.training, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    engine.after_step()
    found = _over_job(engine, nats, text_bytes, auxiliary)
    return StepResult(found.nats, int(labels.item()), rate, norm, found.auxiliary, found.text_bytes)


def _micro_batches(
    engine: Engine,
    batch: Batch,
    config: Config,
    step: int,
    end_of_text: int,
    observe: Callable[[int, Routing], None] | None,
    auxiliary: dict[str, Tensor],
) -> list[MicroBatch]:
    layout, device = engine.mesh.layout, engine.device
    rows = config.micro_batch_sequences(layout)
    own_rows, length = batch.token_BS.shape
    step_tokens: int | Tensor = own_rows * layout.data * length
    if batch.valid_BS is not None:
        step_tokens = total(batch.valid_BS.sum().to(device), engine.mesh.data_group)
    made = []
    for start in range(0, own_rows, rows):
        token_BS, label_BS, valid_BS = (
            None if values is None else values[start : start + rows].to(device)
            for values in (batch.token_BS, batch.label_BS, batch.valid_BS)
        )
        assert token_BS is not None and label_BS is not None
        context = RoutingContext(
            token_BS.shape[0],
            length,
            valid_BS=valid_BS,
            mode="train",
            threshold_phase=step >= config.threshold_step,
            step_tokens=step_tokens,
            step_groups=own_rows * layout.data // config.moe.group_sequences,
            seed=config.run.seed,
            step=step,
            first_token=(engine.mesh.data * own_rows + start) * length,
            observe=observe,
            auxiliary=auxiliary,
        )
        document_BS = document_numbers(token_BS, end_of_text) if config.data.document_mask else None
        made.append(MicroBatch(context, token_BS, label_BS, document_BS))
    return made


class _Found(NamedTuple):
    nats: float
    text_bytes: int
    auxiliary: dict[str, float]


def _over_job(engine: Engine, nats: Tensor, text_bytes: int, auxiliary: dict[str, Tensor]) -> _Found:
    """Add up over processes. Each has the losses of its own layers, so that which there are is part of the sum."""
    here = [auxiliary.get(name) for name in LOSSES]
    values = torch.stack(
        [nats, nats.new_tensor(text_bytes if engine.has_loss else 0)]
        + [nats.new_zeros(()) if value is None else value.double() for value in here]
        + [nats.new_tensor(value is not None) for value in here]
    )
    total_nats, total_bytes, *found = engine.sum_over_job(values).tolist()
    known = zip(LOSSES, found[: len(LOSSES)], found[len(LOSSES) :], strict=True)
    return _Found(total_nats, round(total_bytes), {name: value for name, value, there in known if there})
