"""What each process does in `test_traffic.py`: one training step under the ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moe.routing import RoutingContext
from parallel.ledger import Ledger
from parallel.traffic import step_traffic
from tests.parallel.engines import build, share
from tests.parallel.layouts import LENGTH, make_batch
from training.config import Config
from training.device import compute_dtype
from training.optimizer import build_optimizer
from training.step import train_step

WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "nonzero", "__int__", "__float__")


def measured_and_predicted(config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes by kind of the second step, when everything is set up: as sent, and by the formulas."""
    dtype = compute_dtype(config.training.precision, torch.device("cpu"))
    engine = build(config, dist.get_world_size(), dtype)
    optimizer = build_optimizer(engine, config.training)
    train_step(engine, optimizer, share(engine, make_batch(1, 0)), config, 0, 0)
    with Ledger() as ledger:
        train_step(engine, optimizer, share(engine, make_batch(1, 1)), config, 1, 0)
    layout = engine.mesh.layout
    rows = config.micro_batch_sequences(layout)
    told = step_traffic(engine, rows, config.training.batch_sequences // layout.data // rows, LENGTH)
    measured = {kind: amount for kind, amount in ledger.bytes_by_kind().items() if amount}
    return measured, {kind: sum(parts.values()) for kind, parts in told.items()}


@contextlib.contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Names of the calls that make the host wait for the device."""
    calls: list[str] = []
    kept = {name: getattr(torch.Tensor, name) for name in WAITS}

    def watch(name: str) -> Any:
        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return kept[name](self, *args, **kwargs)

        return call

    for name in WAITS:
        setattr(torch.Tensor, name, watch(name))
    try:
        yield calls
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)


def layer_collectives(config: Config) -> tuple[list[str], list[str]]:
    """Collectives and waits of one mixture layer's forward and backward."""
    engine = build(config, dist.get_world_size())
    layer = engine.models[0].moe_layers()[0]
    x_BSD = torch.randn(4, LENGTH, engine.config.width, requires_grad=True)
    # Offsets are looked at on a CPU only, and these counts are about GPUs.
    unchecked = mock.patch("moe.kernels.operands.check_offsets")
    with unchecked, Ledger() as ledger, counted_waits() as waits:
        y_BSD = layer(x_BSD, RoutingContext(4, LENGTH, mode="train", step_tokens=32, step_groups=2))
        y_BSD.sum().backward()
    return [str(record) for record in ledger.records], waits
