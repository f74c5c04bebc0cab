"""The mixture layer: route, dispatch, compute, combine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe.auxiliary import auxiliary_losses
from moe.config import MoEConfig
from moe.dispatch import Dispatcher, LocalDispatcher
from moe.kernels import grouped_mlp
from moe.losses import attach_loss
from moe.modules import FeedForward
from moe.routers import build_router
from moe.routing import Routing, RoutingContext, recomputing


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
        self.router = build_router(config, width, index)
        self.experts = Experts(config, width)
        self.shared = FeedForward(width, config.shared_width) if config.shared_width else None
        self.dispatcher: Dispatcher = LocalDispatcher()

    def forward(self, x_BSD: Tensor, context: RoutingContext) -> Tensor:
        """(B, S, D) -> (B, S, D), without the residual connection; 0 at padding."""
        x_TD = x_BSD.flatten(0, 1)
        if context.valid_T is not None:  # padding may hold anything, and 0 times the gradient of a NaN is a NaN
            x_TD = torch.where(context.valid_T[:, None], x_TD, 0.0)
        replayed = recomputing() and self.index in context.decisions
        routing = self.router(x_TD, context)
        if context.observe is not None and not replayed:
            context.observe(self.index, routing)
        sent = self.dispatcher.send(x_TD, routing)
        shared_TD = None if self.shared is None else self.shared(x_TD)  # while the tokens travel
        y_TD = self.dispatcher.combine(self.experts(*self.dispatcher.receive(sent)), sent)
        if shared_TD is not None:
            y_TD = y_TD + shared_TD
        if context.mode == "train":
            for name, (coefficient, value) in auxiliary_losses(self.router, routing, context).items():
                y_TD = attach_loss(y_TD, coefficient * value / context.replicas)
                if not replayed:  # summed over layers and micro-batches for the log
                    context.auxiliary[name] = context.auxiliary.get(name, 0) + value.detach()
        return y_TD.view_as(x_BSD)
