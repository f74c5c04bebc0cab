"""Soft mixture of experts: experts work on slots, which are mixtures of tokens (Puigcerver et al. 2023, section 2.1).

It makes no routing decision, hence no `Routing`: every token of a group contributes to every slot and takes from
every slot. Within a `flat` or `chunk` group of a language model that leaks the future with full bandwidth. For the
causal mode, in which every model is evaluated and served, each token is a group of its own: all slots then hold that
token, and the layer is a mixture of all its experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.groups import RoutingGroup
from moe.layer import Experts
from moe.modules import FeedForward
from moe.routing import Routing, RoutingContext, from_groups, to_groups


class Slots(nn.Module):
    """How much each token has to do with each slot: fp32 cosines, scaled (section 2.3).

    Attributes:
        slot_MD: direction of each slot, (E * P, D), expert by expert; P is `slots_per_expert`.
        scale_1: factor on the cosines, learned from 1.
    """

    def __init__(self, slots: int, width: int) -> None:
        super().__init__()
        self.slot_MD = nn.Parameter(torch.empty(slots, width))
        self.scale_1 = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        """Parameters that do not start from the model's usual normal distribution."""
        nn.init.ones_(self.scale_1)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) of any floating type -> (T, M)."""
        with torch.autocast(x_TD.device.type, enabled=False):
            slot_MD = F.normalize(self.slot_MD.float(), dim=1)
            return self.scale_1.float() * (F.normalize(x_TD.float(), dim=1) @ slot_MD.T)


class SoftMoELayer(nn.Module):
    """Experts on slots, with an optional shared expert that every token passes."""

    def __init__(self, config: MoEConfig, width: int, index: int) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.experts = Experts(config, width)
        self.shared = FeedForward(width, config.shared_width) if config.shared_width else None
        self.slots = Slots(config.num_experts * config.slots_per_expert, width)

    def forward(self, x_BSD: Tensor, context: RoutingContext) -> Tensor:
        """(B, S, D) -> (B, S, D), without the residual connection; 0 at padding."""
        x_TD = x_BSD.flatten(0, 1)
        if context.valid_T is not None:  # padding may hold anything, and 0 times the gradient of a NaN is a NaN
            x_TD = torch.where(context.valid_T[:, None], x_TD, 0.0)
        affinity_TM: Tensor = self.slots(x_TD)
        mix = self._alone if context.mode == "causal" else self._together
        y_TD = mix(x_TD, affinity_TM, context)
        if context.valid_T is not None:
            y_TD = torch.where(context.valid_T[:, None], y_TD, 0.0)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view_as(x_BSD)

    def _together(self, x_TD: Tensor, affinity_TM: Tensor, context: RoutingContext) -> Tensor:
        """Slots over each routing group (section 2.1, eq. 1-3)."""
        config = self.config
        group = RoutingGroup(config.group, config.group_sequences, context.sequence_length, config.chunk_length)
        dispatch_TM = affinity_TM
        if context.valid_T is not None:
            # A finite floor: the softmax over a group of padding only must stay a number.
            dispatch_TM = affinity_TM.masked_fill(~context.valid_T[:, None], torch.finfo(affinity_TM.dtype).min)
        dispatch_GNM = to_groups(dispatch_TM, group).softmax(1)
        slots_GMD = dispatch_GNM.transpose(1, 2).to(x_TD.dtype) @ to_groups(x_TD, group)
        groups, experts = slots_GMD.shape[0], config.num_experts
        rows = rearrange(slots_GMD, "g (e p) d -> (e g p) d", e=experts)
        out = self.experts(rows, _equal_runs(experts, groups * config.slots_per_expert, rows.device))
        out_GMD = rearrange(out, "(e g p) d -> g (e p) d", e=experts, g=groups)
        combine_GNM = to_groups(affinity_TM, group).softmax(2)
        return from_groups(combine_GNM.to(out.dtype) @ out_GMD, group)

    def _alone(self, x_TD: Tensor, affinity_TM: Tensor, context: RoutingContext) -> Tensor:
        """Every token a group of one: all slots hold it, and it takes every expert by its slots' weight."""
        weight_TE = rearrange(affinity_TM.softmax(1), "t (e p) -> t e p", e=self.config.num_experts).sum(-1)
        tokens, experts = weight_TE.shape
        routing = _equal_runs(experts, tokens, x_TD.device)
        routing.token_A = torch.arange(tokens, device=x_TD.device).repeat(experts)
        routing.weight_A, routing.num_tokens = weight_TE.T.reshape(-1), tokens
        return self.experts(x_TD, routing)


def _equal_runs(experts: int, rows: int, device: torch.device) -> Routing:
    """Rows in expert order, the same number for each expert."""
    offsets_E = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows
    return Routing(None, offsets_E, None, experts * rows, capacity=rows)
