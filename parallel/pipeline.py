"""Pipeline parallelism on torch.distributed.pipelining: where to cut, the stages, and their schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from moe.config import ModelConfig, MoEConfig
from moe.flops import head_flops, layer_flops
from moe.model import Transformer
from moe.routing import RoutingContext
from parallel.config import ONE_STAGE, V_SHAPED, ParallelConfig
from parallel.mesh import Mesh


@dataclass
class MicroBatch:
    """One pass of a process.

    Attributes:
        context: for the mixture layers; the same object at every stage of this process.
        token_BS: int64 ids, of whole sequences, also where tensor parallelism splits them.
        label_BS: int64 ids, -100 where there is none.
        document_BS: document numbers, or None.
    """

    context: RoutingContext
    token_BS: Tensor
    label_BS: Tensor
    document_BS: Tensor | None = None


class Stage(nn.Module):
    """A part of the model, and the micro-batches it is to work on. With the last part comes the loss.

    Attributes:
        model: the part.
        losses: fp32 (B, S) of each micro-batch that the last part has seen, detached.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        self.losses: list[Tensor] = []
        self._micro_batches: Sequence[MicroBatch] = ()
        self._labels: Tensor | None = None
        self._next = 0

    def expect(self, micro_batches: Sequence[MicroBatch], labels: Tensor | None = None) -> None:
        """Say what comes next.

        Args:
            micro_batches: in order; every schedule brings a stage's forward passes in that order.
            labels: of the whole step; the loss is divided by it.
        """
        self._micro_batches, self._labels, self._next = micro_batches, labels, 0
        self.losses = []

    def forward(self, x: Tensor) -> Tensor:
        """The next micro-batch: token ids or what the stage before hands on, to the next one's input or the loss."""
        micro_batch = self._micro_batches[self._next]
        self._next += 1
        last = self.model.is_last
        out = self.model(
            micro_batch.token_BS,
            micro_batch.context,
            micro_batch.document_BS,
            hidden_BSD=None if self.model.is_first else x,
            label_BS=micro_batch.label_BS if last else None,
        )
        if not last:
            return out
        self.losses.append(out.detach())
        # The step's count, not the micro-batch's: a mean of means weighs tokens unequally.
        return out.sum() / self._labels if self._labels is not None else out.sum()


def stage_layers(model: ModelConfig, moe: MoEConfig, parallel: ParallelConfig, length: int) -> list[range]:
    """Blocks of each stage: as `parallel.stage_layers` says, or so that the busiest stage has the least arithmetic."""
    stages = parallel.stages
    if parallel.stage_layers:
        edges = [sum(parallel.stage_layers[:stage]) for stage in range(stages + 1)]
    else:
        costs = [layer_flops(model, moe, length, layer) for layer in range(model.layers)]
        costs[-1] += head_flops(model)
        edges = _balanced(costs, stages)
    return [range(first, last) for first, last in pairwise(edges)]


def _balanced(costs: list[float], parts: int) -> list[int]:
    """Edges of `parts` runs, none empty, whose largest sum is as small as can be; the earliest such edges."""
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [(sums[end], [0, end]) for end in range(1, count + 1)]  # of one part, ending after 1, 2, ... costs
    for part in range(2, parts + 1):
        best = [
            min(
                (max(best[cut - part + 1][0], sums[end] - sums[cut]), [*best[cut - part + 1][1], end])
                for cut in range(part - 1, end)
            )
            for end in range(part, count + 1)
        ]
    return best[-1][1]


def stages_of(rank: int, parallel: ParallelConfig) -> list[int]:
    """Numbers of the stages that a pipeline rank holds."""
    ranks, stages = parallel.pipeline, parallel.stages
    if ranks == 1 or parallel.schedule in ONE_STAGE:
        return [rank]
    if parallel.schedule in V_SHAPED:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


class Pipeline:
    """The stages of this process, and how they work together with those of others.

    Args:
        stages: by number.
        parallel: schedule.
        mesh: of the job.
        micro_batches: passes of one step.
        rows: sequences B of one pass.
        length: tokens S of a sequence.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        parallel: ParallelConfig,
        mesh: Mesh,
        micro_batches: int,
        rows: int,
        length: int,
    ) -> None:
        self.stages, self.count = stages, parallel.stages
        self.holder = [
            rank
            for number in range(self.count)
            for rank in range(parallel.pipeline)
            if number in stages_of(rank, parallel)
        ]
        group = mesh.pipeline_group
        assert group is not None
        self.group = group
        model = next(iter(stages.values())).model
        self.hidden_shape = (rows, length // mesh.layout.tensor, model.config.width)
        self.dtype, self.device = model.compute_dtype, model.device
        # Told the shapes, torch need not find them out by a forward and backward pass, which the routers would count.
        hidden = torch.empty(self.hidden_shape, dtype=self.dtype, device="meta", requires_grad=True)
        tokens = torch.empty((rows, length), dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        parts = [
            PipelineStage(
                stage,
                number,
                self.count,
                self.device,
                input_args=(tokens if number == 0 else hidden,),
                output_args=(loss if number == self.count - 1 else hidden,),
                group=self.group,
            )
            for number, stage in stages.items()
        ]
        kind = get_schedule_class(parallel.schedule)
        one = parallel.schedule in ONE_STAGE
        # Sums, not means: the loss is normalised over the step, so nothing is to be divided by micro-batches.
        self.schedule: Any = kind(
            parts[0] if one else parts, micro_batches, loss_fn=lambda loss, target: loss, scale_grads=False
        )

    def step(self, token_BS: Tensor) -> None:
        """Forward and backward of all micro-batches, which the stages expect.

        Args:
            token_BS: of all of them; the first stage wants something to cut up.
        """
        first, last = 0 in self.stages, self.count - 1 in self.stages
        inputs = (token_BS,) if first else ()
        self.schedule.step(*inputs, target=token_BS if last else None, return_outputs=False)

    @torch.no_grad()
    def forward(self, rows: int) -> None:
        """One forward pass, which the stages expect, without backward.

        Args:
            rows: sequences B of it.
        """
        shape = (rows, *self.hidden_shape[1:])
        hidden: Tensor | None = None
        for number in range(self.count):
            stage = self.stages.get(number)
            if stage is None:
                continue
            if number > 0 and self.holder[number - 1] != self.holder[number]:
                hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
                dist.recv(hidden, group=self.group, group_src=self.holder[number - 1])
            out = stage(hidden if number else torch.empty(0, device=self.device))
            if number + 1 < self.count and self.holder[number + 1] != self.holder[number]:
                dist.send(out.contiguous(), group=self.group, group_dst=self.holder[number + 1])
            hidden = out
