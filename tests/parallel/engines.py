"""Engines of small jobs, for tests that look between the parts of a step or plant something in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from data.batches import Batch
from moe.routing import RoutingContext
from parallel.engine import Engine
from parallel.pipeline import MicroBatch
from parallel.shards import specialize
from tests.parallel import layouts
from tests.parallel.layouts import MODEL, Part, differences, parts_of
from training.build import build_engine
from training.config import Config
from training.optimizer import build_optimizer
from training.step import train_step

Hook = Callable[[Engine, int], None]


def build(config: Config, world: int = 1, dtype: torch.dtype = torch.float32) -> Engine:
    """This process' part of a job; all processes call it together."""
    return build_engine(config, world, torch.device("cpu"), dtype)


def batch_of(labels: Sequence[int], length: int, seed: int = 0) -> Batch:
    """Random rows, of which so many labels count."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(1, MODEL["vocabulary_size"], (len(labels), length + 1), generator=generator)
    label_BS = window[:, 1:].clone()
    for row, count in enumerate(labels):
        label_BS[row, count:] = -100
    return Batch(window[:, :-1].contiguous(), label_BS, torch.zeros(len(labels), dtype=torch.int64))


def share(engine: Engine, batch: Batch) -> Batch:
    """This process' rows of a global batch."""
    mine = engine.mesh.own_rows(batch.token_BS.shape[0])
    return Batch(*(None if values is None else values[mine] for values in batch))


def micro_batches(batch: Batch, rows: int, **context: Any) -> list[MicroBatch]:
    """Passes over a process' rows in training, each of so many."""
    parts = [[None if v is None else v[n : n + rows] for v in batch] for n in range(0, len(batch.token_BS), rows)]
    made = []
    for token_BS, label_BS, _, valid_BS in parts:
        assert token_BS is not None and label_BS is not None
        told = RoutingContext(*token_BS.shape, valid_BS=valid_BS, mode="train", **context)
        made.append(MicroBatch(told, token_BS, label_BS))
    return made


def train_on(
    config: Config,
    world: int,
    batches: list[Batch],
    adam: bool = False,
    before: Hook | None = None,
    after_backward: Hook | None = None,
    after: Hook | None = None,
) -> Part:
    """A job over given global batches; called on every process together.

    Args:
        config: of the job.
        world: its number of processes.
        batches: one a step.
        adam: the job's own AdamW in place of plain SGD, which hides no constant factor.
        before: called before every step.
        after_backward: called when gradients are this process' parts.
        after: called after every step.
    """
    engine = build(config, world)
    optimizer: torch.optim.Optimizer = (
        build_optimizer(engine, config.training)
        if adam
        else torch.optim.SGD([h.parameter for h in engine.held], lr=0.1, foreach=False)
    )
    gradients: list[dict[str, Any]] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(parts_of(engine, lambda p: p.grad)))
    finish, step = engine.finish_gradients, 0

    def finish_gradients() -> float:
        if after_backward is not None:
            after_backward(engine, step)
        return finish()

    results = []
    with mock.patch.object(engine, "finish_gradients", finish_gradients):
        for step, batch in enumerate(batches):
            if before is not None:
                before(engine, step)
            results.append(train_step(engine, optimizer, share(engine, batch), config, step, 0))
            if after is not None:
                after(engine, step)
    state = {n: b.numpy().copy() for m in engine.models for n, b in m.named_buffers()}
    shapes = {h.name: tuple(h.parameter.shape) for h in engine.held}
    return Part(gradients, parts_of(engine, lambda p: p), results, [{} for _ in batches], state, shapes)


def assert_same(reference: Part, parts: list[Part], limit: float = 1e-5) -> None:
    """Losses, gradients, norms and weights of one process; wrong scales are named with their factor."""
    with mock.patch.object(layouts, "STEPS", len(reference.results)):
        wrong = differences([reference], parts, limit)
    assert not wrong, "\n".join([*wrong[:12], f"{len(wrong)} differences in all"])


def plant_gradient(engine: Engine, gradient: float) -> None:
    """Make the gradient of a micro-batch's loss 0, but that of the embedding, or its copy, a constant here.

    The loss is the constant times the sum of the embedding's weights on the first and the last stage, and goes through
    the whole model: every collective and hook does what it does in training.
    """
    for model in engine.models:
        forward = type(model).forward

        def planted(self: Any, *args: Any, forward: Any = forward, **given: Any) -> Tensor:
            out = forward(self, *args, **given) * 0.0
            first = torch.zeros_like(out)
            first.view(-1)[0] = 1.0
            if given.get("hidden_BSD") is not None:
                out = out + first * given["hidden_BSD"][0, 0, 0]
            return out if self.embedding is None else out + first * (self.embedding.weight * gradient).sum()

        specialize(model, {"forward": planted})


def plain(config: Config) -> Config:
    """The job in one process, all rows at once."""
    training = dataclasses.replace(config.training, micro_batch_sequences=0)
    return dataclasses.replace(config, parallel=type(config.parallel)(), training=training)
