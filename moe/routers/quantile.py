"""Quantile balancing: a bias that is set, not nudged, by the last global batch.

A token takes the k largest of score - beta. With alpha the token's (k+1)-th largest such value, expert e is taken by
exactly the tokens with score - alpha > beta_e: so the beta_e that gives it its share of N k / E tokens is the
(N k / E + 1)-th largest of score - alpha. It is computed over each routing group, averaged over the step, and used
from the next step on, which keeps routing causal. (As in Megatron-LM; combine weights are the plain scores.)

Alpha depends on beta in turn, so a step is one round of an alternation and not its end: on one fixed batch the
overload of the fullest expert shrinks to a few percent within ten steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.config import MoEConfig
from moe.groups import RoutingGroup
from moe.routers.token_choice import TokenChoiceRouter
from moe.routing import Decision, RoutingContext, to_groups


class QuantileRouter(TokenChoiceRouter):
    """Top-k of scores less a quantile.

    Attributes:
        beta_E: fp32, no gradient; its mean is 0, since a common part would change no choice.
    """

    beta_E: Tensor
    step_sum_E: Tensor
    step_groups: Tensor

    def __init__(self, config: MoEConfig, width: int, layer: int = 0) -> None:
        super().__init__(config, width, layer)
        self.register_buffer("beta_E", torch.empty(config.num_experts, dtype=torch.float32))
        self.register_buffer("step_sum_E", torch.empty(config.num_experts, dtype=torch.float32), persistent=False)
        self.register_buffer("step_groups", torch.empty((), dtype=torch.float32), persistent=False)

    def reset_buffers(self) -> None:
        """See `Router.reset_buffers`."""
        super().reset_buffers()
        self.beta_E.zero_()

    def ranking(self, scores_TE: Tensor) -> Tensor:
        """See `TokenChoiceRouter.ranking`."""
        return scores_TE - self.beta_E

    def decide(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Decision:
        """See `Router.decide`."""
        if context.mode == "train" and self.config.experts_per_token < self.config.num_experts:
            self._record(scores_TE, context)
        return super().decide(scores_TE, logits_TE, context)

    def _record(self, scores_TE: Tensor, context: RoutingContext) -> None:
        """Note each group's quantiles."""
        k, num_experts = self.config.experts_per_token, self.config.num_experts
        alpha_T1 = self.ranking(scores_TE).topk(k + 1, dim=1).values[:, k:]
        margin_TE = scores_TE - alpha_T1
        group = RoutingGroup("flat", self.config.group_sequences, context.sequence_length)
        valid_T = torch.ones_like(scores_TE[:, 0], dtype=torch.bool) if context.valid_T is None else context.valid_T
        tokens_G1 = to_groups(valid_T[:, None], group).sum(1)
        falling_GNE = to_groups(margin_TE.masked_fill(~valid_T[:, None], -torch.inf), group).sort(1, descending=True)
        place_G1E = (tokens_G1 * k // num_experts)[:, :, None].expand(-1, 1, num_experts)
        quantile_GE = falling_GNE.values.gather(1, place_G1E).squeeze(1)
        seen_G1 = tokens_G1 > 0  # a group of padding has no quantile
        self.step_sum_E += torch.where(seen_G1, quantile_GE, 0.0).sum(0)
        self.step_groups += seen_G1.sum()

    @torch.no_grad()
    def after_step(self) -> None:
        """Take over the step's mean quantiles."""
        mean_E = self.step_sum_E / self.step_groups.clamp_min(1)
        self.beta_E.copy_(torch.where(self.step_groups > 0, mean_E - mean_E.mean(), self.beta_E))
        super().after_step()
