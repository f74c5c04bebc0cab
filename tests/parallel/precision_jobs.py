"""What each process does in `test_precision.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe.modules import RMSNorm
from moe.routers.base import Router
from moe.soft import Slots
from parallel.shards import local_part
from tests.parallel.engines import build, share
from tests.parallel.layouts import make_batch, parts_of
from training.config import Config
from training.optimizer import build_optimizer
from training.step import train_step


def one_step(config: Config, seed: int) -> dict[str, Any]:
    """One step of AdamW in bf16: loss, this process' gradients, and the types that were met."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    engine = build(config, world, torch.bfloat16)
    seen: dict[str, set[str]] = {}

    def note(what: str, tensor: torch.Tensor) -> None:
        seen.setdefault(what, set()).add(str(tensor.dtype).removeprefix("torch."))

    for model in engine.models:
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_pre_hook(lambda m, args: note("router weight", m.weight_ED))
                module.register_forward_hook(lambda m, args, out: note("router logits", out.logits()))
            if isinstance(module, Slots):
                module.register_forward_pre_hook(lambda m, args: note("slots", m.slot_MD))
            if isinstance(module, RMSNorm):
                module.register_forward_hook(lambda m, args, out: note("activations", out))
    optimizer = build_optimizer(engine, config.training)
    gradients: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(parts_of(engine, lambda p: p.grad)))
    result = train_step(engine, optimizer, share(engine, make_batch(seed, 0)), config, 0, 0)
    for h in engine.held:
        note("parameters", h.parameter)
    for entry in optimizer.state.values():
        note("moments", local_part(entry["exp_avg"]))
    shapes = {h.name: tuple(h.parameter.shape) for h in engine.held}
    kinds = {str(piece.dtype) for pieces in gradients[0].values() for _, piece in pieces}
    assert kinds == {str(np.dtype(np.float32))}
    return {"loss": result.loss, "gradients": gradients[0], "shapes": shapes, "seen": seen}
