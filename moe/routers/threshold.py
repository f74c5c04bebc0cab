"""Threshold routing: a token meets every expert whose cutoff its score passes.

The cutoff of an expert is a moving average of the score that would just have made it into the expert's top C, so the
expected load is that of expert choice while each decision needs one token only: causal, and independent of the batch.
(Expert-choice selection: Zhou et al. 2022, "Mixture-of-Experts with Expert Choice Routing"; routing by a tracked
cutoff is the expert-threshold idea that appears in the literature as ET.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.config import MoEConfig, RoutingGroup, expert_choice_capacity
from moe.routers.base import Router
from moe.routers.selection import largest_per_row
from moe.routing import Routing, RoutingContext, routing_from_mask, to_groups


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

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__(config, width)
        self.register_buffer("cutoff_E", torch.empty(config.num_experts, dtype=torch.float32))
        self.register_buffer("updates", torch.empty((), dtype=torch.int64))
        # What the current step has seen so far; always empty between steps, hence not in checkpoints.
        self.register_buffer("step_sum_E", torch.empty(config.num_experts, dtype=torch.float32), persistent=False)
        self.register_buffer("step_groups_E", torch.empty(config.num_experts, dtype=torch.float32), persistent=False)

    def reset_buffers(self) -> None:
        """Fill the state of a model that was built without memory."""
        self.cutoff_E.fill_(1 / self.config.num_experts if self.config.score == "softmax" else 0.5)
        for buffer in (self.updates, self.step_sum_E, self.step_groups_E):
            buffer.zero_()

    def select(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Routing:
        """See `Router.select`."""
        if context.mode == "train":
            self.choose(scores_TE, context)
        return self.by_threshold(scores_TE, logits_TE, context)

    def by_threshold(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Routing:
        """Every pair whose score is above the expert's cutoff, padding excluded."""
        mask_TE = scores_TE.detach() > self.cutoff_E
        if context.valid_T is not None:
            mask_TE = mask_TE & context.valid_T[:, None]
        weights_TE = scores_TE * self.config.route_scale
        return routing_from_mask(mask_TE, scores_TE, logits_TE, weights_TE=weights_TE, valid_T=context.valid_T)

    def choose(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        """Each expert's top C tokens of every routing group; in mode "train" their cutoffs are recorded.

        Args:
            scores_TE: fp32 scores.
            context: shape of the batch and padding.

        Returns:
            (G, E, C) int64 positions within the group, rising. Padding is chosen only when nothing else is left.
        """
        config = self.config
        group = RoutingGroup(config.group, config.group_sequences, context.sequence_length, config.chunk_length)
        capacity = expert_choice_capacity(config, group)
        with torch.no_grad():
            values_TE = scores_TE.detach()
            if context.valid_T is not None:
                values_TE = values_TE.masked_fill(~context.valid_T[:, None], -torch.inf)
            values_GNE = to_groups(values_TE, group.kind, group.sequences, group.sequence_length, group.chunk_length)
            index_GEC, kth_GE = largest_per_row(values_GNE.transpose(1, 2).contiguous(), capacity)
            if context.mode == "train":
                # A group with fewer valid tokens than slots has no C-th score: it does not count.
                seen_GE = kth_GE.isfinite()
                self.step_sum_E += kth_GE.where(seen_GE, 0.0).sum(0)
                self.step_groups_E += seen_GE.sum(0)
        return index_GEC

    @torch.no_grad()
    def after_step(self) -> None:
        """Move each cutoff towards the step's mean, over routing groups, of the group's C-th largest score."""
        seen_E = self.step_groups_E > 0
        mean_E = self.step_sum_E / self.step_groups_E.clamp_min(1)
        # A plain mean of the first steps, a moving average afterwards.
        rate = torch.clamp_min(1 / (self.updates + 1).float(), 1 - self.config.threshold_decay)
        self.cutoff_E += torch.where(seen_E, rate * (mean_E - self.cutoff_E), 0.0)
        self.updates += seen_E.any().long()
        self.step_sum_E.zero_()
        self.step_groups_E.zero_()
