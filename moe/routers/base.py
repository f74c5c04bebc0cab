"""What all routers share: the projection, the scores, and state that stays in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.routing import Routing, RoutingContext


class Router(nn.Module):
    """Scores tokens in fp32 and decides once; subclasses say how in `select`.

    Attributes:
        weight_ED: the router's projection, kept and applied in fp32 whatever the model's precision, because nearly
            equal scores collapse into ties in bf16.
    """

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight_ED = nn.Parameter(torch.empty(config.num_experts, width, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow device moves, refuse casts: `model.to(torch.bfloat16)` must not round the router's state."""

        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move_only, recurse)

    def forward(self, x_TD: Tensor, context: RoutingContext) -> Routing:
        """Route tokens.

        Args:
            x_TD: inputs of any floating type.
            context: shape of the batch, padding, and the mode.

        Returns:
            The routing; its weights carry the gradient, its selection none.
        """
        # Autocast would quietly take the matmul back to bf16.
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = x_TD.float() @ self.weight_ED.T
            scores_TE = logits_TE.softmax(-1) if self.config.score == "softmax" else logits_TE.sigmoid()
        return self.select(scores_TE, logits_TE, context)

    def select(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Routing:
        """Decide which token goes to which expert."""
        raise AssertionError(f"{type(self).__name__} does not define select")  # pragma: no cover

    def after_step(self) -> None:
        """Update balance state once per optimizer step; most routers have none."""
