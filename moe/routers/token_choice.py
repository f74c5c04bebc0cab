"""Token choice: each token takes its k best experts (Shazeer et al. 2017; Switch for k = 1; Mixtral, OLMoE).

Dropless unless a capacity factor is given. With one, an expert of a routing group takes its first
ceil(factor * N * k / E) tokens in token order, N being the group's valid tokens, and drops the rest (Fedus et al.
2022, eq. 3). Token order keeps it causal within a sequence. Evaluation never drops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.config import RoutingGroup
from moe.routers.base import Router
from moe.routers.selection import top_k_mask
from moe.routing import Decision, RoutingContext, from_groups, to_groups


class TokenChoiceRouter(Router):
    """Top-k routing; ties go to the lowest expert index."""

    def decide(self, scores_TE: Tensor, context: RoutingContext) -> Decision:
        """See `Router.decide`."""
        chosen_TE = top_k_mask(scores_TE, self.config.experts_per_token)
        if context.valid_T is not None:
            chosen_TE &= context.valid_T[:, None]
        drops = self.config.capacity_factor is not None and context.mode != "causal"
        kept_TE = self.within_capacity(chosen_TE, context) if drops else chosen_TE
        return Decision.from_mask(kept_TE, chosen_TE)

    def weights(self, scores_TE: Tensor, decision: Decision) -> Tensor:
        """See `Router.weights`. A dropped expert still counts in the sum that renormalises."""
        if not self.config.renormalize:
            return scores_TE
        assert decision.chosen_TE is not None
        total_T1 = torch.where(decision.chosen_TE, scores_TE, 0.0).sum(-1, keepdim=True)
        # Sigmoid scores can all underflow; the smallest normal number keeps 0/0 away without moving any other.
        return scores_TE / total_T1.clamp_min(torch.finfo(torch.float32).tiny)

    def decision_distance(self, scores_TE: Tensor) -> Tensor:
        """See `Router.decision_distance`: to the middle between the token's k-th and (k+1)-th largest scores."""
        k = self.config.experts_per_token
        if k == scores_TE.shape[1]:  # a token takes every expert
            return torch.full_like(scores_TE, torch.inf)
        largest_TK = scores_TE.topk(k + 1, dim=1).values
        return (scores_TE - largest_TK[:, k - 1 :].mean(1, keepdim=True)).abs()

    def within_capacity(self, chosen_TE: Tensor, context: RoutingContext) -> Tensor:
        """bool (T, E): the choices that fit, first come first served within a routing group of whole sequences."""
        config = self.config
        assert config.capacity_factor is not None
        group = RoutingGroup("flat", config.group_sequences, context.sequence_length)
        chosen_GNE = to_groups(chosen_TE, group)
        valid_T = torch.ones_like(chosen_TE[:, 0]) if context.valid_T is None else context.valid_T
        tokens_G11 = to_groups(valid_T[:, None], group).sum(1, keepdim=True)
        slots_G11 = config.capacity_factor * tokens_G11.double() * config.experts_per_token / config.num_experts
        # 1.1 * 200 / 4 is 55, and a hair more in floating point: shave the hair off before rounding up.
        capacity_G11 = torch.ceil(slots_G11 * (1 - 1e-12))
        return from_groups(chosen_GNE & (chosen_GNE.cumsum(1) <= capacity_G11), group)
