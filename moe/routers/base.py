"""What all routers share: the projection, the scores, replay under recompute, and state that stays in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe import noise
from moe.config import MoEConfig
from moe.losses import attach_loss, orthogonality
from moe.routing import Decision, Routing, RoutingContext, recomputing


class Router(nn.Module):
    """Scores tokens in fp32 and decides once; subclasses say how in `decide`.

    Buffers named `step_...` are sums over the tokens of the current optimizer step: zero between steps, never in
    checkpoints, and simply added up where several processes share a step.

    A NaN or infinite logit makes the token's scores NaN. Which experts it then gets is unspecified, but they exist, and
    the output is NaN where one takes it; a training step whose gradient is not finite is refused.

    Attributes:
        layer: number of the transformer block.
        weight_ED: the router's projection, kept and applied in fp32 whatever the model's precision, because nearly
            equal scores collapse into ties in bf16.
        load_E: fp32, each expert's share of the last global batch's assignments, before any was dropped; only where
            something uses it.
    """

    counts_load: ClassVar[bool] = False
    weight_ED: Tensor
    load_E: Tensor
    step_load_E: Tensor

    def __init__(self, config: MoEConfig, width: int, layer: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.weight_ED = nn.Parameter(torch.empty(config.num_experts, width, dtype=torch.float32))
        if self.keeps_load:
            self.register_buffer("load_E", torch.empty(config.num_experts, dtype=torch.float32))
            self.register_buffer("step_load_E", torch.empty(config.num_experts, dtype=torch.int64), persistent=False)

    @property
    def keeps_load(self) -> bool:
        """Whether the load of each global batch is counted."""
        return self.counts_load or self.config.balance_scope == "global"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow device moves, refuse casts: `model.to(torch.bfloat16)` must not round the router's state."""

        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move_only, recurse)

    def forward(self, x_TD: Tensor, context: RoutingContext) -> Routing:
        """Route tokens.

        Args:
            x_TD: inputs of any floating type.
            context: shape of the batch, padding, and the mode.

        Returns:
            The routing; its weights carry the gradient, its selection none.
        """
        # Autocast would quietly take the matmul back to bf16.
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = self.logits(self.router_input(x_TD, context), context)
            scores_TE = self.score(logits_TE)
        return self.select(scores_TE, logits_TE, context)

    def router_input(self, x_TD: Tensor, context: RoutingContext) -> Tensor:
        """fp32 inputs, jittered in training (Fedus et al. 2022, section 2.4); the experts' inputs are not."""
        x_TD = x_TD.float()
        if not self.config.jitter or context.mode != "train":
            return x_TD
        unit_TD = noise.uniform(context, self.layer, "jitter", x_TD.shape[1], x_TD.device)
        return x_TD * (1 + self.config.jitter * (2 * unit_TD - 1))

    def logits(self, x_TD: Tensor, context: RoutingContext) -> Tensor:
        """Router logits (T, E) of fp32 inputs.

        The orthogonality loss is a matter of the projection alone, and is attached to that: so it needs no path
        through the layer, where a pipeline that splits backward in two would go twice.
        """
        weight_ED, coefficient = self.weight_ED, self.config.orthogonality_coefficient
        if coefficient and context.mode == "train":
            value = context.part_of_step(x_TD.device) * orthogonality(weight_ED)
            weight_ED = attach_loss(weight_ED, coefficient * value / context.replicas)
        return x_TD @ weight_ED.T

    def score(self, logits_TE: Tensor) -> Tensor:
        """Scores from logits, as `config.score` says; in [0, 1] but for ReMoE's."""
        return logits_TE.softmax(-1) if self.config.score == "softmax" else logits_TE.sigmoid()

    def select(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Routing:
        """Decide without gradient, then weigh the decision with it."""
        if scores_TE.shape[0] != context.num_tokens:
            raise ValueError(
                f"{scores_TE.shape[0]} tokens were given; the context is for {context.batch} sequences of "
                f"{context.sequence_length}, {context.num_tokens} tokens"
            )
        decision = context.decisions.get(self.layer) if recomputing() else None
        if decision is None:
            with torch.no_grad():
                decision = self.decide(scores_TE.detach(), logits_TE.detach(), context)
                if self.config.forced_balance and context.mode != "causal":
                    decision = self._round_robin(scores_TE, context)
                if context.mode == "train" and self.keeps_load:
                    self.step_load_E += asked_for(decision, context)
            if context.mode == "train":
                context.decisions[self.layer] = decision
        return self.weigh(decision, scores_TE, logits_TE, context)

    def weigh(self, decision: Decision, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Routing:
        """The routing of a decision."""
        weights_TE = self.weights(scores_TE, decision)
        if self.config.route_scale != 1:
            weights_TE = weights_TE * self.config.route_scale
        return Routing.from_decision(decision, weights_TE, scores_TE, logits_TE, context.valid_T)

    def decide(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Decision:
        """Which token goes to which expert. Every router defines this; it also records what balance needs.

        Called once for each pass, never again under activation recompute.

        Args:
            scores_TE: fp32, detached.
            logits_TE: fp32, detached.
            context: shape of the batch, padding, and the mode.
        """
        raise AssertionError(f"{type(self).__name__} does not define decide")  # pragma: no cover

    def weights(self, scores_TE: Tensor, decision: Decision) -> Tensor:
        """Combine weights of all pairs, before route_scale: the scores, unless a router says otherwise."""
        return scores_TE

    def decision_distance(self, routing: Routing) -> Tensor:
        """How far each pair is from being decided otherwise by causal routing, in scores: (T, E), >= 0.

        Infinite unless a router says otherwise: no difference in routing is then excused by rounding.
        """
        return torch.full_like(routing.scores(), torch.inf)

    def balance_choice(self, routing: Routing) -> tuple[Tensor, int]:
        """What the balance loss counts: bool (T, E), and how many experts of a token that is."""
        chosen_TE = routing.assigned_TE() if routing.chosen_TE is None else routing.chosen_TE
        return chosen_TE, self.config.experts_per_token

    def _round_robin(self, scores_TE: Tensor, context: RoutingContext) -> Decision:
        """Token t of the step takes experts t*k, t*k + 1, ..., t*k + k - 1 (mod E)."""
        num_tokens, num_experts = scores_TE.shape
        k = self.config.experts_per_token
        choice_A = torch.arange(num_tokens * k, device=scores_TE.device) + context.first_token * k
        expert_TK = (choice_A % num_experts).view(num_tokens, k)
        mask_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(1, expert_TK, True)
        if context.valid_T is not None:
            mask_TE &= context.valid_T[:, None]
        return Decision.from_mask(mask_TE, mask_TE)

    def reset_parameters(self) -> None:
        """Parameters that do not start from the model's usual normal distribution, once that has been drawn."""

    def reset_buffers(self) -> None:
        """Fill the buffers of a model that was built without memory. A router with buffers of its own extends this."""
        self.forget_step()
        if self.keeps_load:
            self.load_E.fill_(1 / self.config.num_experts)

    @torch.no_grad()
    def after_step(self) -> None:
        """Update balance state once per optimizer step, from what was recorded."""
        if self.keeps_load:
            total = self.step_load_E.sum()
            self.load_E.copy_(torch.where(total > 0, self.step_load_E / total.clamp_min(1), self.load_E))
        self.forget_step()

    @classmethod
    def after_step_together(
        cls, routers: Sequence[Router], over_stages: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Update the routers of all layers here, of which there may be none; for state that looks at all of them.

        Args:
            routers: in layer order.
            over_stages: see `moe.model.update_routers`.
        """
        for router in routers:
            router.after_step()

    def forget_step(self) -> None:
        """Drop what was recorded of a step, because it is done or not taken."""
        for buffer in self.step_buffers():
            buffer.zero_()

    def step_buffers(self) -> list[Tensor]:
        """What was recorded of the current step."""
        return [buffer for name, buffer in self.named_buffers(recurse=False) if name.startswith("step_")]


def asked_for(decision: Decision, context: RoutingContext) -> Tensor:
    """int64 (E,): valid tokens that each expert was asked to take, also those that then did not fit."""
    if decision.chosen_TE is not None:
        return decision.chosen_TE.sum(0)
    counts_E = decision.offsets_E.diff(prepend=decision.offsets_E.new_zeros(1)).long()
    if context.valid_T is None or decision.capacity is None:  # ragged decisions hold valid tokens only
        return counts_E
    valid_A = context.valid_T[decision.token_A]
    return torch.zeros_like(counts_E).index_add_(0, decision.expert_A(), valid_A.long())
