"""Sinkhorn routing: each token takes its best experts after loads have been balanced (Clark et al. 2022, S-BASE).

exp(logits) of a routing group is scaled by one factor for each token and one for each expert until every token has
mass 1 and every expert its share N/E. A token's own factor does not change which of its experts are best, so the
top-k of the scaled matrix is the top-k of logits plus a bias for each expert, the logarithm of its factor. With k = 1
this is S-BASE. The group competes, so training leaks; evaluation takes the plain top-k, as Megatron-LM does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.groups import RoutingGroup
from moe.routers.base import Router
from moe.routers.selection import top_k_distance, top_k_mask
from moe.routing import Decision, Routing, RoutingContext, from_groups, to_groups


def sinkhorn_bias(logits_GNE: Tensor, valid_GN: Tensor | None = None, iterations: int = 30) -> Tensor:
    """The logarithm of the experts' Sinkhorn factors: softmax(logits + bias) is the scaled matrix.

    Its rows sum to 1 and, in the limit, its columns to N/E. Computed in the logarithm, where factors of any size fit.
    The number of iterations is fixed, so that nothing waits for the host: at unit spread of the logits 10 bring loads
    to the last digit, at a spread of 5 it takes 30 for 1e-5. (Megatron-LM iterates until the experts' factors move by
    less than 1e-4 on average. Factors have no natural size: with peaked logits they are huge, and the loop may not
    end.)

    Args:
        logits_GNE: floating, any finite value.
        valid_GN: bool, False at padding, which has no mass.
        iterations: of one row and one column step each.

    Returns:
        (G, 1, E), 0 for a group of padding only.
    """
    bias_G1E = torch.zeros_like(logits_GNE[:, :1])
    num_experts = logits_GNE.shape[2]
    if valid_GN is None:
        valid_GN = torch.ones_like(logits_GNE[..., 0], dtype=torch.bool)
    tokens_G11 = valid_GN.sum(1)[:, None, None].to(logits_GNE.dtype)
    share_G11 = (tokens_G11 / num_experts).log()
    for _ in range(iterations):
        mass_GNE = (logits_GNE + bias_G1E).log_softmax(-1)
        load_G1E = mass_GNE.masked_fill(~valid_GN[..., None], -torch.inf).logsumexp(1, keepdim=True)
        bias_G1E = bias_G1E + torch.where(tokens_G11 > 0, share_G11 - load_G1E, 0.0)
    return bias_G1E


class SinkhornRouter(Router):
    """Top-k of the Sinkhorn-scaled matrix in training, plain top-k in evaluation; of equals the lowest expert.

    The weights are the unscaled scores: a sigmoid where k = 1, a softmax over all experts otherwise (Megatron-LM).
    Identical tokens stay together whatever the bias, so a group of them loads k experts.
    """

    def score(self, logits_TE: Tensor) -> Tensor:
        """See `Router.score`."""
        return logits_TE.sigmoid() if self.config.experts_per_token == 1 else logits_TE.softmax(-1)

    def decide(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Decision:
        """See `Router.decide`."""
        if context.mode != "causal":
            group = RoutingGroup("flat", self.config.group_sequences, context.sequence_length)
            logits_GNE = to_groups(logits_TE, group)
            valid_GN = context.valid_GN(group)
            logits_TE = from_groups(logits_GNE + sinkhorn_bias(logits_GNE, valid_GN), group)
        # Logits, not scores: these can underflow to ties.
        mask_TE = top_k_mask(logits_TE, self.config.experts_per_token)
        return Decision.from_mask(mask_TE if context.valid_T is None else mask_TE & context.valid_T[:, None])

    def decision_distance(self, routing: Routing) -> Tensor:
        """See `Router.decision_distance`: to the middle between the token's k-th and (k+1)-th largest scores."""
        return top_k_distance(routing.scores(), self.config.experts_per_token)
