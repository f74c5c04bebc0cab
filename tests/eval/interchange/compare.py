"""Logits and chosen experts of both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe.model import Transformer
from moe.routing import Routing, RoutingContext

transformers = pytest.importorskip("transformers")


def load(folder: Path, **options: Any) -> Any:
    """As a user loads it; the modelling file of a folder that has one comes from there.

    transformers' plain loop over experts takes any width; its default, torch's grouped products, only whole 16 bytes.
    """
    options = {"experts_implementation": "eager"} | options
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


def tokens(rows: int, length: int, vocabulary: int = 270, seed: int = 0) -> Tensor:
    """int64 (rows, length)."""
    return torch.randint(1, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def ours(model: Transformer, token_BS: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits, and of every mixture layer which experts each token takes, bool (T, E)."""
    chosen: list[Tensor] = []

    def observe(layer: int, routing: Routing) -> None:
        chosen.append(routing.assigned_TE())

    context = RoutingContext(*token_BS.shape, observe=observe)
    return model(token_BS, context), chosen


@torch.no_grad()
def theirs(model: Any, token_BS: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The same of a model of transformers, watched at its routers."""
    chosen: list[Tensor] = []

    def observe(module: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        logits_TE, middle, last = outputs
        if middle.dtype == torch.bool:  # Choir's own: logits, chosen, weights
            chosen.append(middle)
        else:  # logits, weights, indices of the best
            chosen.append(torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, last, True))

    names = ("TopKRouter", "ChoirRouter")
    handles = [m.register_forward_hook(observe) for m in model.modules() if type(m).__name__.endswith(names)]
    logits_BSV = model(token_BS).logits
    for handle in handles:
        handle.remove()
    return logits_BSV, chosen


def assert_same_function(model: Transformer, other: Any, vocabulary: int = 270) -> None:
    """Logits within 1e-5 and the same experts, on odd lengths."""
    for rows, length in ((1, 1), (3, 7), (2, 31)):
        token_BS = tokens(rows, length, vocabulary, seed=length)
        (logits_BSV, chosen), (other_BSV, other_chosen) = ours(model, token_BS), theirs(other, token_BS)
        difference = (logits_BSV - other_BSV).abs().max().item()
        assert difference <= 1e-5
        assert len(chosen) == len(other_chosen) == len(model.moe_layers())
        for mine_TE, other_TE in zip(chosen, other_chosen, strict=True):
            assert torch.equal(mine_TE, other_TE)


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's files."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found
