"""Mixture of depths: only the top share of tokens passes the feed-forward (Raposo et al. 2024).

This is expert choice with one expert in place of the block's feed-forward: C = N * depth_capacity tokens of a routing
group pass it, weighted by a sigmoid gate, and the others keep their residual. The paper chooses within each sequence
(`group_sequences = 1`); like any flat group that leaks. Two differences: the paper routes around attention as well, and
weighs by the router's plain output where a sigmoid stands here. It is served by the tracked cutoff, or by the paper's
predictor (section 3.5).
"""

from __future__ import annotations

from torch import Tensor

from moe.routers.expert_choice import ExpertChoiceRouter


class MixtureOfDepthsRouter(ExpertChoiceRouter):
    """Expert choice of one expert. Over a single expert a softmax would be constant: the gate is a sigmoid."""

    def score(self, logits_TE: Tensor) -> Tensor:
        """See `Router.score`."""
        return logits_TE.sigmoid()
