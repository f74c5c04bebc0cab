"""One optimizer step, normalised so that micro-batching changes no number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.batches import Batch, document_numbers
from moe.model import Transformer, token_losses
from moe.routing import Routing, RoutingContext
from training.config import Config
from training.optimizer import learning_rate


class NonFiniteGradient(RuntimeError):
    """The gradient norm is infinite or not a number; the weights were left as they were."""


@dataclass
class StepResult:
    """What one step measured.

    Attributes:
        nats: summed negative log-likelihood of the step's tokens.
        tokens: labels that counted.
        learning_rate: that was used.
        gradient_norm: before clipping.
        auxiliary: balance and z values, summed over layers.
    """

    nats: float
    tokens: int
    learning_rate: float
    gradient_norm: float
    auxiliary: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: Config,
    step: int,
    end_of_text: int,
    observe: Callable[[int, Routing], None] | None = None,
) -> StepResult:
    """Forward, backward, clip, update, and move the routers' balance state.

    Args:
        model: in any state; parameters on one device.
        optimizer: from `build_optimizer`.
        batch: the step's global batch, on any device.
        config: of the run.
        step: from 0.
        end_of_text: id that starts a document.
        observe: called with every layer's routing, once a micro-batch.

    Raises:
        NonFiniteGradient: weights, moments and routers are as before the step.
    """
    device = next(model.parameters()).device
    rows = config.training.micro_batch_sequences
    step_rows, sequence_length = batch.token_BS.shape
    step_tokens = int((batch.label_BS != -100).sum())
    nats = torch.zeros((), dtype=torch.float64, device=device)
    auxiliary: dict[str, Tensor] = {}
    for start in range(0, step_rows, rows):
        token_BS = batch.token_BS[start : start + rows].to(device)
        label_BS = batch.label_BS[start : start + rows].to(device)
        context = RoutingContext(
            token_BS.shape[0],
            sequence_length,
            mode="train",
            threshold_phase=step >= config.threshold_step,
            step_tokens=step_rows * sequence_length,
            step_groups=step_rows // config.moe.group_sequences,
            seed=config.run.seed,
            step=step,
            first_token=start * sequence_length,
            observe=observe,
            auxiliary=auxiliary,
        )
        document_BS = document_numbers(token_BS, end_of_text) if config.data.document_mask else None
        loss = token_losses(model(token_BS, context, document_BS), label_BS).sum()
        # The step's token count, not the micro-batch's: a mean of means weighs tokens unequally.
        (loss / step_tokens).backward()
        nats += loss.detach()

    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        model.forget_step()
        raise NonFiniteGradient(
            f"step {step + 1}: the gradient norm is {norm}; lower training.learning_rate, lengthen "
            "training.warmup_steps, set training.clip_norm, or lower the moe.*_coefficient that are not 0"
        )
    clip = config.training.clip_norm
    if clip and norm > clip:  # most steps need no clipping, and scaling by 1 would still touch every gradient
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip, torch.tensor(norm, device=device))
    rate = learning_rate(config.training, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.after_step()
    return StepResult(nats.item(), step_tokens, rate, norm, {name: value.item() for name, value in auxiliary.items()})
