"""Expert choice: each expert takes its top C tokens of a routing group (Zhou et al. 2022, section 3.2).

Load is balanced by construction and no balance loss is needed. The choice compares tokens, so in a language model a
later token can push an earlier one out: within a `flat` or `chunk` group the training loss is not causal. Evaluation
therefore routes by the tracked cutoffs of `ThresholdRouter`, and so does the last part of training.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from moe.routers.threshold import ThresholdRouter
from moe.routing import Routing, RoutingContext, to_groups


class ExpertChoiceRouter(ThresholdRouter):
    """Expert choice in training, thresholds in its last phase and in evaluation."""

    def select(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Routing:
        """See `Router.select`."""
        if context.mode == "causal" or context.threshold_phase:
            return super().select(scores_TE, logits_TE, context)
        index_GEC = self.choose(scores_TE, context)
        num_tokens, num_experts = scores_TE.shape
        # The token that stands at each position of each group; (E, G*C) after the look-up.
        token_GN = to_groups(
            torch.arange(num_tokens, device=scores_TE.device)[:, None],
            self.config.group,
            self.config.group_sequences,
            context.sequence_length,
            self.config.chunk_length,
        ).squeeze(-1)
        token_GEC = token_GN[:, None, :].expand(-1, num_experts, -1).gather(2, index_GEC)
        token_EA = rearrange(token_GEC, "g e c -> e (g c)")
        if self.config.group == "position":  # groups interleave in token order; the others are already sorted
            token_EA = token_EA.sort(-1).values
        capacity = token_EA.shape[1]
        weight_EA = scores_TE.T.gather(1, token_EA) * self.config.route_scale
        if context.valid_T is not None:
            weight_EA = torch.where(context.valid_T[token_EA], weight_EA, 0.0)
        offsets_E = torch.arange(1, num_experts + 1, device=scores_TE.device, dtype=torch.int32) * capacity
        return Routing(
            token_EA.reshape(-1),
            offsets_E,
            weight_EA.reshape(-1),
            num_tokens,
            capacity,
            scores_TE,
            logits_TE,
            valid_T=context.valid_T,
        )
