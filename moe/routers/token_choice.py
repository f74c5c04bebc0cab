"""Token choice: each token takes its k best experts (Shazeer et al. 2017; Switch for k = 1; Mixtral, OLMoE).

Dropless unless a capacity factor is given. With one, an expert of a routing group keeps ceil(factor * N * k / E) of
the tokens that chose it, N being the group's valid tokens, and drops the rest (Fedus et al. 2022, eq. 3). Who is
dropped is `drop_order`'s to say (`capacity.py`); only token order is causal within a sequence. Evaluation never drops.

Switch is `experts_per_token = 1`, `capacity_factor = 1.25`, its weight the score itself: renormalised it would be 1
and the router would not learn. Mixtral is `experts_per_token = 2`, `renormalize = true`, without a capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.groups import RoutingGroup
from moe.routers.base import Router
from moe.routers.capacity import token_choice_capacity, within_capacity
from moe.routers.selection import top_k_distance, top_k_mask
from moe.routing import Decision, Routing, RoutingContext, from_groups, to_groups


class TokenChoiceRouter(Router):
    """Top-k routing; ties go to the lowest expert index."""

    def decide(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Decision:
        """See `Router.decide`."""
        chosen_TE = self.choose(scores_TE, context)
        if context.valid_T is not None:
            chosen_TE &= context.valid_T[:, None]
        drops = self.config.capacity_factor is not None and context.mode != "causal"
        kept_TE = self._within_capacity(chosen_TE, scores_TE, context) if drops else chosen_TE
        return Decision.from_mask(kept_TE, chosen_TE)

    def choose(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        """bool (T, E): what each token asks for."""
        return top_k_mask(self.ranking(scores_TE), self.config.experts_per_token)

    def ranking(self, scores_TE: Tensor) -> Tensor:
        """(T, E), the values whose k largest a token takes."""
        return scores_TE

    def weights(self, scores_TE: Tensor, decision: Decision) -> Tensor:
        """See `Router.weights`. A dropped expert still counts in the sum that renormalises."""
        if not self.config.renormalize:
            return scores_TE
        assert decision.chosen_TE is not None
        return renormalized(scores_TE, decision.chosen_TE)

    def decision_distance(self, routing: Routing) -> Tensor:
        """See `Router.decision_distance`: to the middle between the token's k-th and (k+1)-th largest values."""
        return top_k_distance(self.ranking(routing.scores()), self.config.experts_per_token)

    def _within_capacity(self, chosen_TE: Tensor, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        """bool (T, E): the choices that fit, within a routing group of whole sequences."""
        config = self.config
        assert config.capacity_factor is not None
        group = RoutingGroup("flat", config.group_sequences, context.sequence_length)
        valid_T = torch.ones_like(chosen_TE[:, 0]) if context.valid_T is None else context.valid_T
        valid_GN = to_groups(valid_T[:, None], group).squeeze(-1)
        capacity_G11 = token_choice_capacity(
            config.capacity_factor, valid_GN.sum(1)[:, None, None], config.experts_per_token, config.num_experts
        )
        scores_GNE = to_groups(self.ranking(scores_TE), group)
        kept_GNE = within_capacity(to_groups(chosen_TE, group), scores_GNE, capacity_G11, config.drop_order, valid_GN)
        return from_groups(kept_GNE, group)


def renormalized(scores_TE: Tensor, chosen_TE: Tensor) -> Tensor:
    """Scores divided by the sum of the token's chosen ones."""
    total_T1 = torch.where(chosen_TE, scores_TE, 0.0).sum(-1, keepdim=True)
    # Sigmoid scores can all underflow. Not the smallest number either: its inverse, times a gradient, is infinite.
    return scores_TE / total_T1.clamp_min(1e-20)
