"""ZeRO (Rajbhandari et al. 2020) as settings of FSDP2, for dense and expert parameters on meshes of their own.

Stage 3 gives parameters up after forward and gathers them again for backward. Stage 2 keeps them through the step and
scatters the gradients of every micro-batch. Stage 1 also keeps whole gradients, which are scattered once a step.
Gradients are sums, never means: the loss is normalised over the whole step already.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from moe.layer import Experts, MoELayer
from moe.model import Transformer
from moe.soft import SoftMoELayer
from parallel.mesh import Mesh


def shard_parameters(stage: nn.Module, model: Transformer, mesh: Mesh, zero: int) -> None:
    """Shard a stage: each block a unit, its experts and, in low precision, its router units of their own.

    Parameters stay fp32 where the optimizer sees them. They are gathered in the compute dtype, gradients are added up
    in fp32. Routers and slots compute in fp32 always, so they are gathered in fp32.

    Args:
        stage: module that the model's forward pass is entered by.
        model: within it.
        mesh: of the job; data parallelism is above 1.
        zero: 1, 2 or 3.
    """
    assert mesh.dense is not None and mesh.sparse is not None
    layout = mesh.layout
    low = model.compute_dtype != torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=model.compute_dtype if low else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    dense = _data_axes(mesh.dense, "dp_replicate", "dp_shard", layout.replicate)
    sparse = _data_axes(mesh.sparse, "edp_replicate", "edp_shard", layout.expert_replicate)
    dense_shards, copies = layout.data // layout.replicate, layout.expert_data // layout.expert_replicate
    reshard = zero == 3
    experts = {p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    shards = {p: copies if p in experts else dense_shards for p in model.parameters()}
    # Held once, or not to be cut evenly: kept whole, and added up like the gradients of unsharded parameters.
    whole = {p for p, count in shards.items() if count == 1 or _dimension_to_shard(p, count) is None}

    def shard(module: nn.Module, axes: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
        fully_shard(
            module,
            mesh=axes,
            mp_policy=precision,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda p: _dimension_to_shard(p, shards[p]),
            ignored_params=whole,
        )

    for block in model.blocks.values():
        feed_forward = block.feed_forward
        if isinstance(feed_forward, MoELayer | SoftMoELayer) and copies > 1:
            shard(feed_forward.experts, sparse, policy)
        if low and isinstance(feed_forward, MoELayer):
            shard(feed_forward.router, dense, exact)
        if low and isinstance(feed_forward, SoftMoELayer):
            shard(feed_forward.slots, dense, exact)
        shard(block, dense, policy)
    shard(stage, dense, policy)
    for unit in units(stage):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales


def units(stage: nn.Module) -> list[FSDPModule]:
    """The FSDP2 modules of a stage, itself first; none where nothing is sharded."""
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def before_micro_batch(stage: nn.Module, zero: int, last: bool) -> None:
    """Say what backward of the next micro-batch does. Under a pipeline, torch says it itself."""
    if isinstance(stage, FSDPModule):
        stage.set_is_last_backward(last)
        stage.set_requires_gradient_sync(last or zero > 1)
        stage.set_reshard_after_backward(last or zero == 3)


def give_up_gathered(stage: nn.Module) -> None:
    """Free gathered parameters, after passes without backward; names give shards again."""
    for unit in units(stage):
        unit.reshard()


def _data_axes(mesh: DeviceMesh, replicate: str, shard: str, replicas: int) -> DeviceMesh:
    return mesh[replicate, shard] if replicas > 1 else mesh[shard]


def _dimension_to_shard(parameter: Tensor, shards: int) -> Shard | None:
    """The first dimension that divides evenly, else the first with padding; None where torch cannot tell the parts.

    A dimension that tensor or expert parallelism has split already must divide evenly: of an uneven part of a part
    torch 2.13 gives wrong places.
    """
    parts = [1] * parameter.dim()  # that the dimension is in already; sizes here may differ by process
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                parts[placement.dim] *= parameter.device_mesh.size(axis)
    for dim, size in enumerate(parameter.shape):
        if size % (parts[dim] * shards) == 0:
            return Shard(dim)
    return None if isinstance(parameter, DTensor) else Shard(0)
