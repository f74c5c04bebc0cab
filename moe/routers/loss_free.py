"""Balance without a loss: a bias on the selection, never on the weights (Wang et al. 2024, algorithm 1).

A token takes the k largest of sigmoid(logit) + bias; the combine weight is the sigmoid alone. Once for each global
batch an expert's bias moves by `bias_rate` towards more load if it had less than the mean, and towards less if more.
DeepSeek-V3 (section 2.1.2) adds the limit to groups of experts: only the `expert_groups_kept` groups with the largest
sum of their two best biased scores are eligible; it also divides the weights by their sum (`renormalize = true`).
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor

from moe.config import MoEConfig
from moe.routers.selection import top_k_distance, top_k_mask
from moe.routers.token_choice import TokenChoiceRouter
from moe.routing import Routing


class LossFreeRouter(TokenChoiceRouter):
    """Top-k of biased sigmoid scores.

    Attributes:
        bias_E: fp32, has no gradient; its mean is 0, since a common part would change no choice.
    """

    counts_load = True
    bias_E: Tensor

    def __init__(self, config: MoEConfig, width: int, layer: int = 0) -> None:
        super().__init__(config, width, layer)
        self.register_buffer("bias_E", torch.empty(config.num_experts, dtype=torch.float32))

    def reset_buffers(self) -> None:
        """See `Router.reset_buffers`."""
        super().reset_buffers()
        self.bias_E.zero_()

    def score(self, logits_TE: Tensor) -> Tensor:
        """See `Router.score`."""
        return logits_TE.sigmoid()

    def ranking(self, scores_TE: Tensor) -> Tensor:
        """Biased scores; -inf in groups that are not kept, since 0 would beat a negative biased score."""
        biased_TE = scores_TE + self.bias_E
        if self.config.expert_groups_kept == self.config.expert_groups:
            return biased_TE
        kept_TM = top_k_mask(self._group_scores(biased_TE), self.config.expert_groups_kept)
        return biased_TE.masked_fill(~self._spread(kept_TM), -torch.inf)

    def decision_distance(self, routing: Routing) -> Tensor:
        """See `Router.decision_distance`: also how far the expert's group is from being kept or not."""
        distance_TE = super().decision_distance(routing)
        if self.config.expert_groups_kept == self.config.expert_groups:
            return distance_TE
        # Where k experts are kept in all, none of them can lose to another: not -inf less -inf.
        distance_TE = distance_TE.masked_fill(distance_TE.isnan(), torch.inf)
        group_TM = self._group_scores(routing.scores() + self.bias_E)
        return torch.minimum(distance_TE, self._spread(top_k_distance(group_TM, self.config.expert_groups_kept)))

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the biases once, by the load of the whole step."""
        experts = self.config.num_experts
        total = self.step_load_E.sum()
        missing_E = total - experts * self.step_load_E  # in whole numbers: an even load must give exactly 0
        if self.config.bias_update == "sign":
            self.bias_E += self.config.bias_rate * missing_E.sign()
        else:  # in units of the mean load: -(E - 1) to 1
            self.bias_E += self.config.bias_rate * missing_E / total.clamp_min(1)
        self.bias_E -= self.bias_E.mean()
        super().after_step()

    def _group_scores(self, biased_TE: Tensor) -> Tensor:
        """(T, groups): sum of the group's two best."""
        grouped_TME = rearrange(biased_TE, "t (m e) -> t m e", m=self.config.expert_groups)
        return grouped_TME.topk(min(2, grouped_TME.shape[-1]), dim=-1).values.sum(-1)

    def _spread(self, values_TM: Tensor) -> Tensor:
        """A group's value for each of its experts."""
        return repeat(values_TM, "t m -> t (m e)", e=self.config.num_experts // self.config.expert_groups)
