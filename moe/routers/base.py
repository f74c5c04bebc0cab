"""What all routers share: the projection, the scores, and state that stays in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.routing import Decision, Routing, RoutingContext


class Router(nn.Module):
    """Scores tokens in fp32 and decides once; subclasses say how in `decide`.

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
        """Decide without gradient, then weigh the decision with it."""
        tokens = context.batch * context.sequence_length
        if scores_TE.shape[0] != tokens:
            raise ValueError(
                f"{scores_TE.shape[0]} tokens were given; the context is for {context.batch} sequences of "
                f"{context.sequence_length}, {tokens} tokens"
            )
        with torch.no_grad():
            decision = self.decide(scores_TE.detach(), context)
        weights_TE = self.weights(scores_TE, decision) * self.config.route_scale
        return Routing.from_decision(decision, weights_TE, scores_TE, logits_TE, context.valid_T)

    def decide(self, scores_TE: Tensor, context: RoutingContext) -> Decision:
        """Which token goes to which expert. Every router defines this; it also records what balance needs.

        Args:
            scores_TE: fp32, detached.
            context: shape of the batch, padding, and the mode.
        """
        raise AssertionError(f"{type(self).__name__} does not define decide")  # pragma: no cover

    def weights(self, scores_TE: Tensor, decision: Decision) -> Tensor:
        """Combine weights of all pairs, before route_scale: the scores, unless a router says otherwise."""
        return scores_TE

    def decision_distance(self, scores_TE: Tensor) -> Tensor:
        """How far each score is from the value at which causal routing would decide otherwise: (T, E), >= 0."""
        raise AssertionError(f"{type(self).__name__} does not define decision_distance")  # pragma: no cover

    def reset_buffers(self) -> None:
        """Fill the buffers of a model that was built without memory. A router with buffers defines this."""
        if names := [name for name, _ in self.named_buffers()]:
            raise AssertionError(f"{type(self).__name__} does not define reset_buffers for {names}")

    def after_step(self) -> None:
        """Update balance state once per optimizer step, from what `decide` recorded; most routers have none."""

    def forget_step(self) -> None:
        """Drop what `decide` recorded of a step that is not taken."""
