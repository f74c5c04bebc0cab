"""Which losses a mixture layer adds, normalised over the whole optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.groups import RoutingGroup
from moe.losses import global_balance, importance, mutual_information, orthogonality, router_z, switch_balance
from moe.routers.base import Router
from moe.routing import Routing, RoutingContext, to_groups

# Every loss there may be, in the order in which processes tell each other their values.
LOSSES = (
    "balance", "importance", "negative_mutual_information", "z", "orthogonality", "predictor", "load", "l1"
)  # fmt: skip


def auxiliary_losses(
    router: Router, routing: Routing, context: RoutingContext
) -> dict[str, tuple[float | Tensor, Tensor]]:
    """(coefficient, value) of every loss that the configuration asks for, and of the router's own.

    A value is this pass' part of the step's: the parts of all micro-batches and processes add up to the mean over the
    step's tokens or routing groups, so that neither their number nor their sizes change a gradient.
    """
    config = router.config
    group = RoutingGroup("flat", config.group_sequences, context.sequence_length)
    losses = dict(routing.own_losses)
    if config.balance_coefficient:
        losses["balance"] = config.balance_coefficient, _balance(router, routing, context)
    if config.importance_coefficient:
        gates_GNE = to_groups(_gates(router, routing, context), group)
        value = context.per_group(importance(gates_GNE, context.valid_GN(group)))
        losses["importance"] = config.importance_coefficient, value
    if config.mutual_information_coefficient:
        scores_GNE = to_groups(routing.scores(), group)
        value = context.per_group(-mutual_information(scores_GNE, context.valid_GN(group)))
        losses["negative_mutual_information"] = config.mutual_information_coefficient, value
    if config.z_coefficient:
        value = context.per_token(router_z(routing.logits(), routing.valid_T))
        losses["z"] = config.z_coefficient, value
    if config.orthogonality_coefficient:
        # A matter of the weights alone: each pass takes the part of it that its tokens are of the step's. Its gradient
        # is the router's business, see `Router.logits`.
        value = context.part_of_step(routing.offsets_E.device) * orthogonality(router.weight_ED.detach())
        losses["orthogonality"] = config.orthogonality_coefficient, value
    return losses


def _gates(router: Router, routing: Routing, context: RoutingContext) -> Tensor:
    """(T, E) combine weights of what was asked for: what a capacity drops is the imbalance that importance is about."""
    decision = context.decisions[router.layer]
    if decision.chosen_TE is None:
        return routing.weight_TE()
    return torch.where(decision.chosen_TE, router.weights(routing.scores(), decision), 0.0)


def _balance(router: Router, routing: Routing, context: RoutingContext) -> Tensor:
    config = router.config
    if config.balance_scope == "global":
        return context.per_token(global_balance(routing.scores(), router.load_E, routing.valid_T))
    sequences = 1 if config.balance_scope == "sequence" else config.group_sequences
    group = RoutingGroup("flat", sequences, context.sequence_length)
    chosen_TE, experts_per_token = router.balance_choice(routing)
    scores_GNE, chosen_GNE = to_groups(routing.scores(), group), to_groups(chosen_TE, group)
    # The mean over a group's sequences is the group's value, so that both scopes divide by the step's groups.
    balance_G = switch_balance(scores_GNE, chosen_GNE, experts_per_token, context.valid_GN(group))
    return context.per_group(balance_G.view(-1, config.group_sequences // sequences).mean(1))
