"""Small models of unequal sizes, and held-out rows without a corpus."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from data.batches import HeldoutBatch
from moe.config import ModelConfig, MoEConfig
from moe.initialization import build_model
from moe.model import Transformer
from moe.routing import RoutingContext

VOCABULARY = 37
END_OF_TEXT = 0
ROUTERS = ["expert_choice", "threshold", "token_choice", "dense"]


def small_model(router: str = "expert_choice", vocabulary_size: int = VOCABULARY, **moe: Any) -> Transformer:
    """Three layers, D 24, E 6, k 2, a shared expert; thresholds that come from data.

    The reference backend's shapes do not depend on the routing, so that only rounding can separate two batches.
    """
    config = ModelConfig(vocabulary_size=vocabulary_size, width=24, layers=3, heads=3, kv_heads=1, tie_embeddings=False)
    sizes = {
        "num_experts": 6,
        "expert_width": 16,
        "experts_per_token": 2,
        "shared_width": 8,
        "group_sequences": 2,
        "allow_leak": True,
        "backend": "reference",
    }
    model = build_model(config, MoEConfig(router=router, **{**sizes, **moe}), seed=3)  # type: ignore[arg-type]
    # Random models prefer nothing; larger weights make their choices matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
    if router != "dense":
        token_BS = torch.randint(VOCABULARY, (6, 12), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model(token_BS, RoutingContext(6, 12, mode="train"))
        model.after_step()
    return model.eval()


def random_text(rows: int, length: int, seed: int = 0) -> Tensor:
    """int64 (rows, length) ids, none of them end-of-text."""
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def window(domain: str, documents: list[Tensor], length: int, left: bool = False) -> HeldoutBatch:
    """One document a row, predicted from its second id on; padded to `length` on one side."""
    token_BS = torch.full((len(documents), length), END_OF_TEXT)
    label_BS = torch.full_like(token_BS, -100)
    for row, document in enumerate(documents):
        count = len(document) - 1
        place = slice(length - count, length) if left else slice(0, count)
        token_BS[row, place], label_BS[row, place] = document[:-1], document[1:]
    return HeldoutBatch(domain, token_BS, label_BS, label_BS != -100)
