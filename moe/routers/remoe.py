"""ReMoE: fully differentiable routing by ReLU (Wang et al. 2024, section 3).

R = relu(x W): an expert works on a token where R > 0, with weight R (eq. 5-6). How many experts a token gets is held
at k on average by an L1 on R, balanced over experts (eq. 12), whose weight rises by `l1_multiplier` after a step with
more and falls after one with fewer (eq. 9). Sparsity is that of all layers together, so layers may differ. The paper
averages the L1 over layers, here layers are summed: the weight that settles is smaller by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from moe.config import MoEConfig
from moe.groups import RoutingGroup
from moe.losses import l1_sparsity
from moe.routers.base import Router
from moe.routing import Decision, Routing, RoutingContext, to_groups

# A weight that falls for hundreds of steps must be able to rise again: 2.8e-45 * 1.2 is 2.8e-45.
_L1_RANGE = (1e-12, 1e12)


class ReMoERouter(Router):
    """Every expert with a positive score.

    Attributes:
        l1_weight: fp32 scalar, coefficient of the L1; equal in all layers.
    """

    l1_weight: Tensor
    step_active: Tensor
    step_tokens: Tensor

    def __init__(self, config: MoEConfig, width: int, layer: int = 0) -> None:
        super().__init__(config, width, layer)
        self.register_buffer("l1_weight", torch.empty((), dtype=torch.float32))
        self.register_buffer("step_active", torch.empty((), dtype=torch.int64), persistent=False)
        self.register_buffer("step_tokens", torch.empty((), dtype=torch.int64), persistent=False)

    def reset_buffers(self) -> None:
        """See `Router.reset_buffers`."""
        super().reset_buffers()
        self.l1_weight.fill_(self.config.l1_initial)

    def forward(self, x_TD: Tensor, context: RoutingContext) -> Routing:
        """See `Router.forward`."""
        routing = super().forward(x_TD, context)
        if context.mode == "train":
            group = RoutingGroup("flat", self.config.group_sequences, context.sequence_length)
            scores_GNE = to_groups(routing.scores(), group)
            valid_GN = context.valid_GN(group)
            l1_G = l1_sparsity(scores_GNE, scores_GNE > 0, self.config.experts_per_token, valid_GN)
            # A copy: backward must see the weight of this step, and it moves before a late backward may come.
            routing.own_losses["l1"] = (self.l1_weight.clone(), context.per_group(l1_G))
        return routing

    def score(self, logits_TE: Tensor) -> Tensor:
        """See `Router.score`; not bounded by 1."""
        return logits_TE.relu()

    def decide(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Decision:
        """See `Router.decide`."""
        active_TE = scores_TE > 0
        if context.valid_T is not None:
            active_TE &= context.valid_T[:, None]
        if context.mode == "train":
            self.step_active += active_TE.sum()
            self.step_tokens += active_TE.shape[0] if context.valid_T is None else context.valid_T.sum()
        return Decision.from_mask(active_TE)

    def decision_distance(self, routing: Routing) -> Tensor:
        """See `Router.decision_distance`: of the logit from 0."""
        return routing.logits().abs()

    @classmethod
    @torch.no_grad()
    def after_step_together(
        cls, routers: Sequence[Router], over_stages: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Adapt the weight of the L1 to the sparsity of all layers (eq. 9)."""
        remoe = [cast(ReMoERouter, router) for router in routers]
        excesses = [router.step_active - router.step_tokens * router.config.experts_per_token for router in remoe]
        excess = torch.stack(excesses).sum() if excesses else torch.zeros((), dtype=torch.int64)
        if over_stages is not None:
            excess = over_stages(excess)
        for router in remoe:
            router.l1_weight *= router.config.l1_multiplier ** torch.sign(excess)
            router.l1_weight.clamp_(*_L1_RANGE)
            router.after_step()
