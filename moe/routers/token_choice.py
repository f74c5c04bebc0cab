"""Token choice: each token takes its k best experts (Shazeer et al. 2017; Switch for k = 1; Mixtral, OLMoE).

Dropless unless a capacity factor is given. With one, an expert of a routing group takes its first
ceil(factor * N * k / E) tokens in token order, N being the group's valid tokens, and drops the rest (Fedus et al.
2022, eq. 3). Token order keeps it causal within a sequence. Evaluation never drops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.routers.base import Router
from moe.routers.selection import top_k_mask
from moe.routing import Routing, RoutingContext, from_groups, routing_from_mask, to_groups


class TokenChoiceRouter(Router):
    """Top-k routing; ties go to the lowest expert index."""

    def select(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Routing:
        """See `Router.select`."""
        config = self.config
        chosen_TE = top_k_mask(scores_TE.detach(), config.experts_per_token)
        weights_TE = scores_TE
        if config.renormalize:
            total_T1 = torch.where(chosen_TE, scores_TE, 0.0).sum(-1, keepdim=True)
            # Sigmoid scores can all underflow; the smallest normal number keeps 0/0 away without moving any other.
            weights_TE = scores_TE / total_T1.clamp_min(torch.finfo(torch.float32).tiny)
        weights_TE = weights_TE * config.route_scale
        if context.valid_T is not None:
            chosen_TE = chosen_TE & context.valid_T[:, None]
        if config.capacity_factor is None or context.mode == "causal":
            return routing_from_mask(chosen_TE, scores_TE, logits_TE, weights_TE=weights_TE, valid_T=context.valid_T)
        return routing_from_mask(
            self.within_capacity(chosen_TE, context),
            scores_TE,
            logits_TE,
            weights_TE=weights_TE,
            chosen_TE=chosen_TE,
            valid_T=context.valid_T,
        )

    def within_capacity(self, chosen_TE: Tensor, context: RoutingContext) -> Tensor:
        """bool (T, E): the choices that fit, first come first served within a routing group of whole sequences."""
        config = self.config
        assert config.capacity_factor is not None
        group = ("flat", config.group_sequences, context.sequence_length, 0)
        chosen_GNE = to_groups(chosen_TE, *group)
        valid_T = torch.ones_like(chosen_TE[:, 0]) if context.valid_T is None else context.valid_T
        tokens_G11 = to_groups(valid_T[:, None], *group).sum(1, keepdim=True)
        slots_G11 = config.capacity_factor * tokens_G11.double() * config.experts_per_token / config.num_experts
        # 1.1 * 200 / 4 is 55, and a hair more in floating point: shave the hair off before rounding up.
        capacity_G11 = torch.ceil(slots_G11 * (1 - 1e-12))
        return from_groups(chosen_GNE & (chosen_GNE.cumsum(1) <= capacity_G11), "flat", context.sequence_length)
