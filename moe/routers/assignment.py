"""BASE: every expert takes exactly its share of a group's tokens, by balanced assignment (Lewis et al. 2021).

Training maximises the sum of x.w_e over assignments of one expert to each token in which loads differ by at most 1.
The group competes, so training leaks. Evaluation takes each token's best expert. The weight is alpha = sigmoid(x.w_e).

The published layer (fairseq) is y = alpha * f(x) + (1 - alpha) * x, where the expert has a residual connection of its
own, f(x) = x + FFN(norm(x)): together x + alpha * FFN(norm(x)). The block here computes the same, with two deviations:
w_e meets the block's normalised input, not x, and the norm is shared by the experts.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moe.groups import RoutingGroup
from moe.routers.base import Router
from moe.routers.selection import top_k_distance, top_k_mask
from moe.routers.sinkhorn import sinkhorn_bias
from moe.routing import Decision, Routing, RoutingContext, from_groups, to_groups

# Spread of the experts' factors that start the assignment, as a part of the scores' own. Only speed depends on it.
_TEMPERATURE = 0.1


def balanced_assignment(scores_GNE: Tensor, valid_GN: Tensor | None = None) -> Tensor:
    """One expert for each token, with loads of floor(N/E) or ceil(N/E), of the largest total score.

    Exact and deterministic; which of several assignments with equal totals it is, is up to scipy. It runs on the
    host, group by group, and waits for the device. On one CPU core a group of 256, 1,024 and 4,096 tokens takes about
    0.01, 0.05 and 0.6 seconds at 16 experts, for each layer.

    Args:
        scores_GNE: any real numbers.
        valid_GN: bool, False at padding, which is not assigned.

    Returns:
        bool (G, N, E), on the scores' device.

    Raises:
        ValueError: a score of a valid token is NaN or infinite.
    """
    if valid_GN is None:
        valid_GN = torch.ones_like(scores_GNE[..., 0], dtype=torch.bool)
    assigned_GNE = torch.zeros(scores_GNE.shape, dtype=torch.bool)
    host_GNE, host_GN = scores_GNE.double().cpu(), valid_GN.cpu()
    bad = (~host_GNE.isfinite() & host_GN[..., None]).nonzero()
    if len(bad):
        group, token, expert = bad[0].tolist()
        raise ValueError(
            f"the score of token {token} of routing group {group} for expert {expert} is "
            f"{host_GNE[group, token, expert].item()}: a balanced assignment needs finite scores. The router has "
            "diverged; try a lower learning rate or moe.z_coefficient"
        )
    for scores_NE, valid_N, assigned_NE in zip(host_GNE, host_GN, assigned_GNE, strict=True):
        (token_A,) = valid_N.nonzero(as_tuple=True)
        if len(token_A):
            assigned_NE[token_A, _best_experts(scores_NE[token_A])] = True
    return assigned_GNE.to(scores_GNE.device)


def _best_experts(scores_NE: Tensor) -> Tensor:
    """int64 (N,) expert of each token, as a linear assignment of rows to columns, as many of one as of the other.

    Each expert has floor(N/E) columns that a token must fill and, if there is a remainder, one that either a token or
    a blank row fills. Adding a number to all of an expert's columns moves every assignment's total alike; the numbers
    that Sinkhorn finds nearly balance the loads beforehand and save the solver up to nine tenths of its time.
    """
    tokens, experts = scores_NE.shape
    least, remainder = divmod(tokens, experts)
    scale = _TEMPERATURE * scores_NE.std(correction=0).item() or 1.0
    bias_E = scale * sinkhorn_bias(scores_NE[None] / scale)[0, 0].numpy()
    priced_NE = scores_NE.numpy() + bias_E
    matrix = np.repeat(priced_NE, least, axis=1)
    if remainder:
        blanks = experts - remainder
        forbidden = np.full((blanks, least * experts), -np.inf)
        matrix = np.block([[matrix, priced_NE], [forbidden, np.tile(bias_E, (blanks, 1))]])
    _, column_N = linear_sum_assignment(matrix, maximize=True)
    expert_of_column = np.concatenate((np.repeat(np.arange(experts), least), np.arange(experts)))
    return torch.from_numpy(expert_of_column[column_N[:tokens]])


class BaseAssignmentRouter(Router):
    """Balanced assignment in training, each token's best expert in evaluation; of equals the lowest expert."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Orthogonal rows of length 0.1, as in fairseq; with more experts than inputs, orthogonal columns."""
        wide = self.weight_ED.shape[0] <= self.weight_ED.shape[1]
        basis, triangle = torch.linalg.qr(self.weight_ED.T if wide else self.weight_ED)
        basis = 0.1 * basis * triangle.diagonal().sign()  # the decomposition is unique up to these signs
        self.weight_ED.copy_(basis.T if wide else basis)

    def score(self, logits_TE: Tensor) -> Tensor:
        """See `Router.score`."""
        return logits_TE.sigmoid()

    def decide(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Decision:
        """See `Router.decide`; raises as `balanced_assignment` does."""
        if context.mode == "causal":
            mask_TE = top_k_mask(logits_TE, 1)  # logits: a sigmoid can saturate to ties
            return Decision.from_mask(mask_TE if context.valid_T is None else mask_TE & context.valid_T[:, None])
        group = RoutingGroup("flat", self.config.group_sequences, context.sequence_length)
        valid_GN = context.valid_GN(group)
        return Decision.from_mask(from_groups(balanced_assignment(to_groups(logits_TE, group), valid_GN), group))

    def decision_distance(self, routing: Routing) -> Tensor:
        """See `Router.decision_distance`: to the middle between the token's two largest scores."""
        return top_k_distance(routing.scores(), 1)
