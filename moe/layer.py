"""The mixture layer: route, dispatch, compute, combine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe.config import MoEConfig, RoutingGroup
from moe.dispatch import Dispatcher, LocalDispatcher
from moe.kernels import grouped_mlp
from moe.losses import attach_loss, router_z, switch_balance
from moe.modules import FeedForward
from moe.routers import build_router
from moe.routing import Routing, RoutingContext, to_groups


class Experts(nn.Module):
    """The experts' weights and their SwiGLU.

    Attributes:
        w13_E2FD: gate and up projections; sharded on E (expert parallelism) and F (expert tensor parallelism).
        w2_EDF: down projections.
    """

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.backend = config.backend
        self.w13_E2FD = nn.Parameter(torch.empty(config.num_experts, 2, config.expert_width, width))
        self.w2_EDF = nn.Parameter(torch.empty(config.num_experts, width, config.expert_width))

    def forward(self, rows: Tensor, routing: Routing) -> Tensor:
        """See `moe.kernels.grouped_mlp`."""
        return grouped_mlp(rows, self.w13_E2FD.to(rows.dtype), self.w2_EDF.to(rows.dtype), routing, self.backend)


class MoELayer(nn.Module):
    """Experts behind a router, with an optional shared expert that every token passes.

    Attributes:
        index: number of the transformer block, for telemetry.
        dispatcher: local by default; expert parallelism puts its own here.
    """

    def __init__(self, config: MoEConfig, width: int, index: int) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.router = build_router(config, width)
        self.experts = Experts(config, width)
        self.shared = FeedForward(width, config.shared_width) if config.shared_width else None
        self.dispatcher: Dispatcher = LocalDispatcher()

    def forward(self, x_BSD: Tensor, context: RoutingContext) -> Tensor:
        """(B, S, D) -> (B, S, D), without the residual connection."""
        x_TD = x_BSD.flatten(0, 1)
        routing = self.router(x_TD, context)
        if context.observe is not None:
            context.observe(self.index, routing)
        rows, local_routing, state = self.dispatcher.dispatch(x_TD, routing)
        y_TD = self.dispatcher.combine(self.experts(rows, local_routing), routing, state)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        if context.mode == "train":
            y_TD = self._attach_losses(y_TD, routing, context)
        return y_TD.view_as(x_BSD)

    def _attach_losses(self, y_TD: Tensor, routing: Routing, context: RoutingContext) -> Tensor:
        """Add the gradients of this layer's losses, normalised over the whole optimizer step, and report values."""
        config = self.config
        assert routing.scores_TE is not None and routing.logits_TE is not None
        if config.balance_coefficient:
            group = RoutingGroup("flat", config.group_sequences, context.sequence_length)
            chosen_TE = routing.assigned_TE() if routing.chosen_TE is None else routing.chosen_TE
            valid_T1 = None if routing.valid_T is None else routing.valid_T[:, None]
            balance_G = switch_balance(
                to_groups(routing.scores_TE, group),
                to_groups(chosen_TE, group),
                config.experts_per_token,
                None if valid_T1 is None else to_groups(valid_T1, group).squeeze(-1),
            )
            balance = balance_G.sum() / (context.step_groups or balance_G.numel())
            y_TD = attach_loss(y_TD, config.balance_coefficient * balance)
            _add(context, "balance", balance)
        if config.z_coefficient:
            z_T = router_z(routing.logits_TE, routing.valid_T)
            valid_tokens = z_T.numel() if routing.valid_T is None else routing.valid_T.sum().clamp_min(1)
            z = z_T.sum() / (context.step_tokens or valid_tokens)
            y_TD = attach_loss(y_TD, config.z_coefficient * z)
            _add(context, "z", z)
        return y_TD


def _add(context: RoutingContext, name: str, value: Tensor) -> None:
    """Sum a loss value over layers and micro-batches for the log."""
    context.auxiliary[name] = context.auxiliary.get(name, 0) + value.detach()
