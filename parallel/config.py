"""How a run is spread over processes: the `[parallel]` section, and the layout that follows from it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from moe.config import ConfigError, ModelConfig, MoEConfig, divisors, require, require_positive

Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
# Schedules by how a rank's stages lie: one a rank; several, dealt round; two, down and up again.
ONE_STAGE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
RECOMPUTABLE = ("attention_norm", "attention", "feed_forward_norm", "feed_forward")


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism. Attention and experts choose theirs apart; both count the same processes."""

    data: int = 0
    """Copies of the dense layers that read different sequences; 0 takes what the other degrees leave."""
    tensor: int = 1
    """Processes that split attention heads, dense widths, the vocabulary and, between layers, the sequence."""
    pipeline: int = 1
    """Processes that split the layers."""
    expert: int = 1
    """Processes that split the experts. They may span data- and tensor-parallel ones."""
    expert_tensor: int = 1
    """Processes that split the width of each expert."""
    zero: int = 0
    """What data-parallel processes split: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    replicate: int = 1
    """With zero > 0: groups of data-parallel processes that each hold everything (HSDP); it divides `data`."""
    schedule: Schedule = "1F1B"
    """Order of a pipeline's forward and backward passes; see torch.distributed.pipelining."""
    stages_per_rank: int = 2
    """Stages of one rank, for Interleaved1F1B, LoopedBFS and InterleavedZeroBubble."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage, e.g. [5, 7]; empty balances them by their arithmetic."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it: nothing, `recompute_modules` of each block, whole blocks."""
    recompute_modules: tuple[str, ...] = ("feed_forward",)
    """Parts of a block for recompute = "selective"."""

    def __post_init__(self) -> None:
        require(self.data >= 0, f"parallel.data = {self.data}: must be 0 (what the other degrees leave) or more")
        require_positive(
            "parallel",
            tensor=self.tensor,
            pipeline=self.pipeline,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            replicate=self.replicate,
            stages_per_rank=self.stages_per_rank,
        )
        require(0 <= self.zero <= 3, f"parallel.zero = {self.zero}: must be 0, 1, 2 or 3")
        require(
            self.zero > 0 or self.replicate == 1,
            f"parallel.replicate = {self.replicate} has no effect with parallel.zero = 0, where every process holds "
            "everything: set parallel.zero or remove it",
        )
        unknown = [name for name in self.recompute_modules if name not in RECOMPUTABLE]
        require(
            not unknown and bool(self.recompute_modules),
            f"parallel.recompute_modules = {list(self.recompute_modules)}: must name some of {list(RECOMPUTABLE)}",
        )
        if self.pipeline > 1 and self.zero == 2:
            raise ConfigError(
                "parallel.zero = 2 with parallel.pipeline > 1: a pipeline stage reduces gradients once a step whatever "
                "it is told, which is parallel.zero = 1: use that, or 0 where parallel.data is 1"
            )
        if self.pipeline > 1 and self.zero == 3 and self.schedule in SPLIT_BACKWARD:
            raise ConfigError(
                f'parallel.zero = 3 with parallel.schedule = "{self.schedule}": torch returns wrong gradients without '
                "an error where backward is split in two and parameters are given up after forward; use "
                'parallel.zero = 1, or a schedule among "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"'
            )

    @property
    def stages(self) -> int:
        """Stages of the pipeline, over all ranks."""
        if self.schedule in ONE_STAGE or self.pipeline == 1:
            return self.pipeline
        return self.pipeline * (2 if self.schedule in V_SHAPED else self.stages_per_rank)


@dataclass(frozen=True)
class Layout:
    """Degrees that multiply to the number of processes: (pipeline, data, tensor) and (pipeline, edp, expert, etp).

    Process `rank` is `(stage * data + d) * tensor + t` for the dense layers, and for the experts
    `((stage * expert_data + x) * expert + e) * expert_tensor + f`.

    Attributes:
        world: number of processes.
        expert_data: copies of each expert.
        expert_replicate: groups of those that each hold everything (HSDP).
    """

    world: int
    pipeline: int
    data: int
    replicate: int
    tensor: int
    expert: int
    expert_tensor: int

    @property
    def per_stage(self) -> int:
        """Processes of one pipeline rank."""
        return self.world // self.pipeline

    @property
    def expert_data(self) -> int:
        """Copies of each expert."""
        return self.per_stage // (self.expert * self.expert_tensor)

    @property
    def expert_replicate(self) -> int:
        """HSDP groups of the experts: those of the dense layers, where expert parallelism stays within one."""
        return self.replicate if self.expert_data % self.replicate == 0 else 1

    @classmethod
    def of(cls, parallel: ParallelConfig, world: int) -> Layout:
        """Fill in what the configuration leaves open.

        Raises:
            ConfigError: if the degrees do not fit the number of processes; names a layout that would.
        """
        degrees = f"parallel.pipeline = {parallel.pipeline} x parallel.tensor = {parallel.tensor}"
        model_parallel = parallel.pipeline * parallel.tensor
        require(
            world % model_parallel == 0,
            f"{degrees} = {model_parallel} does not divide the number of processes, {world}: start a multiple of "
            f"{model_parallel} processes (torchrun --nproc-per-node), or use {_fitting(world, 'pipeline', 'tensor')}",
        )
        data = parallel.data or world // model_parallel
        require(
            data * model_parallel == world,
            f"parallel.data = {data} x {degrees} = {data * model_parallel}, but {world} processes were started: "
            f"start {data * model_parallel}, or set parallel.data = {world // model_parallel} (0 does so by itself)",
        )
        per_stage, experts = world // parallel.pipeline, parallel.expert * parallel.expert_tensor
        require(
            per_stage % experts == 0,
            f"parallel.expert = {parallel.expert} x parallel.expert_tensor = {parallel.expert_tensor} = {experts} does "
            f"not divide the {per_stage} processes of a pipeline rank: choose parallel.expert among "
            f"{divisors(per_stage)} with parallel.expert_tensor = 1",
        )
        tensor, expert_tensor = parallel.tensor, parallel.expert_tensor
        require(
            tensor % expert_tensor == 0 or expert_tensor % tensor == 0,
            f"parallel.expert_tensor = {expert_tensor} and parallel.tensor = {tensor}: one must divide the other",
        )
        require(
            data % parallel.replicate == 0,
            f"parallel.replicate = {parallel.replicate} does not divide parallel.data = {data}: choose among "
            f"{divisors(data)}",
        )
        layout = cls(world, parallel.pipeline, data, parallel.replicate, tensor, parallel.expert, expert_tensor)
        require(
            parallel.zero == 0 or data > parallel.replicate,
            f"parallel.zero = {parallel.zero} has nothing to split: parallel.data = {data} is parallel.replicate = "
            f"{parallel.replicate}; set parallel.zero = 0, or start more processes",
        )
        return layout


def check_parallel(parallel: ParallelConfig, layout: Layout, model: ModelConfig, moe: MoEConfig, length: int) -> None:
    """Check a layout against the model, before anything is built.

    Args:
        parallel: the section.
        layout: what follows from it.
        model: shape of the model.
        moe: routing and experts.
        length: tokens S of a sequence.

    Raises:
        ConfigError: naming both numbers and what would work.
    """
    _check_tensor(layout, model, moe, length)
    if moe.is_moe:
        _check_experts(layout, moe)
    _check_stages(parallel, layout, model)


def micro_batch_sequences(
    parallel: ParallelConfig, layout: Layout, moe: MoEConfig, batch: int, micro: int, group: int, length: int
) -> int:
    """Sequences of one pass of a process.

    Args:
        parallel: the section.
        layout: what follows from it.
        moe: routing and experts.
        batch: sequences of a global batch.
        micro: what was asked for; 0 for as many as are possible.
        group: sequences of a routing group, which lies within one pass.
        length: tokens S of a sequence.

    Raises:
        ConfigError: if there is no such number; names what would work.
    """
    require(
        batch % (layout.data * group) == 0,
        f"training.batch_sequences = {batch} does not divide into {layout.data} data-parallel parts of whole routing "
        f"groups of {group} sequences: make it a multiple of {layout.data * group}{_fewer_parts(layout, batch, group)}",
    )
    rows = batch // layout.data
    problems = {n: _micro_batch_problem(parallel, layout, moe, n, rows // n, length) for n in divisors(rows)}
    possible = [n for n, problem in problems.items() if not problem and n % group == 0]
    if micro == 0 and possible:
        return max(possible)
    if micro in possible:
        return micro
    works = f"choose among {possible}" if possible else "raise training.batch_sequences"
    if micro == 0:
        raise ConfigError(
            f"no micro-batch fits the {rows} sequences of a process (training.batch_sequences = {batch} over "
            f"{layout.data}) in routing groups of {group}: {problems[group]}; raise training.batch_sequences"
        )
    why = problems.get(micro) or f"it must divide the {rows} sequences of a process and hold whole groups of {group}"
    raise ConfigError(f"training.micro_batch_sequences = {micro}: {why}; {works}")


def _fewer_parts(layout: Layout, batch: int, group: int) -> str:
    """The advice to start fewer processes, where that helps."""
    each, experts = layout.world // layout.data, layout.expert * layout.expert_tensor
    fitting = [d for d in range(1, layout.data) if batch % (d * group) == 0 and d * layout.tensor % experts == 0]
    return f", or start {max(fitting) * each} processes" if fitting else ""


def _micro_batch_problem(
    parallel: ParallelConfig, layout: Layout, moe: MoEConfig, micro: int, micro_batches: int, length: int
) -> str:
    """Why a micro-batch size cannot be; empty where it can."""
    shares = max(1, layout.tensor // layout.expert_tensor)
    if moe.router in ("expert_choice", "mixture_of_depths") and shares > 1:
        slots = round(micro * length * moe.assignments_per_token / moe.num_experts)
        if slots % shares:
            return (
                f"parallel.tensor / parallel.expert_tensor = {shares} processes share the slots of an expert, and do "
                f"not divide its {slots} in a micro-batch of {micro} sequences"
            )
    if layout.pipeline == 1:
        return ""
    schedule, stages = parallel.schedule, parallel.stages
    fewest = stages if schedule in ("1F1B", "DualPipeV") else 1
    if micro_batches < fewest:
        return (
            f'parallel.schedule = "{schedule}" with {stages} stages needs {fewest} micro-batches, not {micro_batches}'
        )
    rounds = max(1, micro_batches // layout.pipeline)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and micro_batches % rounds:
        return (
            f'parallel.schedule = "{schedule}": {micro_batches} micro-batches do not divide into {rounds} rounds of '
            f"parallel.pipeline = {layout.pipeline}"
        )
    return ""


def _check_tensor(layout: Layout, model: ModelConfig, moe: MoEConfig, length: int) -> None:
    tensor = layout.tensor
    heads = model.resolved_kv_heads
    require(
        heads % tensor == 0,
        f"parallel.tensor = {tensor} does not divide the {heads} key/value heads (model.heads = {model.heads}): choose "
        f"among {divisors(heads)}",
    )
    require(
        length % tensor == 0,
        f"parallel.tensor = {tensor} does not divide training.sequence_length = {length}, which it splits between "
        f"layers: choose among {divisors(length)}",
    )
    part = -(-model.vocabulary_size // tensor)  # rounded up, so that it is the last ones that get less, or nothing
    require(
        part * (tensor - 1) < model.vocabulary_size,
        f"parallel.tensor = {tensor} leaves processes without a part of model.vocabulary_size = "
        f"{model.vocabulary_size}, of which each takes {part}: use parallel.tensor = "
        f"{max(d for d in divisors(tensor) if -(-model.vocabulary_size // d) * (d - 1) < model.vocabulary_size)}",
    )
    widths = {"model.feed_forward_width": model.feed_forward_width, "moe.shared_width": moe.shared_width}
    for key, width in widths.items():
        require(
            not width or width % tensor == 0,
            f"parallel.tensor = {tensor} does not divide {key} = {width}: choose among {divisors(width or 1)}",
        )
    if not moe.is_moe or ((model.dense_layers or model.moe_every > 1) and model.feed_forward_width is None):
        require(
            moe.dense_width % tensor == 0,
            f"parallel.tensor = {tensor} does not divide {moe.dense_width}, the width of a dense feed-forward: choose "
            f"among {divisors(moe.dense_width)}",
        )


def _check_experts(layout: Layout, moe: MoEConfig) -> None:
    require(
        moe.num_experts % layout.expert == 0,
        f"parallel.expert = {layout.expert} does not divide moe.num_experts = {moe.num_experts}: choose among "
        f"{divisors(moe.num_experts)}",
    )
    require(
        moe.expert_width % layout.expert_tensor == 0,
        f"parallel.expert_tensor = {layout.expert_tensor} does not divide moe.expert_width = {moe.expert_width}: "
        f"choose among {divisors(moe.expert_width)}",
    )
    if moe.router == "soft":
        require(
            layout.expert == layout.expert_tensor == layout.tensor == 1,
            'moe.router = "soft" mixes all tokens in every expert, so there is nothing to dispatch: set '
            "parallel.expert, parallel.expert_tensor and parallel.tensor to 1",
        )


def _check_stages(parallel: ParallelConfig, layout: Layout, model: ModelConfig) -> None:
    stages, schedule, cut = parallel.stages, parallel.schedule, parallel.stage_layers
    default = ParallelConfig()
    idle = ["schedule", "stage_layers"] if layout.pipeline == 1 else []
    idle += ["stages_per_rank"] if schedule in ONE_STAGE + V_SHAPED or layout.pipeline == 1 else []
    for key in idle:
        require(
            (value := getattr(parallel, key)) == getattr(default, key),
            f"parallel.{key} = {value!r} has no effect with parallel.pipeline = {layout.pipeline} and "
            f'parallel.schedule = "{schedule}": remove it',
        )
    require(
        stages <= model.layers,
        f'parallel.schedule = "{schedule}" with parallel.pipeline = {layout.pipeline} cuts {stages} stages, and '
        f"model.layers = {model.layers}: use parallel.pipeline = {max(1, model.layers * layout.pipeline // stages)}"
        + ("" if schedule in ONE_STAGE else ', or parallel.schedule = "1F1B"'),
    )
    require(
        not cut or (len(cut) == stages and sum(cut) == model.layers and min(cut) > 0),
        f"parallel.stage_layers = {list(cut)}: must be {stages} numbers above 0 (one a stage) that add up to "
        f"model.layers = {model.layers}; as a flag, --parallel.stage-layers {_even_cut(model.layers, stages)}",
    )


def _even_cut(layers: int, stages: int) -> str:
    return " ".join(str(layers * (n + 1) // stages - layers * n // stages) for n in range(stages))


def _fitting(world: int, first: str, second: str) -> str:
    """Two degrees that divide the number of processes."""
    pairs = [(a, b) for a, b in itertools.product(divisors(world), repeat=2) if a * b <= world and world % (a * b) == 0]
    a, b = max(pairs, key=lambda pair: (min(pair), -max(pair)))
    return f"parallel.{first} = {a} with parallel.{second} = {b}"
