"""A linear guess of whether an expert will choose a token, from the token alone (Raposo et al. 2024, section 3.5)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Predictor(nn.Module):
    """One logistic regression for each expert, on inputs that pass no gradient back.

    Args:
        num_experts: E.
        width: D of the inputs.
        share: of the tokens that an expert takes; the guess starts from it.
    """

    def __init__(self, num_experts: int, width: int, share: float) -> None:
        super().__init__()
        self.share = share
        self.weight_ED = nn.Parameter(torch.empty(num_experts, width, dtype=torch.float32))
        self.bias_E = nn.Parameter(torch.empty(num_experts, dtype=torch.float32))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Every token is guessed alike at first."""
        self.weight_ED.zero_()
        share = min(max(self.share, 1e-3), 1 - 1e-3)
        self.bias_E.fill_(math.log(share / (1 - share)))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Log-odds (T, E) that the expert takes the token: above 0 it is guessed to."""
        with torch.autocast(x_TD.device.type, enabled=False):
            return F.linear(x_TD.detach().float(), self.weight_ED, self.bias_E)

    def loss(self, guess_TE: Tensor, taken_TE: Tensor, valid_T: Tensor | None = None) -> Tensor:
        """(T,) binary cross-entropy, mean over experts; 0 at padding. ln 2 at log-odds of 0."""
        loss_T = F.binary_cross_entropy_with_logits(guess_TE, taken_TE.float(), reduction="none").mean(1)
        return loss_T if valid_T is None else torch.where(valid_T, loss_T, 0.0)
