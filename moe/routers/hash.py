"""Hash layers: experts are a fixed function of the token id (Roller et al. 2021); a baseline that learns no routing.

Expert j of a token is (id + j * floor(E / k)) mod E, with weight 1/k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.config import MoEConfig
from moe.routers.base import Router
from moe.routing import Decision, Routing, RoutingContext


class HashRouter(Router):
    """Routes by id; has no parameters."""

    def __init__(self, config: MoEConfig, width: int, layer: int = 0) -> None:
        super().__init__(config, width, layer)
        self.register_parameter("weight_ED", None)

    def forward(self, x_TD: Tensor, context: RoutingContext) -> Routing:
        """See `Router.forward`. Scores are 1/k for the token's experts; logits are 0.

        Raises:
            ValueError: the context carries no token ids.
        """
        if context.token_BS is None:
            raise ValueError("a hash router needs token ids: set RoutingContext.token_BS (the model does)")
        k, experts = self.config.experts_per_token, self.config.num_experts
        choice_K = torch.arange(k, device=x_TD.device) * (experts // k)
        expert_TK = (context.token_BS.reshape(-1, 1) + choice_K) % experts
        logits_TE = torch.zeros(x_TD.shape[0], experts, device=x_TD.device)
        return self.select(logits_TE.scatter(1, expert_TK, 1 / k), logits_TE, context)

    def decide(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Decision:
        """See `Router.decide`."""
        chosen_TE = scores_TE > 0
        return Decision.from_mask(chosen_TE if context.valid_T is None else chosen_TE & context.valid_T[:, None])
