"""Gradients of a step: summed where processes hold the same parameter, their norm, and clipping.

A parameter is held by several processes along some axes, and each of them has a part of its gradient. Which groups to
sum over, and which process counts it in the norm, is said here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.layer import Experts
from moe.model import Transformer
from parallel.collectives import add_up
from parallel.mesh import Group, Mesh
from parallel.shards import local_gradient, mesh_axes

PIECE = 1 << 16  # elements whose squares are added up in fp32
BUCKET = 1 << 24  # gradient elements of one all-reduce: 64 MiB in fp32


@dataclass
class Held:
    """A parameter, and who else holds it.

    Attributes:
        name: in the whole model.
        parameter: this process' part.
        sum_over: group whose gradients add up, when backward is done; None where this one's is whole.
        counts: whether this process counts it in the norm; exactly one of those with the same part does.
        tied: a copy on the last stage of the first one's embedding.
    """

    name: str
    parameter: nn.Parameter
    sum_over: Group | None
    counts: bool
    tied: bool


def held_parameters(models: list[Transformer], mesh: Mesh) -> list[Held]:
    """Every trainable parameter of the stages of this process; what FSDP2 shards, it also adds up."""
    found = []
    for model in models:
        experts = {id(p) for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            tied = name == "embedding.weight" and not model.is_first
            axes = mesh_axes(parameter)
            by_fsdp = bool(axes & {"dp_shard", "edp_shard"})
            if id(parameter) in experts:
                group = None if by_fsdp else mesh.expert_data_group
                counts = (mesh.expert_replica if by_fsdp else mesh.expert_data) == 0
            else:
                split = "tp" in axes
                if by_fsdp:
                    group = None if split else mesh.tensor_group
                else:
                    group = mesh.data_group if split else mesh.stage_group
                counts = (mesh.replica if by_fsdp else mesh.data) == 0 and (split or mesh.tensor == 0)
            found.append(Held(name, parameter, group, counts and not tied, tied))
    return found


def sum_gradients(held: list[Held]) -> None:
    """Add up what backward left on the processes that hold the same part; in buckets, in the same order on all."""
    groups = dict.fromkeys(h.sum_over for h in held if h.sum_over is not None)
    for group in groups:
        for bucket in _buckets([local_gradient(h.parameter) for h in held if h.sum_over is group]):
            add_up(bucket, group)


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.numel() > BUCKET or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel()
    if bucket:
        yield bucket


def gradient_norm(held: list[Held], mesh: Mesh) -> float:
    """L2 norm over all parameters of the whole model, each element counted once; the same number on every process.

    Not finite if any gradient anywhere is not.
    """
    counted = [local_gradient(h.parameter) for h in held if h.counts]
    device = counted[0].device if counted else local_gradient(held[0].parameter).device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    # fp32 norms of millions of elements at once are off by 3e-5 on CPU; of pieces, added up in fp64, by 1e-7.
    pieces = [piece for gradient in counted for piece in gradient.reshape(-1).split(PIECE)]
    if pieces:
        squares += torch.stack(torch._foreach_norm(pieces)).double().square().sum()
    if mesh.world_group is not None:
        dist.all_reduce(squares, group=mesh.world_group)
    return math.sqrt(value) if (value := squares.item()) >= 0 else math.nan


def clip_gradients(held: list[Held], norm: float, most: float) -> None:
    """Scale all gradients so that their norm is at most `most`."""
    # Most steps need no clipping, and scaling by 1 would still touch every gradient.
    if most and norm > most:
        torch._foreach_mul_([local_gradient(h.parameter) for h in held], most / norm)
