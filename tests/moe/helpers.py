"""Small layers and models for the tests, and ways to compare them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe.config import ModelConfig, MoEConfig
from moe.initialization import build_model
from moe.layer import MoELayer
from moe.model import Transformer
from moe.routers import build_router
from moe.routers.base import Router
from moe.routing import Decision, Routing, RoutingContext

# Those of `moe.kernels.BACKENDS` that run anywhere; the others need a GPU or a package, and have tests of their own.
CPU_BACKENDS = ("reference", "torch")
SMALL = ModelConfig(vocabulary_size=37, width=24, layers=3, heads=3, kv_heads=1, tie_embeddings=False)


def make_router(width: int = 7, **moe: Any) -> Router:
    """A router with random weights and reset state."""
    router = build_router(MoEConfig(**moe), width)
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    reset(router)
    return router


def make_layer(width: int = 40, **moe: Any) -> MoELayer:
    """A mixture layer with random weights, large enough that every gradient matters."""
    layer = MoELayer(MoEConfig(**moe), width, index=5)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    reset(layer)
    return layer


def make_model(
    seed: int = 3, model: ModelConfig = SMALL, dtype: torch.dtype = torch.float32, **moe: Any
) -> Transformer:
    """A small transformer of unequal sizes: E 6, F 16, unless told otherwise."""
    sizes = {"num_experts": 6, "expert_width": 16, "experts_per_token": 2, "allow_leak": True}
    return build_model(model, MoEConfig(**{**sizes, **moe}), seed=seed, compute_dtype=dtype)


def model_config(**changes: Any) -> ModelConfig:
    """`SMALL` with changes."""
    return replace(SMALL, **changes)


def reset(module: nn.Module) -> None:
    """Fill the routers' state."""
    for child in module.modules():
        if hasattr(child, "reset_buffers"):
            child.reset_buffers()


def calibrate(model: Transformer, batch: int = 6, length: int = 12) -> Transformer:
    """Give threshold routers cutoffs that come from data."""
    token_BS = torch.randint(model.config.vocabulary_size, (batch, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(token_BS, RoutingContext(batch, length, mode="train"))
    model.after_step()
    return model


def routing_from_mask(mask_TE: Tensor, scores_TE: Tensor, logits_TE: Tensor, valid_T: Tensor | None = None) -> Routing:
    """A ragged routing of exactly the pairs of a mask, weighted by their scores."""
    return Routing.from_decision(Decision.from_mask(mask_TE), scores_TE, scores_TE, logits_TE, valid_T)


def select(router: Router, scores_TE: Tensor, context: RoutingContext, logits_TE: Tensor | None = None) -> Routing:
    """Let a router decide on given scores."""
    return router.select(scores_TE, scores_TE.log() if logits_TE is None else logits_TE, context)


def pairs(routing: Routing) -> list[tuple[int, int]]:
    """(token, expert) of every slot in stored order, slots without a valid token included."""
    assert routing.token_A is not None
    return list(zip(routing.token_A.tolist(), routing.expert_A().tolist(), strict=True))


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    """Largest difference as a part of the largest expected value; infinite where anything is not finite."""
    assert actual is not None and expected is not None
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).abs().max().item()
    return difference / max(expected.abs().max().item(), 1e-30) if difference == difference else float("inf")


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient by name; none may be missing."""
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.clone()
    return found
