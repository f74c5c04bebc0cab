"""Bytes that a process sends in a training step, from shapes alone: the formulas that measurements are held against.

Conventions, for a group of n processes (as in rings): an all-gather sends its input to n - 1 others, a reduce-scatter
(n - 1)/n of its input, an all-reduce twice that, an all-to-all what is not for itself. With expert choice, whose
exchanges have static sizes; token choice sends what its routing says, and its counts.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from moe.auxiliary import LOSSES
from moe.layer import MoELayer
from moe.modules import RMSNorm
from moe.routers.base import Router
from parallel.config import V_SHAPED
from parallel.engine import Engine
from parallel.mesh import Group, group_size
from parallel.shards import local_part, mesh_axes

Traffic = dict[str, dict[str, float]]  # kind of collective, what for: bytes


def step_traffic(engine: Engine, rows: int, micro_batches: int, length: int) -> Traffic:
    """What this process sends in one step of expert choice without recompute.

    Args:
        engine: this process' part.
        rows: sequences B of a micro-batch.
        micro_batches: passes of a step.
        length: tokens S of a sequence.
    """
    traffic: Traffic = {}

    def add(kind: str, what: str, amount: float) -> None:
        if amount:
            found = traffic.setdefault(kind, {})
            found[what] = found.get(what, 0.0) + amount

    tokens = rows * length
    for kind, what, amount in (
        *_expert(engine, tokens),
        *_tensor(engine, tokens),
        *_pipeline(engine, tokens),
    ):
        add(kind, what, amount * micro_batches)
    for kind, what, amount in (*_zero(engine, micro_batches), *_gradients(engine), *_small(engine)):
        add(kind, what, amount)
    return traffic


def _expert(engine: Engine, tokens: int) -> list[tuple[str, str, float]]:
    """4 x tokens x c x D x bytes x (n - 1)/n a mixture layer: there and back, forward and backward.

    Tensor-parallel processes share the rows; slices of experts in other data-parallel parts each get a copy.
    """
    mesh, width = engine.mesh, engine.config.width
    slots = tokens * engine.moe_config.assignments_per_token / mesh.shares * mesh.slice_copies
    per_layer = 4 * slots * width * _activation_bytes(engine) * _others(mesh.dispatch_group)
    layers = sum(isinstance(module, MoELayer) for model in engine.models for module in model.modules())
    return [("all_to_all", "tokens to experts and back", layers * per_layer)]


def _tensor(engine: Engine, tokens: int) -> list[tuple[str, str, float]]:
    """Before attention and feed-forward a gather, after each a scatter; in backward the reverse of both.

    The embedding scatters in its weights' type, which is fp32 or what FSDP2 gathers them in; the head gathers. Three
    fp32 numbers a token make the loss of a split vocabulary (largest logit, sum, label's logit), and two each way a
    norm over a split width.
    """
    mesh, width = engine.mesh, engine.config.width
    n = group_size(mesh.tensor_group)
    if n == 1:
        return []
    whole = tokens * width * (n - 1) / n  # what a gather sends of shards, and a scatter of wholes
    size = _activation_bytes(engine)
    found = []
    for model in engine.models:
        blocks = len(model.blocks)
        passes = 4 * blocks + model.is_last
        ends = 0.0
        if model.is_first:
            assert model.embedding is not None
            ends = whole * (size if "dp_shard" in mesh_axes(model.embedding.weight) else 4)
        found += [
            ("all_gather", "sequence", passes * whole * size + ends),
            ("reduce_scatter", "sequence", passes * whole * size + ends),
            ("all_reduce", "split vocabulary", 2 * 3 * 4 * tokens * (n - 1) / n * model.is_last),
        ]
        norms = sum(
            isinstance(norm, RMSNorm) and engine.config.qk_norm == "width"
            for block in model.blocks.values()
            for norm in (block.attention.query_norm, block.attention.key_norm)  # type: ignore[union-attr]
        )
        found.append(("all_reduce", "norms over a split width", norms * 2 * 2 * 4 * tokens * (n - 1) / n))
    return found


def _pipeline(engine: Engine, tokens: int) -> list[tuple[str, str, float]]:
    """Activations to the next stage and gradients to the one before, where another process holds it."""
    if engine.pipeline is None:
        return []
    per_boundary = tokens / engine.mesh.layout.tensor * engine.config.width * _activation_bytes(engine)
    holder, count = engine.pipeline.holder, engine.pipeline.count
    boundaries = 0
    for number in engine.stages:
        boundaries += number + 1 < count and holder[number + 1] != holder[number]
        boundaries += number > 0 and holder[number - 1] != holder[number]
    return [("send", "activations and their gradients", boundaries * per_boundary)]


def _zero(engine: Engine, micro_batches: int) -> list[tuple[str, str, float]]:
    """Parameters gathered once a step in the compute type, or twice a pass (stage 3); gradients scattered in fp32.

    A pipeline reduces once a step, and keeps what one backward pass gathered for the next pass: under stage 3 that is
    one gather a pass and one more. With replicas, the shards of gradients are added up among those.
    """
    zero, mesh = engine.parallel.zero, engine.mesh
    if not zero:
        return []
    passes = 2 * micro_batches if engine.pipeline is None else micro_batches + 1
    gathers = passes if zero == 3 else 1
    scatters = micro_batches if zero > 1 and engine.pipeline is None else 1
    found = []
    routers = {
        id(p) for model in engine.models for m in model.modules() if isinstance(m, Router) for p in m.parameters()
    }
    for held in engine.held:
        parameter = held.parameter
        name = next((axis for axis in ("dp_shard", "edp_shard") if axis in mesh_axes(parameter)), None)
        if name is None:
            continue
        layout = mesh.layout
        shards, replicas = {
            "dp_shard": (layout.data // layout.replicate, layout.replicate),
            "edp_shard": (layout.expert_data // layout.expert_replicate, layout.expert_replicate),
        }[name]
        part = _padded_shard(parameter, shards, name)
        size = 4 if id(parameter) in routers else _activation_bytes(engine)
        found.append(("all_gather", "parameters", gathers * part * size * (shards - 1)))
        found.append(("reduce_scatter", "gradients", scatters * part * 4 * (shards - 1)))
        found.append(("all_reduce", "gradients of replicas", scatters * part * 4 * 2 * (replicas - 1) / replicas))
    return found


def _gradients(engine: Engine) -> list[tuple[str, str, float]]:
    """Gradients that FSDP2 does not add up, in fp32, once a step; tied ones between both ends."""
    found = []
    for held in engine.held:
        local = local_part(held.parameter)
        found.append(("all_reduce", "gradients", 2 * 4 * local.numel() * _others(held.sum_over)))
        ends = engine.mesh.ends_group if engine.parallel.schedule not in V_SHAPED else None
        if engine.pipeline is not None and held.name == "embedding.weight" and engine.config.tie_embeddings:
            found.append(("all_reduce", "tied gradients", 2 * 4 * local.numel() * _others(ends)))
    return found


def _small(engine: Engine) -> list[tuple[str, str, float]]:
    """Labels, norm and measured values in 8 bytes each, and the routers' records in fp64."""
    mesh, moe = engine.mesh, engine.moe_config
    routers = [layer.router for model in engine.models for layer in model.moe_layers()]
    records = sum(buffer.numel() for router in routers for buffer in router.step_buffers())
    return [
        ("all_reduce", "labels", 2 * 8 * _others(mesh.data_group)),
        ("all_reduce", "norm and measured values", 2 * 8 * (3 + 2 * len(LOSSES)) * _others(mesh.world_group)),
        ("all_reduce", "routers' records", 2 * 8 * records * _others(mesh.data_group)),
        ("all_reduce", "sparsity of all stages", 2 * 8 * (moe.router == "remoe") * _others(mesh.pipeline_group)),
    ]


def _padded_shard(parameter: Tensor, shards: int, axis: str) -> float:
    """Elements of one of the equal parts that FSDP2 makes of what this process holds with its shard group."""
    assert isinstance(parameter, DTensor)
    names, elements = parameter.device_mesh.mesh_dim_names or (), 1.0
    for dim, size in enumerate(parameter.shape):
        parts = 1
        for name, placement, count in zip(names, parameter.placements, parameter.device_mesh.shape, strict=True):
            if getattr(placement, "dim", None) == dim and name != axis:
                parts *= count
        local = parameter.to_local().shape[dim] if parts > 1 and size % parts else size // parts
        sharded = any(
            n == axis and getattr(p, "dim", None) == dim for n, p in zip(names, parameter.placements, strict=True)
        )
        elements *= -(-local // shards) if sharded else local
    return elements


def _others(group: Group | None) -> float:
    """(n - 1)/n."""
    n = group_size(group)
    return (n - 1) / n


def _activation_bytes(engine: Engine) -> int:
    return engine.compute_dtype.itemsize
