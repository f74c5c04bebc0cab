"""What the arms of an ablation must have in common, so that what is left is the answer.

- `tokens`: every arm trains on the same number of tokens.
- `active_parameters`: the same tokens, and the same parameters used by a token.
- `flops`: the same training FLOPs in all: those of a token's forward and backward pass (`moe/flops.py`) times tokens.
  With `adjust_steps` the number of steps of each arm is set so; without it a misfit is an error.

A misfit is an error that lists every arm's numbers. FLOPs count what is configured: what a capacity drops, and what
an expert gets beyond or below its share under thresholds, are not subtracted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from moe.config import ConfigError, require
from moe.flops import training_flops_per_token
from moe.initialization import parameter_counts
from moe.model import Transformer
from training.config import Config


@dataclass(frozen=True)
class Cost:
    """What one run of an arm has and takes.

    Attributes:
        parameters: all.
        active_parameters: that one token uses on average.
        flops_per_token: of forward and backward pass.
        tokens: of training.
        steps: of training.
    """

    parameters: int
    active_parameters: int
    flops_per_token: int
    tokens: int
    steps: int

    @property
    def flops(self) -> int:
        """Of training."""
        return self.flops_per_token * self.tokens

    @classmethod
    def of(cls, config: Config) -> Cost:
        """Counted from the configuration; nothing is allocated."""
        with torch.device("meta"):
            total, active = parameter_counts(Transformer(config.model, config.moe))
        length, steps = config.training.sequence_length, config.training.steps
        per_token = training_flops_per_token(config.model, config.moe, length)
        return cls(total, active, per_token, steps * config.tokens_per_step, steps)


@dataclass(frozen=True)
class Budget:
    """The rule, the `[budget]` section of the file.

    Attributes:
        rule: see the module.
        tolerance: largest relative difference from the baseline.
        adjust_steps: `flops`: change the steps of an arm to match the baseline's FLOPs.
    """

    rule: Literal["tokens", "active_parameters", "flops"] = "tokens"
    tolerance: float = 0.01
    adjust_steps: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.tolerance < 0.5, f"budget.tolerance = {self.tolerance}: must be from 0 and below 0.5")
        require(
            not self.adjust_steps or self.rule == "flops",
            f'budget.adjust_steps = true has no effect with budget.rule = "{self.rule}": remove it, or use "flops"',
        )

    def describe(self) -> str:
        """In words."""
        what = {
            "tokens": "equal training tokens",
            "active_parameters": "equal training tokens and equal active parameters",
            "flops": "equal training FLOPs" + (", by the number of steps" if self.adjust_steps else ""),
        }[self.rule]
        return f"{what}, within {100 * self.tolerance:g}% of the baseline's"

    def enforce(self, configs: dict[str, Config], baseline: str, source: str) -> dict[str, Config]:
        """The configurations with the steps of the budget.

        Args:
            configs: by arm.
            baseline: the arm that sets the budget.
            source: the file, for messages.

        Raises:
            ConfigError: an arm does not fit; lists the numbers of all.
        """
        costs = {name: Cost.of(config) for name, config in configs.items()}
        if self.adjust_steps:
            for name, cost in costs.items():
                per_step = cost.flops_per_token * configs[name].tokens_per_step
                steps = max(1, round(costs[baseline].flops / per_step))
                configs = configs | {name: _with_steps(configs[name], steps, f'{source}, arm "{name}"')}
            costs = {name: Cost.of(config) for name, config in configs.items()}
        misfits = [name for name, cost in costs.items() if self._misfits(cost, costs[baseline])]
        if misfits:
            numbers = "; ".join(
                f"{name}: {cost.active_parameters:,} active parameters, {cost.flops_per_token:,} FLOPs a token, "
                f"{cost.tokens:,} tokens in {cost.steps:,} steps, {cost.flops:.4g} FLOPs in all"
                for name, cost in costs.items()
            )
            raise ConfigError(
                f"{source}: the budget is {self.describe()} ({baseline}), which {', '.join(misfits)} "
                f"{'misses' if len(misfits) == 1 else 'miss'}. {numbers}. Change the arms, raise budget.tolerance"
                + (", or set budget.adjust_steps = true" if self.rule == "flops" and not self.adjust_steps else "")
            )
        return configs

    def _misfits(self, cost: Cost, reference: Cost) -> bool:
        pairs = {
            "tokens": [(cost.tokens, reference.tokens)],
            "active_parameters": [
                (cost.tokens, reference.tokens),
                (cost.active_parameters, reference.active_parameters),
            ],
            "flops": [(cost.flops, reference.flops)],
        }[self.rule]
        return any(abs(own - wanted) > self.tolerance * wanted for own, wanted in pairs)


def _with_steps(config: Config, steps: int, where: str) -> Config:
    require(
        config.training.warmup_steps <= steps,
        f"{where}: equal FLOPs leave it {steps} steps, fewer than training.warmup_steps = "
        f"{config.training.warmup_steps}: make its model cheaper, or lower the warm-up",
    )
    return dataclasses.replace(config, training=dataclasses.replace(config.training, steps=steps))
