"""Noisy top-k gating (Shazeer et al. 2017, section 2.1, eq. 3-5): the first mixture layer of this kind.

H = x W + normal * softplus(x W_noise); the gates are the softmax over the k largest of H. In evaluation there is no
noise. Balance is left to the importance and load losses (eq. 6-11): `importance_coefficient`, `load_coefficient`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe import noise
from moe.config import MoEConfig
from moe.groups import RoutingGroup
from moe.losses import load
from moe.routers.token_choice import TokenChoiceRouter, renormalized
from moe.routing import Decision, Routing, RoutingContext, to_groups


class NoisyTopKRouter(TokenChoiceRouter):
    """Top-k of noisy logits.

    Attributes:
        noise_ED: projection to the deviation of each logit's noise; zero at first, as is the paper's.
    """

    def __init__(self, config: MoEConfig, width: int, layer: int = 0) -> None:
        super().__init__(config, width, layer)
        self.noise_ED = nn.Parameter(torch.empty(config.num_experts, width, dtype=torch.float32))

    def reset_parameters(self) -> None:
        """See `Router.reset_parameters`."""
        nn.init.zeros_(self.noise_ED)

    def forward(self, x_TD: Tensor, context: RoutingContext) -> Routing:
        """See `Router.forward`."""
        if context.mode != "train":
            return super().forward(x_TD, context)
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = self.router_input(x_TD, context)
            clean_TE = self.logits(x_TD, context)
            deviation_TE = F.softplus(x_TD @ self.noise_ED.T)
            noise_TE = noise.normal(context, self.layer, "noisy top-k", clean_TE.shape[1], clean_TE.device)
            logits_TE = clean_TE + noise_TE * deviation_TE
        routing = self.select(self.score(logits_TE), logits_TE, context)
        if self.config.load_coefficient:
            group = RoutingGroup("flat", self.config.group_sequences, context.sequence_length)
            valid_GN = context.valid_GN(group)
            clean_GNE, noisy_GNE, std_GNE = (to_groups(v, group) for v in (clean_TE, logits_TE, deviation_TE))
            load_G = load(clean_GNE, noisy_GNE, std_GNE, self.config.experts_per_token, valid_GN)
            routing.own_losses["load"] = (self.config.load_coefficient, context.per_group(load_G))
        return routing

    def score(self, logits_TE: Tensor) -> Tensor:
        """See `Router.score`."""
        return logits_TE.softmax(-1)

    def weights(self, scores_TE: Tensor, decision: Decision) -> Tensor:
        """See `Router.weights`: a softmax over the chosen logits is the renormalised softmax over all."""
        assert decision.chosen_TE is not None
        return renormalized(scores_TE, decision.chosen_TE)
