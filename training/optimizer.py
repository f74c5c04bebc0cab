"""AdamW with the right groups, and the learning rate as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel.engine import Engine
from training.config import TrainingConfig


def build_optimizer(model: nn.Module | Engine, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019); matrices decay, vectors (norms, biases) do not.

    Every parameter that wants a gradient is in exactly one group. Parameters that are split over different processes
    are in different groups, since one fused update cannot span them.
    """
    if isinstance(model, Engine):
        parameters = [held.parameter for held in model.held]
    else:
        parameters = [p for p in model.parameters() if p.requires_grad]
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        decays = parameter.dim() >= 2
        split_over = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((decays, split_over), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": held, "weight_decay": config.weight_decay * decays} for (decays, _), held in groups.items()],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Learning rate of a step, counted from 0.

    Linear warm-up over `warmup_steps`, then half a cosine (`cosine`) or a plateau and a linear fall over the last
    `decay_fraction` (`wsd`) down to `final_learning_rate`, reached after the last step.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        shape = 0.5 * (1 + math.cos(math.pi * done))
    else:
        decay_steps = min(round(config.steps * config.decay_fraction), config.steps - config.warmup_steps)
        left = config.steps - step
        shape = min(1.0, left / decay_steps) if decay_steps else 1.0
    floor = config.final_learning_rate
    return config.learning_rate * (floor + (1 - floor) * shape)
