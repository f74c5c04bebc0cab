"""Losses that keep a router healthy, and how they reach the gradient.

The mixture layer (`moe/layer.py`) normalises them over the whole optimizer step before it attaches them.

Conventions, for every loss here: natural logarithms; padding counts nowhere, neither in sums nor in divisors; layers
are **summed** (a coefficient means the same at any depth of one layer); a group of padding only contributes 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def switch_balance(
    scores_GNE: Tensor, assigned_GNE: Tensor, experts_per_token: int, valid_GN: Tensor | None = None
) -> Tensor:
    """Switch/GShard balance loss of each routing group: E * sum_e f_e * P_e.

    f_e is the share of the group's assignments that expert e is given (for top-k it sums to 1, because it is divided
    by `experts_per_token`) and carries no gradient; P_e is the mean probability of e. The value is 1 when routing and
    probabilities are uniform, and at most E. Libraries that do not divide f by k report k times this value.
    (Fedus et al. 2022, eq. 4-6; GShard, algorithm 1.)

    Args:
        scores_GNE: fp32 scores; normalised here so that each token's sum to 1 (sigmoid scores do not by themselves).
        assigned_GNE: bool, the router's choice before any token is dropped.
        experts_per_token: k.
        valid_GN: bool, False at padding.

    Returns:
        (G,) fp32, 0 for a group without a valid token.
    """
    num_experts = scores_GNE.shape[-1]
    if valid_GN is not None:
        # Replaced, not multiplied by 0: padding may hold anything, and 0 * inf is not 0, nor is its gradient.
        scores_GNE = torch.where(valid_GN[..., None], scores_GNE, 1.0)
    probability_GNE = scores_GNE / scores_GNE.sum(-1, keepdim=True).clamp_min(1e-20)
    assigned_GNE = assigned_GNE.to(scores_GNE.dtype)
    if valid_GN is None:
        tokens_G1 = torch.full_like(scores_GNE[:, :1, 0], scores_GNE.shape[1])
    else:
        keep_GN1 = valid_GN[..., None].to(scores_GNE.dtype)
        probability_GNE = probability_GNE * keep_GN1
        assigned_GNE = assigned_GNE * keep_GN1
        tokens_G1 = keep_GN1.sum(1).clamp_min(1)
    fraction_GE = (assigned_GNE.sum(1) / (tokens_G1 * experts_per_token)).detach()
    return num_experts * (fraction_GE * probability_GNE.sum(1) / tokens_G1).sum(-1)


def router_z(logits_TE: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """Router z-loss of each token: logsumexp(logits)^2, (ln E)^2 at zero logits (Zoph et al. 2022, eq. 5).

    Args:
        logits_TE: router logits; computed in fp32.
        valid_T: bool, False at padding, where the value is 0.

    Returns:
        (T,) fp32; the loss of a batch is the mean over its valid tokens.
    """
    logits_TE = logits_TE.float()
    if valid_T is None:
        return torch.logsumexp(logits_TE, -1).square()
    # Masked before and after: a logsumexp of infinite padding has no finite gradient to multiply by 0.
    z_T = torch.logsumexp(torch.where(valid_T[:, None], logits_TE, 0.0), -1).square()
    return torch.where(valid_T, z_T, 0.0)


class _AttachLoss(torch.autograd.Function):
    """Identity on an activation whose backward also starts a gradient of 1 at the loss."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, loss: Tensor) -> Tensor:
        """Hand the activation through."""
        ctx.save_for_backward(loss)
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The activation's gradient unchanged, and 1 for the loss."""
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def attach_loss(activation: Tensor, loss: Tensor) -> Tensor:
    """Make backward through `activation` also minimise `loss`, without handing the loss out of the model.

    The loss must already carry its coefficient and its normalisation over the whole optimizer step, since nothing
    scales it later: it does not pass through the scalar that `backward` is called on. Pipeline stages and activation
    recompute therefore need no plumbing.

    Args:
        activation: any tensor on the way to the output.
        loss: scalar.

    Returns:
        The activation.
    """
    return _AttachLoss.apply(activation, loss)
