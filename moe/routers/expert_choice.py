"""Expert choice: each expert takes its top C tokens of a routing group (Zhou et al. 2022, section 3.2).

Load is balanced by construction and no balance loss is needed. The choice compares tokens, so in a language model a
later token can push an earlier one out: within a `flat` or `chunk` group the training loss is not causal. Evaluation
therefore routes by the tracked cutoffs of `ThresholdRouter` (or as `moe.inference` says), and so does the last part
of training.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from moe.config import MoEConfig
from moe.groups import RoutingGroup, expert_choice_capacity
from moe.routers.capped import capped_affinity
from moe.routers.predictor import Predictor
from moe.routers.selection import largest_per_row, top_k_distance, top_k_mask
from moe.routers.threshold import ThresholdRouter
from moe.routing import Decision, Routing, RoutingContext, to_groups


class ExpertChoiceRouter(ThresholdRouter):
    """Expert choice in training, thresholds in its last phase and, unless told otherwise, in evaluation.

    Attributes:
        inference: see `MoEConfig.inference`; may be set, to serve one checkpoint in several ways.
        predictor: guesses the experts' choice; None where none is trained.
    """

    def __init__(self, config: MoEConfig, width: int, layer: int = 0) -> None:
        super().__init__(config, width, layer)
        self.inference = config.inference
        share = config.assignments_per_token / config.num_experts
        self.predictor = Predictor(config.num_experts, width, share) if config.predictor_coefficient else None

    def reset_parameters(self) -> None:
        """See `Router.reset_parameters`."""
        if self.predictor is not None:
            self.predictor.reset_parameters()

    def forward(self, x_TD: Tensor, context: RoutingContext) -> Routing:
        """See `Router.forward`."""
        routing = super().forward(x_TD, context)
        if self.predictor is None:
            return routing
        if context.mode == "train":
            loss_T = self.predictor.loss(self.predictor(x_TD), routing.assigned_TE(), context.valid_T)
            routing.own_losses["predictor"] = (self.config.predictor_coefficient, context.per_token(loss_T))
        elif context.mode == "causal" and self.inference == "predictor":
            guess_TE = self.predictor(x_TD)
            decision = Decision.from_mask(_valid(guess_TE > 0, context))
            routing = self.weigh(decision, routing.scores(), routing.logits(), context)
            routing.distance_TE = guess_TE.abs()
        return routing

    def decision_distance(self, routing: Routing) -> Tensor:
        """See `Router.decision_distance`; under a predictor, in log-odds of its guess."""
        if routing.distance_TE is not None:
            return routing.distance_TE
        if self.inference == "token_choice":
            return top_k_distance(routing.scores(), self.config.experts_per_token)
        return super().decision_distance(routing)

    def decide(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Decision:
        """See `Router.decide`. Padding is chosen only when nothing else is left, and then has weight 0."""
        if context.mode == "causal" and self.inference == "token_choice":
            return Decision.from_mask(_valid(top_k_mask(scores_TE, self.config.experts_per_token), context))
        if context.mode == "causal" or context.threshold_phase:
            return super().decide(scores_TE, logits_TE, context)
        config, device = self.config, scores_TE.device
        group = RoutingGroup(config.group, config.group_sequences, context.sequence_length, config.chunk_length)
        capacity = expert_choice_capacity(config, group)
        values_GEN = self._comparable(scores_TE, group, context)
        if config.expert_cap:
            values_GEN = capped_affinity(values_GEN, capacity, config.expert_cap)
        index_GEC, kth_GE = largest_per_row(values_GEN, capacity)
        if context.mode == "train":
            known = group.kind == "flat" and not config.expert_cap
            self.record(scores_TE, context, kth_GE if known else None)
        # The token that stands at each position of each group; (E, G*C) after the look-up.
        num_tokens, num_experts = scores_TE.shape
        token_GN = to_groups(torch.arange(num_tokens, device=device)[:, None], group).squeeze(-1)
        token_GEC = token_GN[:, None, :].expand(-1, num_experts, -1).gather(2, index_GEC)
        token_EA = rearrange(token_GEC, "g e c -> e (g c)")
        if group.kind == "position":  # groups interleave in token order; the others are already sorted
            token_EA = token_EA.sort(-1).values
        per_expert = token_EA.shape[1]
        offsets_E = torch.arange(1, num_experts + 1, device=device, dtype=torch.int32) * per_expert
        return Decision(token_EA.reshape(-1), offsets_E, per_expert)


def _valid(mask_TE: Tensor, context: RoutingContext) -> Tensor:
    return mask_TE if context.valid_T is None else mask_TE & context.valid_T[:, None]
