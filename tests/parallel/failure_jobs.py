"""What each process does in `test_known_failures.py`; the pool calls these on all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from data.batches import Batch
from moe.modules import FeedForward
from moe.routers.loss_free import LossFreeRouter
from parallel.collectives import Exchange, gather_sequence, scatter_sequence
from parallel.config import Layout
from parallel.engine import Engine
from parallel.gradients import Held, clip_gradients, gradient_norm, sum_gradients
from parallel.ledger import Ledger
from parallel.mesh import Mesh
from parallel.shards import local_gradient, local_part, split_parameter
from parallel.tensor import vocabulary_losses, vocabulary_part
from tests.parallel.layouts import LENGTH, ROWS, make_batch
from training.config import Config, TrainingConfig
from training.optimizer import build_optimizer
from training.step import NonFiniteGradient, train_step


def build(config: Config, world: int, rows: int = ROWS) -> Engine:
    """The small job's engine."""
    layout = config.layout(world)
    micro = config.micro_batch_sequences(layout)
    count = rows // layout.data // micro
    cpu, fp32 = torch.device("cpu"), torch.float32
    args = (config.model, config.moe, config.parallel, layout, config.run.seed, cpu, fp32, micro, count, LENGTH)
    return Engine.build(*args)


def own_rows(engine: Engine, batch: Batch) -> Batch:
    """This process' part of a global batch."""
    own = len(batch.token_BS) // engine.mesh.layout.data
    mine = slice(engine.mesh.data * own, (engine.mesh.data + 1) * own)
    return Batch(*(None if part is None else part[mine] for part in batch))


def starve_in_turn(config: Config) -> list[list[float]]:
    """Five steps, all tokens to the first or the last expert: gradient norms of the experts here, by step."""
    engine, norms = build(config, dist.get_world_size()), []
    optimizer = torch.optim.SGD([h.parameter for h in engine.held], lr=0.1, foreach=False)

    def look(*_: Any) -> None:
        experts = [h.parameter for h in engine.held if h.name.endswith("w13_E2FD")]
        assert all(parameter.grad is not None for parameter in experts)
        norms.append([local_part(parameter.grad).norm().item() for parameter in experts])

    optimizer.register_step_pre_hook(look)
    for step in range(5):
        for layer in (layer for model in engine.models for layer in model.moe_layers()):
            assert isinstance(layer.router, LossFreeRouter)
            layer.router.bias_E.fill_(-100.0)[0 if step % 2 == 0 else -1] = 100.0
        train_step(engine, optimizer, own_rows(engine, make_batch(3, step)), config, min(step, 2), 0)
    return norms


def exchange(sends: list[list[int]], dtype: torch.dtype, strided: bool = False) -> tuple[Any, Any]:
    """Rows that say where they come from and go to; what arrived, and the gradient of its sum."""
    rank, world = dist.get_rank(), dist.get_world_size()
    send, receive = sends[rank], [row[rank] for row in sends]
    rows = torch.cat([torch.full((n, 2), 10 * rank + to) for to, n in enumerate(send)]).to(dtype)
    rows = rows.t().contiguous().t() if strided else rows
    if dtype.is_floating_point:
        rows.requires_grad_()
    mesh = Mesh(Layout(world, 1, world, 1, 1, world, 1))
    link = Exchange(mesh.dispatch_group or dist.group.WORLD, send, receive)
    arrived = link.finish(link.start(rows))
    gradient = None
    if dtype.is_floating_point:
        (gradient,) = torch.autograd.grad(arrived.sum(), rows)  # expanded: its strides are 0
        gradient = gradient.float().numpy()
    return arrived.detach().float().numpy(), gradient


def round_trip() -> bool:
    """Rows sent away and back are the same bits."""
    rank = dist.get_rank()
    sends = [[3, 1], [0, 4]]
    send, receive = sends[rank], [row[rank] for row in sends]
    rows = torch.randn(sum(send), 5)
    there, back = Exchange(dist.group.WORLD, send, receive), Exchange(dist.group.WORLD, receive, send)
    return torch.equal(back.finish(back.start(there.finish(there.start(rows)))), rows)


def bad_splits() -> str:
    """Refused before anything is sent, on every process."""
    try:
        Exchange(dist.group.WORLD, [3, 1], [3, 1]).start(torch.randn(5, 2))
    except ValueError as error:
        return str(error)
    return "accepted"


def collective_sequences(config: Config) -> dict[str, list[str]]:
    """Kinds and groups of all collectives of fifty routings of token choice: 17 steps of three layers."""
    engine = build(config, dist.get_world_size())
    optimizer = torch.optim.SGD([h.parameter for h in engine.held], lr=0.1, foreach=False)
    with Ledger() as ledger:
        for step in range(17):
            train_step(engine, optimizer, own_rows(engine, make_batch(step, 0)), config, 0, 0)
    return ledger.sequence()


class Constant(nn.Module):
    """A layer of constants: routed part 1, shared part 10."""

    def __init__(self, tensor: int) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Every process has its part of both."""
        return torch.full_like(x_BSD, (1.0 + 10.0) / self.tensor)


def constants() -> float:
    """Residual 100, routed 1, shared 10, under tensor parallelism with the sequence split."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    residual_BSD = torch.full((1, 1, 4), 100.0)
    part_BSD = Constant(world)(gather_sequence(torch.ones(1, 1, 4), mesh))
    return (residual_BSD + scatter_sequence(part_BSD, mesh)).unique().item()


def split_feed_forward() -> float:
    """A shared expert split over its width, against the whole: the largest relative difference, gradients included."""
    torch.manual_seed(3)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    whole, part = FeedForward(6, 8), FeedForward(6, 8)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    part.load_state_dict(whole.state_dict())
    from torch.distributed.tensor import Shard

    for projection, dim in ((part.gate, 0), (part.up, 0), (part.down, 1)):
        split_parameter(projection, "weight", mesh, [Shard(dim)])
    x_BSD = torch.randn(2, 2 * world, 6)
    mine = x_BSD.chunk(world, 1)[dist.get_rank()].clone().requires_grad_()
    x_BSD.requires_grad_()
    y_BSD = whole(x_BSD)
    (y_BSD.sin().sum()).backward()
    out = scatter_sequence(part(gather_sequence(mine, mesh)), mesh)
    out.sin().sum().backward()
    pairs = [(out, y_BSD.chunk(world, 1)[dist.get_rank()]), (mine.grad, x_BSD.grad.chunk(world, 1)[dist.get_rank()])]
    for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
        grad = getattr(whole, name).weight.grad.chunk(world, dim)[dist.get_rank()]
        pairs.append((local_gradient(getattr(part, name).weight), grad))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def vocabulary(size: int, scale: float) -> tuple[np.ndarray, float, float]:
    """Losses of a split vocabulary, and how far they and their gradients are from those of the whole one."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(1, 6, size, generator=generator) * scale).requires_grad_()
    label = torch.tensor([[0, size // 2 - 1, size // 2, size - 1, -100, 7]])
    start, end = vocabulary_part(size, mesh)
    mine = logits.detach()[..., start:end].clone().requires_grad_()
    weight = torch.tensor([[1.0, 2.0, 0.5, 3.0, 4.0, 1.5]])
    losses = vocabulary_losses(mine, label, start, dist.group.WORLD)
    (losses * weight).sum().backward()
    whole = F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none").view_as(label)
    (whole * weight).sum().backward()
    assert rank in range(world)
    error = (mine.grad - logits.grad[..., start:end]).abs().max().item()
    return losses.detach().numpy(), (losses - whole).abs().max().item(), error


def norm_by_hand(case: str) -> tuple[float, list[float], list[float]]:
    """Norms of gradients given by hand: (norm, gradients after clipping to 1)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(Layout(world, 1, world, 1, 1, world, 1))

    def held(name: str, values: list[float] | None, counts: bool) -> Held:
        parameter = nn.Parameter(torch.zeros(len(values or [0.0])))
        parameter.grad = None if values is None else torch.tensor(values)
        return Held(name, parameter, None, counts, False)

    dense = {"experts only": [0.0, 0.0], "no gradient": [0.0, 0.0], "3 and 4": [3.0, 0.0]}[case]
    expert = {
        "experts only": ([2.0, 4.0], [6.0, 8.0]),
        "no gradient": ([2.0, 4.0], None),
        "3 and 4": ([4.0], [0.0]),
    }[case][rank]
    # Dense gradients are the same on both, so one counts them; each expert is on one process only.
    everything = [held("dense", dense, rank == 0), held("expert", expert, True)]
    norm = gradient_norm(everything, mesh)
    clip_gradients(everything, norm, 1.0)
    return norm, everything[0].parameter.grad.tolist(), local_gradient(everything[1].parameter).tolist()


def tied_gradient() -> list[float]:
    """Four processes, PP2 x DP2, with gradients 1, 3 on the first stage and 5, 7 on the last; the mean over data."""
    rank = dist.get_rank()
    mesh = Mesh(Layout(4, 2, 2, 1, 1, 1, 1))
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), [1.0, 3.0, 5.0, 7.0][rank]) / 2  # the loss divides by the whole batch
    held = [Held("embedding.weight", parameter, mesh.data_group, True, False)]
    sum_gradients(held)
    dist.all_reduce(parameter.grad, group=mesh.ends_group)
    return parameter.grad.tolist()


def tied_copies(config: Config) -> tuple[np.ndarray | None, int, list[float]]:
    """Ten steps of AdamW: this process' embedding (whole), parameters of the model, and the norms."""
    engine = build(config, dist.get_world_size())
    optimizer = build_optimizer(engine, TrainingConfig(weight_decay=0.1))
    norms = [
        train_step(engine, optimizer, own_rows(engine, make_batch(9, step)), config, min(step, 2), 0).gradient_norm
        for step in range(10)
    ]
    table = next((h.parameter for h in engine.held if h.name == "embedding.weight"), None)
    if table is not None:
        table = table.detach()
        table = (table.full_tensor() if hasattr(table, "full_tensor") else table).numpy().copy()
    return table, engine.parameter_counts()[0], norms


def bad_gradient(config: Config, where: str) -> dict[str, Any]:
    """Five steps, the fourth with an infinite gradient on rank 1: what was skipped, weights, and what AdamW counted."""
    engine = build(config, dist.get_world_size())
    optimizer = build_optimizer(engine, config.training)
    skipped, rates = [], []
    for step in range(5):
        finish = engine.finish_gradients
        if step == 3 and dist.get_rank() == 1:
            engine.finish_gradients = lambda add_up=finish: poison(engine, where) or add_up()  # type: ignore[method-assign]
        before = [local_part(h.parameter).clone() for h in engine.held]
        try:
            train_step(engine, optimizer, own_rows(engine, make_batch(4, step)), config, min(step, 2), 0)
        except NonFiniteGradient as error:
            skipped.append((step, str(error)[:40]))
            assert all(torch.equal(a, local_part(h.parameter)) for a, h in zip(before, engine.held, strict=True))
            assert all(h.parameter.grad is None for h in engine.held)
        rates.append(optimizer.param_groups[0]["lr"])
        engine.finish_gradients = finish  # type: ignore[method-assign]
    counts = {int(entry["step"].item()) for entry in optimizer.state.values()}
    weights = {h.name: local_part(h.parameter).detach().numpy().copy() for h in engine.held}
    return {"skipped": skipped, "rates": rates, "counts": counts, "weights": weights}


def poison(engine: Engine, where: str) -> None:
    """Make one gradient of this process infinite, before processes add theirs up."""
    victim = next(h.parameter for h in engine.held if h.name.endswith(where))
    local_gradient(victim).view(-1)[0] = torch.inf


def decays(config: Config) -> dict[str, float]:
    """The weight decay of every parameter here, and that each is in one group."""
    engine = build(config, dist.get_world_size())
    optimizer = build_optimizer(engine, TrainingConfig(weight_decay=0.1))
    found: dict[int, float] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert id(parameter) not in found
            found[id(parameter)] = group["weight_decay"]
    return {h.name: found[id(h.parameter)] for h in engine.held}


def decayed_ones(config: Config) -> dict[str, float]:
    """All values 1, no gradient, one step of AdamW with rate and decay 0.1: what they are then."""
    engine = build(config, dist.get_world_size())
    optimizer = build_optimizer(engine, TrainingConfig(weight_decay=0.1, learning_rate=0.1))
    with torch.no_grad():
        for h in engine.held:
            local_part(h.parameter).fill_(1.0)
            local_gradient(h.parameter)
    optimizer.step()
    return {h.name: local_part(h.parameter).unique().item() for h in engine.held if local_part(h.parameter).numel()}
