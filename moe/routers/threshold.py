"""Threshold routing: a token meets every expert whose cutoff its score reaches.

The cutoff of an expert is a moving average of the score that would just have made it into the expert's top C, so the
expected load is that of expert choice while each decision needs one token only: causal, and independent of the batch.
(Expert-choice selection: Zhou et al. 2022, "Mixture-of-Experts with Expert Choice Routing"; routing by a tracked
cutoff is the expert-threshold idea that appears in the literature as ET.) To warm up with expert choice before
thresholds take over, as ET does, train `expert_choice` with a small `threshold_after`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.config import MoEConfig
from moe.groups import RoutingGroup, expert_choice_capacity
from moe.routers.base import Router
from moe.routing import Decision, Routing, RoutingContext, to_groups


class ThresholdRouter(Router):
    """Routes by tracked cutoffs, in training as in evaluation.

    Attributes:
        cutoff_E: fp32 cutoff of each expert. Before the first update it is the score of a uniform router.
        updates: int64, optimizer steps that have moved the cutoffs.
    """

    cutoff_E: Tensor
    updates: Tensor
    step_sum_E: Tensor
    step_groups_E: Tensor

    def __init__(self, config: MoEConfig, width: int, layer: int = 0) -> None:
        super().__init__(config, width, layer)
        self.register_buffer("cutoff_E", torch.empty(config.num_experts, dtype=torch.float32))
        self.register_buffer("updates", torch.empty((), dtype=torch.int64))
        # What the current step has seen so far; always empty between steps, hence not in checkpoints.
        self.register_buffer("step_sum_E", torch.empty(config.num_experts, dtype=torch.float32), persistent=False)
        self.register_buffer("step_groups_E", torch.empty(config.num_experts, dtype=torch.float32), persistent=False)

    def reset_buffers(self) -> None:
        """See `Router.reset_buffers`."""
        super().reset_buffers()
        self.cutoff_E.copy_(self.score(torch.zeros_like(self.cutoff_E)))
        self.updates.zero_()

    def decide(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Decision:
        """See `Router.decide`."""
        if context.mode == "train":
            self.record(scores_TE, context)
        # Not >: where scores tie at the cutoff (one expert, saturated scores) nobody would pass.
        mask_TE = scores_TE >= self.cutoff_E
        if context.valid_T is not None:
            mask_TE &= context.valid_T[:, None]
        return Decision.from_mask(mask_TE)

    def decision_distance(self, routing: Routing) -> Tensor:
        """See `Router.decision_distance`: the distance to the expert's cutoff."""
        return (routing.scores() - self.cutoff_E).abs()

    def record(self, scores_TE: Tensor, context: RoutingContext, kth_GE: Tensor | None = None) -> None:
        """Note the cutoffs that would have given each expert its share of these tokens.

        They are taken over all tokens of `group_sequences` sequences, also where experts choose within a position or
        a chunk: the C-th largest of a few scores is a biased estimate (of 8 scores, C = 1, the mean cutoff lets
        through half of what it should).

        Args:
            scores_TE: fp32 scores.
            context: shape of the batch and padding.
            kth_GE: each group's C-th largest score per expert, where it is known already (used without padding).
        """
        group = RoutingGroup("flat", self.config.group_sequences, context.sequence_length)
        capacity = expert_choice_capacity(self.config, group)
        if capacity == group.tokens:  # everyone passes; a mean of lowest scores would keep some out
            kth_GE = scores_TE.new_zeros(1, scores_TE.shape[1])
        elif context.valid_T is not None:
            kth_GE = self._kth_of_valid(scores_TE, group, context)
        elif kth_GE is None:
            values_GEN = self._comparable(scores_TE, group, context)
            kth_GE = values_GEN.topk(capacity, dim=-1, sorted=False).values.amin(-1)
        seen_GE = kth_GE.isfinite()  # NaN: such a group does not count
        self.step_sum_E += kth_GE.where(seen_GE, 0.0).sum(0)
        self.step_groups_E += seen_GE.sum(0)

    def _kth_of_valid(self, scores_TE: Tensor, group: RoutingGroup, context: RoutingContext) -> Tensor:
        """(G, E): the same share of the valid tokens as C is of all; NaN where that is no token."""
        assert context.valid_T is not None
        falling_GEN = self._comparable(scores_TE, group, context).sort(-1, descending=True).values
        share = expert_choice_capacity(self.config, group) / group.tokens
        places_G = (to_groups(context.valid_T[:, None], group).sum((1, 2)) * share).round().long()
        place_GE1 = (places_G - 1).clamp_min(0)[:, None, None].expand(-1, falling_GEN.shape[1], 1)
        kth_GE = falling_GEN.gather(2, place_GE1).squeeze(2)
        return torch.where(places_G[:, None] > 0, kth_GE, torch.nan)

    def _comparable(self, scores_TE: Tensor, group: RoutingGroup, context: RoutingContext) -> Tensor:
        """Scores by group, (G, E, N), with padding below everything."""
        if context.valid_T is not None:
            scores_TE = scores_TE.masked_fill(~context.valid_T[:, None], -torch.inf)
        return to_groups(scores_TE, group).transpose(1, 2).contiguous()

    @torch.no_grad()
    def after_step(self) -> None:
        """Move each cutoff towards the step's mean, over routing groups, of the group's C-th largest score."""
        seen_E = self.step_groups_E > 0
        mean_E = self.step_sum_E / self.step_groups_E.clamp_min(1)
        # A plain mean of the first steps, a moving average afterwards.
        rate = torch.clamp_min(1 / (self.updates + 1).float(), 1 - self.config.threshold_decay)
        self.cutoff_E += torch.where(seen_E, rate * (mean_E - self.cutoff_E), 0.0)
        self.updates += seen_E.any().long()
        super().after_step()
