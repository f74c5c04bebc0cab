"""Activation recompute: forward passes that are done again in backward instead of being kept."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from moe.model import Transformer
from parallel.config import ParallelConfig
from parallel.shards import specialize


def recompute(model: Transformer, parallel: ParallelConfig) -> None:
    """Recompute whole blocks, or the named parts of each. Routing decisions are replayed, see `RoutingContext`."""
    if parallel.recompute == "none":
        return
    for block in model.blocks.values():
        parts = [block]
        if parallel.recompute == "selective":
            parts = [getattr(block, name) for name in parallel.recompute_modules]
        for module in parts:
            _recompute(module)


def _recompute(module: nn.Module) -> None:
    forward = type(module).forward

    def recomputed(self: nn.Module, *args: Any) -> Any:
        # There is no dropout, and noise is a function of the step: no random state needs keeping.
        return checkpoint(forward, self, *args, use_reentrant=False, preserve_rng_state=False)

    specialize(module, {"forward": recomputed})
