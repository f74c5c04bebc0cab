"""GShard's top-2 gating with a random second expert (Lepikhin et al. 2020, algorithm 1).

g1 and g2 are the two largest of the softmax, divided by their sum. In training the second expert is asked with
probability min(1, 2 g2) only; the weight of the first stays what it was. The paper fills capacities by choice
(`drop_order = "choice"`: all first choices before any second one), which lets later tokens displace earlier ones;
the default order here does not.
"""

from __future__ import annotations

from torch import Tensor

from moe import noise
from moe.routers.selection import top_k_mask
from moe.routers.token_choice import TokenChoiceRouter
from moe.routing import Decision, Routing, RoutingContext


class GShardRouter(TokenChoiceRouter):
    """Top-2. The balance loss of scope `sequence` or `group` counts first choices only, as the paper's does."""

    def score(self, logits_TE: Tensor) -> Tensor:
        """See `Router.score`."""
        return logits_TE.softmax(-1)

    def choose(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        """See `TokenChoiceRouter.choose`."""
        top_two_TE = top_k_mask(scores_TE, 2)
        if context.mode != "train":
            return top_two_TE
        first_TE = top_k_mask(scores_TE, 1)
        weight_TE = self._share_of_top_two(scores_TE)
        uniform_T1 = noise.uniform(context, self.layer, "second expert", 1, scores_TE.device)
        return first_TE | (top_two_TE & (2 * weight_TE > uniform_T1))

    def balance_choice(self, routing: Routing) -> tuple[Tensor, int]:
        """See `Router.balance_choice`."""
        first_TE = top_k_mask(routing.scores(), 1)
        return (first_TE if routing.valid_T is None else first_TE & routing.valid_T[:, None]), 1

    def weights(self, scores_TE: Tensor, decision: Decision) -> Tensor:
        """See `Router.weights`: shares of the two, whether or not the second is asked."""
        return self._share_of_top_two(scores_TE)

    @staticmethod
    def _share_of_top_two(scores_TE: Tensor) -> Tensor:
        return scores_TE / scores_TE.topk(2, dim=-1).values.sum(-1, keepdim=True)
