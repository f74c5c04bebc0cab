"""The whole configuration of a run, and the checks that concern more than one section."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from moe.config import ModelConfig, MoEConfig, divisors, is_moe_layer, require, require_positive
from moe.groups import check_routing
from moe.routers.registry import ROUTERS
from parallel.config import Layout, ParallelConfig, check_parallel, micro_batch_sequences


@dataclass(frozen=True)
class RunConfig:
    """Name, place and life of the run."""

    name: str = "default"
    """The run's folder is `folder`/`name`."""
    folder: str = "runs"
    """Where run folders are."""
    seed: int = 0
    """Seed of the parameters and of the data order."""
    resume: Literal["never", "auto"] = "never"
    """`auto` continues from the newest checkpoint, or starts if there is none; `never` refuses an existing run."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves at the end (and on Ctrl-C) only."""
    stop_after: int = 0
    """Save and stop after this step although the schedule spans training.steps; 0 trains to the end."""

    def __post_init__(self) -> None:
        require(
            bool(self.name) and self.name not in (".", "..") and "/" not in self.name,
            f"run.name = {self.name!r}: must be a folder name without '/'",
        )
        require(0 <= self.seed < 2**31, f"run.seed = {self.seed}: must be from 0 to 2^31 - 1")
        for key, value in {"checkpoint_every": self.checkpoint_every, "stop_after": self.stop_after}.items():
            require(value >= 0, f"run.{key} = {value}: must be 0 or more")


@dataclass(frozen=True)
class DataConfig:
    """What is read."""

    corpus: str = "corpora/default"
    """Folder written by `python -m data.prepare`."""
    mixture_exponent: float = 0.5
    """A domain is sampled in proportion to its tokens to this power: 1 by size, 0 all alike."""
    row_order: Literal["mixed", "domain"] = "mixed"
    """How a step's sequences lie in its batch: as drawn, or sorted by domain, so that most routing groups and
    micro-batches hold one domain. A step has the same sequences either way."""
    document_mask: bool = True
    """Attention stays within a document; false lets documents packed in one row see the earlier ones."""

    def __post_init__(self) -> None:
        require(
            0 <= self.mixture_exponent <= 1,
            f"data.mixture_exponent = {self.mixture_exponent}: must be from 0 to 1",
        )


@dataclass(frozen=True)
class TrainingConfig:
    """Batches, optimizer, schedule and precision."""

    steps: int = 1000
    """Optimizer steps of the whole schedule."""
    batch_sequences: int = 16
    """Sequences of one optimizer step (the global batch)."""
    micro_batch_sequences: int = 0
    """Sequences of one forward and backward pass of a process; smaller saves memory and changes no number. 0 takes as
    many as the layout allows."""
    sequence_length: int = 256
    """Tokens S of a sequence."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    final_learning_rate: float = 0.0
    """Where the learning rate falls to, as a fraction of the peak; reached when the last step is done."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "wsd"] = "wsd"
    """After warm-up: half a cosine, or warm-up-stable-decay (constant, then linear decay)."""
    decay_fraction: float = 0.3
    """wsd: the last part of the run, over which the learning rate falls."""
    weight_decay: float = 0.1
    """AdamW's decoupled decay on matrices; norms and biases have none."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.95
    """AdamW's second-moment decay."""
    epsilon: float = 1e-8
    """AdamW's denominator offset."""
    clip_norm: float = 1.0
    """Global gradient norm is clipped to this; 0 does not clip."""
    bad_steps: int = 3
    """A step whose gradient is not finite is left out, on all processes; so many in a row end the run."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Of activations and matrix products; `auto` takes bf16 where the hardware multiplies it. Weights and optimizer
    state are fp32 always."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""

    def __post_init__(self) -> None:
        require_positive(
            "training",
            steps=self.steps,
            batch_sequences=self.batch_sequences,
            sequence_length=self.sequence_length,
            bad_steps=self.bad_steps,
        )
        require(self.micro_batch_sequences >= 0, "training.micro_batch_sequences must be 0 (as many as fit) or more")
        require(
            self.micro_batch_sequences == 0 or self.batch_sequences % self.micro_batch_sequences == 0,
            f"training.micro_batch_sequences = {self.micro_batch_sequences} does not divide training.batch_sequences = "
            f"{self.batch_sequences}: choose among {divisors(self.batch_sequences)}",
        )
        require(self.learning_rate > 0, f"training.learning_rate = {self.learning_rate}: must be greater than 0")
        require(
            0 <= self.warmup_steps <= self.steps,
            f"training.warmup_steps = {self.warmup_steps}: must be from 0 to training.steps = {self.steps}",
        )
        require(
            self.schedule == "wsd" or self.decay_fraction == TrainingConfig.decay_fraction,
            f"training.decay_fraction = {self.decay_fraction} has no effect with training.schedule = "
            f'"{self.schedule}": remove it or use "wsd"',
        )
        for key in ("final_learning_rate", "decay_fraction"):
            value = getattr(self, key)
            require(0 <= value <= 1, f"training.{key} = {value}: must be from 0 to 1")
        for key in ("beta1", "beta2"):
            value = getattr(self, key)
            require(0 <= value < 1, f"training.{key} = {value}: must be at least 0 and below 1")
        for key in ("weight_decay", "clip_norm"):
            value = getattr(self, key)
            require(value >= 0, f"training.{key} = {value}: must be 0 or more")
        require(self.epsilon > 0, f"training.epsilon = {self.epsilon}: must be greater than 0")


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation during and after training, always under causal routing."""

    every: int = 100
    """Steps between evaluations; 0 evaluates at the end only."""
    tokens: int = 16384
    """Held-out tokens per domain in an evaluation during training."""
    final_tokens: int = 65536
    """Held-out tokens per domain in the evaluation at the end and in `eval.report`."""

    def __post_init__(self) -> None:
        require(self.every >= 0, f"eval.every = {self.every}: must be 0 or more")
        require_positive("eval", tokens=self.tokens, final_tokens=self.final_tokens)


@dataclass(frozen=True)
class LogConfig:
    """What is recorded, and how often."""

    every: int = 10
    """Steps between routing records and TensorBoard points; metrics.jsonl has every step."""
    tensorboard: bool = True
    """Write TensorBoard files to the run's `tb/`."""
    profile: int = 0
    """Write a torch.profiler trace of this many steps (after two of warm-up) to the run's `profile/`."""

    def __post_init__(self) -> None:
        require_positive("log", every=self.every)
        require(self.profile >= 0, f"log.profile = {self.profile}: must be 0 or more")


@dataclass(frozen=True)
class Config:
    """One run. Sections of the TOML file and prefixes of the command-line flags."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for section in fields(self):
            for key, value in vars(getattr(self, section.name)).items():
                finite = not isinstance(value, float) or math.isfinite(value)
                require(finite, f"{section.name}.{key} = {value}: must be a finite number")
        micro_batch = self.training.micro_batch_sequences or self.training.batch_sequences
        check_routing(self.moe, self.training.sequence_length, micro_batch)
        experts = [i for i in range(self.model.layers) if is_moe_layer(self.model, i)]
        require(
            bool(experts) or not self.moe.is_moe,
            f"model.dense_layers = {self.model.dense_layers} leaves no layer with experts for moe.router = "
            f'{self.moe.router!r}: lower it below model.layers = {self.model.layers}, or set moe.router = "dense"',
        )
        dense = [i for i in range(self.model.layers) if not is_moe_layer(self.model, i)]
        require(
            self.model.feed_forward_width is None or bool(dense),
            f"model.feed_forward_width = {self.model.feed_forward_width} has no effect: no layer is dense; set "
            "model.dense_layers or model.moe_every, or remove it",
        )
        require(
            self.run.stop_after <= self.training.steps,
            f"run.stop_after = {self.run.stop_after}: must be at most training.steps = {self.training.steps}",
        )

    def layout(self, world: int = 1) -> Layout:
        """How the run is spread over so many processes.

        Raises:
            ConfigError: if it cannot be; names what would work.
        """
        layout = Layout.of(self.parallel, world)
        check_parallel(self.parallel, layout, self.model, self.moe, self.training.sequence_length)
        self.micro_batch_sequences(layout)
        return layout

    def micro_batch_sequences(self, layout: Layout) -> int:
        """Sequences of one pass of a process: `training.micro_batch_sequences`, or as many as the layout allows."""
        training, group = self.training, self.moe.group_sequences if self.moe.is_moe else 1
        return micro_batch_sequences(
            self.parallel,
            layout,
            self.moe,
            training.batch_sequences,
            training.micro_batch_sequences,
            group,
            training.sequence_length,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.training.batch_sequences * self.training.sequence_length

    @property
    def threshold_step(self) -> int:
        """First step (from 0) that trains under threshold routing; training.steps where none does."""
        if self.moe.router == "threshold":
            return 0
        if "threshold_after" in ROUTERS[self.moe.router].reads:
            return round(self.training.steps * self.moe.threshold_after)
        return self.training.steps

    @property
    def training_router_leaks(self) -> bool:
        """Whether, before `threshold_step`, a token's routing can depend on later tokens of its sequence."""
        return not self.moe.causal_in_training
