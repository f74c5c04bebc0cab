"""The experts as a plain loop, for tests: every expert sees every token, and the routing only sets the weights.

Shapes do not depend on the routing, so a matrix product cannot change its last bits when some other token is routed
differently. That makes exact statements about causality testable.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.routing import Routing, run_of_row


def grouped_mlp_reference(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing) -> Tensor:
    """See `moe.kernels.grouped_mlp`. Costs E / k times the arithmetic."""
    rows = x_TD.shape[0] if routing.token_A is None else routing.token_A.shape[0]
    token_A = torch.arange(rows, device=x_TD.device) if routing.token_A is None else routing.token_A
    weight_A = torch.ones(rows, device=x_TD.device) if routing.weight_A is None else routing.weight_A
    expert_A = run_of_row(routing.offsets_E, rows)
    num_tokens, num_experts = x_TD.shape[0], routing.num_experts
    weight_TE = weight_A.new_zeros(num_tokens * num_experts).index_add(0, token_A * num_experts + expert_A, weight_A)
    y_TD = torch.zeros_like(x_TD)
    for weight_T, w13_2FD, w2_DF in zip(
        weight_TE.view(num_tokens, num_experts).unbind(1), w13_E2FD.unbind(0), w2_EDF.unbind(0), strict=True
    ):
        gate_FD, up_FD = w13_2FD.unbind(0)
        out_TD = (F.silu(x_TD @ gate_FD.T) * (x_TD @ up_FD.T)) @ w2_DF.T
        y_TD = y_TD + out_TD * weight_T.to(out_TD.dtype)[:, None]
    return y_TD
