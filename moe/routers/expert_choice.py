"""Expert choice: each expert takes its top C tokens of a routing group (Zhou et al. 2022, section 3.2).

Load is balanced by construction and no balance loss is needed. The choice compares tokens, so in a language model a
later token can push an earlier one out: within a `flat` or `chunk` group the training loss is not causal. Evaluation
therefore routes by the tracked cutoffs of `ThresholdRouter`, and so does the last part of training.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from moe.config import RoutingGroup, expert_choice_capacity
from moe.routers.selection import largest_per_row
from moe.routers.threshold import ThresholdRouter
from moe.routing import Decision, RoutingContext, to_groups


class ExpertChoiceRouter(ThresholdRouter):
    """Expert choice in training, thresholds in its last phase and in evaluation."""

    def decide(self, scores_TE: Tensor, context: RoutingContext) -> Decision:
        """See `Router.decide`. Padding is chosen only when nothing else is left, and then has weight 0."""
        if context.mode == "causal" or context.threshold_phase:
            return super().decide(scores_TE, context)
        config, device = self.config, scores_TE.device
        group = RoutingGroup(config.group, config.group_sequences, context.sequence_length, config.chunk_length)
        capacity = expert_choice_capacity(config, group)
        index_GEC, kth_GE = largest_per_row(self._comparable(scores_TE, group, context), capacity)
        if context.mode == "train":
            self.record(scores_TE, context, kth_GE if group.kind == "flat" else None)
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
