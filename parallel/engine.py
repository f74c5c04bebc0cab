"""The model as this process holds it: built, split, run forward and backward, and brought up to date together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from moe.config import ModelConfig, MoEConfig
from moe.initialization import initialize, is_expert
from moe.layer import Experts, MoELayer
from moe.model import Transformer, update_routers
from moe.routing import RoutingContext
from parallel import zero as zero_stages
from parallel.collectives import add_up, total
from parallel.config import Layout, ParallelConfig
from parallel.expert import ExpertDispatcher
from parallel.gradients import Held, clip_gradients, gradient_norm, held_parameters, sum_gradients
from parallel.mesh import Mesh, group_size
from parallel.pipeline import MicroBatch, Pipeline, Stage, stage_layers, stages_of
from parallel.recompute import recompute
from parallel.shards import local_gradient, local_part, shard_of, split_parameter
from parallel.tensor import split_tensors


class Engine:
    """One process' part of a training job; in a job of one process, the whole model.

    Attributes:
        mesh: where this process is.
        models: its stages, first to last; one without a pipeline.
        config, moe_config: of the whole model.
    """

    def __init__(self, models: dict[int, Transformer], parallel: ParallelConfig, mesh: Mesh) -> None:
        self.parallel, self.mesh = parallel, mesh
        self.stages = {number: Stage(model) for number, model in models.items()}
        self.models = [stage.model for stage in self.stages.values()]
        self.config, self.moe_config = self.models[0].config, self.models[0].moe_config
        self.pipeline: Pipeline | None = None
        self._split()

    @classmethod
    def around(cls, model: Transformer) -> Engine:
        """A whole model in one process, as it is."""
        return cls({0: model}, ParallelConfig(), Mesh(Layout(1, 1, 1, 1, 1, 1, 1)))

    @classmethod
    def build(
        cls,
        model: ModelConfig,
        moe: MoEConfig,
        parallel: ParallelConfig,
        layout: Layout,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        micro_batches: int,
        length: int,
    ) -> Engine:
        """Build this process' part without memory, split it, and fill what is left.

        Args:
            model: shape of the whole model.
            moe: of the mixture layers.
            parallel: the section of the configuration.
            layout: that follows from it; all processes of the job call this together.
            seed: of the parameters; their values depend on neither layout nor process.
            device: to compute on.
            dtype: of activations and products.
            rows: sequences B of a micro-batch.
            micro_batches: of a process in one step.
            length: tokens S of a sequence.
        """
        mesh = Mesh(layout, device.type)
        cuts = stage_layers(model, moe, parallel, length)
        with torch.device("meta"):
            models = {n: Transformer(model, moe, dtype, cuts[n]) for n in stages_of(mesh.stage, parallel)}
        engine = cls(models, parallel, mesh)
        for stage in engine.stages.values():
            stage.to_empty(device=device)
            initialize(stage.model, seed, shard_of)
        if layout.pipeline > 1:
            engine.pipeline = Pipeline(engine.stages, parallel, mesh, micro_batches, rows, length)
        return engine

    @cached_property
    def held(self) -> list[Held]:
        """This process' parameters, and who else holds them. Getting memory makes new parameters: ask after that."""
        return held_parameters(self.models, self.mesh)

    def _split(self) -> None:
        """Apply the degrees from the inside out: tensor, experts, recompute, ZeRO."""
        mesh, layout = self.mesh, self.mesh.layout
        for stage in self.stages.values():
            model = stage.model
            if layout.tensor > 1:
                assert mesh.dense is not None
                split_tensors(model, mesh.dense["tp"])
            self._split_experts(model)
            recompute(model, self.parallel)
            if self.parallel.zero:
                zero_stages.shard_parameters(stage, model, mesh, self.parallel.zero)

    def _split_experts(self, model: Transformer) -> None:
        mesh, layout = self.mesh, self.mesh.layout
        degrees = {"ep": (layout.expert, Shard(0)), "etp": (layout.expert_tensor, Shard(2))}
        axes = tuple(name for name, (degree, _) in degrees.items() if degree > 1)
        placements = [degrees[name][1] for name in axes]
        for module in model.modules():
            if isinstance(module, Experts) and axes:
                assert mesh.sparse is not None
                for name in ("w13_E2FD", "w2_EDF"):
                    split_parameter(module, name, mesh.sparse[axes], placements)
            if isinstance(module, MoELayer) and (mesh.dispatch_group is not None or mesh.shares > 1):
                module.dispatcher = ExpertDispatcher(mesh)

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return self.models[0].device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of activations and products."""
        return self.models[0].compute_dtype

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks for the job."""
        return self.mesh.rank == 0

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is here."""
        return any(model.is_last for model in self.models)

    def parameter_counts(self) -> tuple[int, int]:
        """See `moe.initialization.parameter_counts`; of the whole model, asked for on all processes together."""
        counted = [h for h in self.held if h.counts]
        every = sum(local_part(h.parameter).numel() for h in counted)
        experts = sum(local_part(h.parameter).numel() for h in counted if is_expert(h.name))
        counts = torch.tensor([every, experts], device=self.device)
        every, experts = total(counts, self.mesh.world_group).tolist()
        moe = self.moe_config
        return every, every - experts + round(experts / moe.num_experts * moe.assignments_per_token)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], labels: Tensor) -> Tensor:
        """All passes of a step; gradients are this process' parts afterwards.

        Args:
            micro_batches: of this process. Their contexts speak of the whole step.
            labels: how many labels the step has, on all processes.

        Returns:
            fp64 scalar: the summed loss of this process' tokens, where it has the last stage; else 0.
        """
        for micro_batch in micro_batches:
            micro_batch.context.replicas = self.mesh.layout.tensor
        stages = list(self.stages.values())
        for stage in stages:
            stage.expect(micro_batches, labels)
        if self.pipeline is not None:
            self.pipeline.step(torch.cat([micro_batch.token_BS for micro_batch in micro_batches]))
        else:
            for number, micro_batch in enumerate(micro_batches):
                last = number == len(micro_batches) - 1
                zero_stages.before_micro_batch(stages[0], self.parallel.zero, last)
                stages[0](micro_batch.token_BS).backward()
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        for stage in stages:
            for losses_BS in stage.losses:
                nats += losses_BS.sum()
            stage.expect(())  # lets go of the step's tensors
        return nats

    def finish_gradients(self) -> float:
        """Add up what processes have parts of; the norm of the whole gradient, the same on all."""
        sum_gradients(self.held)
        self._sum_tied()
        return gradient_norm(self.held, self.mesh)

    def clip(self, norm: float, most: float) -> None:
        """Scale the gradients so that their norm is at most `most`."""
        clip_gradients(self.held, norm, most)

    def _sum_tied(self) -> None:
        """Give the embedding and its copy on the last stage the sum of both gradients."""
        if self.pipeline is None or not self.models[0].config.tie_embeddings:
            return
        gradients = [local_gradient(h.parameter) for h in self.held if h.name == "embedding.weight"]
        if len(gradients) == 2:  # a V-shaped schedule has both here
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        elif gradients:
            assert self.mesh.ends_group is not None
            dist.all_reduce(gradients[0], group=self.mesh.ends_group)

    @torch.no_grad()
    def after_step(self) -> None:
        """Let every router see what the routers of other processes recorded, and update its balance state."""
        routers = [layer.router for model in self.models for layer in model.moe_layers()]
        if self.mesh.data_group is not None:
            # Counts are whole numbers below 2^53, so fp64 adds them exactly.
            add_up([b for router in routers for b in router.step_buffers()], self.mesh.data_group, torch.float64)
        stages = self.mesh.pipeline_group
        update_routers(self.moe_config, routers, None if stages is None else lambda x: total(x.to(self.device), stages))

    def forget_step(self) -> None:
        """Let every router drop what it recorded of a step that is not taken."""
        for model in self.models:
            model.forget_step()

    def sum_over_job(self, values: Tensor) -> Tensor:
        """Add up, over all processes, what each has of the step; tensor-parallel copies count once."""
        return total(values if self.mesh.tensor == 0 else torch.zeros_like(values), self.mesh.world_group)

    @torch.no_grad()
    def __call__(
        self, token_BS: Tensor, context: RoutingContext, document_BS: Tensor | None = None, *, label_BS: Tensor
    ) -> Tensor:
        """fp32 (B, S) losses without gradient, on all processes; the rows are shared out. See `Transformer.forward`.

        Args:
            token_BS: the same on all processes, as are the others.
            context: of all rows; `observe` is not supported in a job of several processes.
            document_BS: document numbers.
            label_BS: ids to predict.
        """
        parts, mine = self.mesh.layout.data, self.mesh.data
        rows, length = token_BS.shape
        each = -(-rows // parts)

        def share(values: Tensor, filler: int) -> Tensor:
            padded = torch.nn.functional.pad(values, (0, 0, 0, each * parts - rows), value=filler)
            return padded[mine * each : (mine + 1) * each]

        valid_BS = context.valid_BS
        if each * parts != rows and valid_BS is None:
            valid_BS = torch.ones_like(token_BS, dtype=torch.bool)
        part = replace(
            context,
            batch=each,
            valid_BS=None if valid_BS is None else share(valid_BS, False),
            first_token=context.first_token + mine * each * length,
            auxiliary={},
            decisions={},
        )
        micro_batch = MicroBatch(
            part, share(token_BS, 0), share(label_BS, -100), None if document_BS is None else share(document_BS, 0)
        )
        for stage in self.stages.values():
            stage.expect([micro_batch])
        losses_BS = torch.zeros(each, length, device=self.device)
        if self.pipeline is not None:
            self.pipeline.forward(each)
        else:
            self.stages[0](micro_batch.token_BS)
        for stage in self.stages.values():
            if stage.losses:
                losses_BS = stage.losses[0]
            zero_stages.give_up_gathered(stage)
        return self._collect(losses_BS)[:rows]

    def _collect(self, losses_BS: Tensor) -> Tensor:
        """From the last stage to all, and from all data-parallel parts, in order."""
        losses_BS = total(losses_BS, self.mesh.pipeline_group)
        if self.mesh.data_group is None:
            return losses_BS
        parts = [torch.empty_like(losses_BS) for _ in range(group_size(self.mesh.data_group))]
        dist.all_gather(parts, losses_BS, group=self.mesh.data_group)
        return torch.cat(parts)
