"""Losses that keep a router healthy, and how they reach the gradient.

The mixture layer normalises them over the whole optimizer step before it attaches them.

Conventions, for every loss here: natural logarithms; fp32; padding counts nowhere, neither in sums nor in divisors;
layers are **summed** (a coefficient means the same at any depth of one layer); a group of padding only contributes 0.
A loss of whole groups (G,) is the mean over the step's groups, one of tokens (T,) the mean over its valid tokens: the
parts of micro-batches add up. How other libraries count is in `moe/loss_conventions.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Below this the noise is lost in the rounding of fp32 logits of order one.
_SMALLEST_NOISE = 1e-6


def switch_balance(
    scores_GNE: Tensor, assigned_GNE: Tensor, experts_per_token: int, valid_GN: Tensor | None = None
) -> Tensor:
    """Switch/GShard balance loss of each routing group: E * sum_e f_e * P_e.

    f_e is the share of the group's assignments that expert e is given (for top-k it sums to 1, because it is divided
    by `experts_per_token`) and carries no gradient; P_e is the mean probability of e. The value is 1 when routing and
    probabilities are uniform, and at most E/k. Libraries that do not divide f by k report k times this value.
    (Fedus et al. 2022, eq. 4-6; GShard, algorithm 1.)

    Args:
        scores_GNE: scores; normalised here so that each token's sum to 1 (sigmoid scores do not by themselves).
        assigned_GNE: bool, the router's choice before any token is dropped.
        experts_per_token: k.
        valid_GN: bool, False at padding.

    Returns:
        (G,) fp32, 0 for a group without a valid token.
    """
    num_experts = scores_GNE.shape[-1]
    probability_GNE, tokens_G1 = _probabilities(scores_GNE, valid_GN)
    fraction_GE = _fraction(assigned_GNE, experts_per_token, tokens_G1, valid_GN)
    return num_experts * (fraction_GE * probability_GNE.sum(1) / tokens_G1).sum(-1)


def global_balance(scores_TE: Tensor, fraction_E: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """Balance loss of each token against a given load: E * sum_e f_e * p_te.

    The f of a batch larger than this pass balances a corpus instead of every sequence (Qiu et al. 2025, "Demons in
    the detail": the f of the global batch). Here it is an earlier step's, so that no collective waits in the forward
    pass. The mean over valid tokens is the loss: `switch_balance` where f is the batch's own; exactly 1, with no
    gradient, at uniform f; at most E/k.

    Args:
        scores_TE: scores; normalised here so that each token's sum to 1.
        fraction_E: share of the assignments that each expert was given; sums to 1 (it is divided by k). Detached.
        valid_T: bool, False at padding.

    Returns:
        (T,) fp32, 0 at padding.
    """
    valid_GN = None if valid_T is None else valid_T[None]
    probability_GNE, _ = _probabilities(scores_TE[None], valid_GN)
    return scores_TE.shape[-1] * (probability_GNE[0] * fraction_E.detach().float()).sum(-1)


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


def importance(weights_GNE: Tensor, valid_GN: Tensor | None = None) -> Tensor:
    """Importance loss of each group: the squared coefficient of variation of sum_t w_te over experts.

    Variance of the population (divided by E). 0 at uniform routing, E - 1 when one expert has all the weight, E/k - 1
    when k share it. Scaling all weights together changes nothing, so neither k nor the number of tokens enters.
    Shazeer et al. 2017, eq. 6-7, where w are the gates after top-k; V-MoE (Riquelme et al. 2021) takes the softmax
    over all experts, which also reaches experts that were not chosen.

    Args:
        weights_GNE: combine weights or scores, at least 0, taken as they are (a token that weighs more counts more).
        valid_GN: bool, False at padding.

    Returns:
        (G,) fp32, 0 for a group whose weights are all 0.
    """
    return _squared_variation(_over_tokens(weights_GNE.float(), valid_GN))


def load(
    clean_logits_GNE: Tensor,
    noisy_logits_GNE: Tensor,
    noise_std_GNE: Tensor,
    experts_per_token: int,
    valid_GN: Tensor | None = None,
) -> Tensor:
    """Load loss of each group: the squared coefficient of variation of a smooth estimate of the experts' loads.

    The load of e is the sum over tokens of the chance that e would be chosen if its own noise were drawn anew:
    Phi((clean_e - the k-th highest noisy logit among the others) / std_e). Unlike a count it has a gradient, which
    flows through the clean logit, the deviation and the threshold. (Shazeer et al. 2017, eq. 8-11, appendix A.)

    0 at even loads, E/k - 1 when the same k experts are certain of every token; population variance, as in
    `importance`.
    With k = E every expert is certain and the loss is 0. Where a deviation is 0 (below 1e-6), or the clean logit lies
    over 10 deviations from the threshold (an expert masked with -inf), the chance is 0 or 1 (1/2 at an exact tie) and
    has no gradient: without any noise this loss teaches nothing.

    Args:
        clean_logits_GNE: logits without noise.
        noisy_logits_GNE: logits with the noise by which the experts were chosen.
        noise_std_GNE: standard deviation of that noise, at least 0.
        experts_per_token: k.
        valid_GN: bool, False at padding.

    Returns:
        (G,) fp32, 0 for a group without a valid token.

    Raises:
        ValueError: k is not from 1 to E.
    """
    num_experts = clean_logits_GNE.shape[-1]
    if not 1 <= experts_per_token <= num_experts:
        raise ValueError(
            f"experts_per_token = {experts_per_token}: must be from 1 to the number of experts, {num_experts}"
        )
    clean_GNE, noisy_GNE, std_GNE = clean_logits_GNE.float(), noisy_logits_GNE.float(), noise_std_GNE.float()
    if experts_per_token == num_experts:
        return clean_GNE.new_zeros(clean_GNE.shape[0])
    if valid_GN is not None:
        valid_GN1 = valid_GN[..., None]
        clean_GNE = torch.where(valid_GN1, clean_GNE, 0.0)
        noisy_GNE = torch.where(valid_GN1, noisy_GNE, 0.0)
        std_GNE = torch.where(valid_GN1, std_GNE, 1.0)
    top_GNK = noisy_GNE.topk(experts_per_token + 1, -1).values
    last_in_GN1, first_out_GN1 = top_GNK[..., -2:-1], top_GNK[..., -1:]
    # The k-th highest of the others: whoever is in has one more above the bar than whoever is out.
    margin_GNE = clean_GNE - torch.where(noisy_GNE > first_out_GN1, first_out_GN1, last_in_GN1)
    # Replaced before the division: its gradient at a vanishing deviation is infinite, and 0 * inf is not 0.
    certain_GNE = (std_GNE < _SMALLEST_NOISE) | (margin_GNE.abs() > 10 * std_GNE)
    smooth_GNE = torch.special.ndtr(torch.where(certain_GNE, 0.0, margin_GNE) / torch.where(certain_GNE, 1.0, std_GNE))
    chance_GNE = torch.where(certain_GNE, (margin_GNE.detach().sign() + 1) / 2, smooth_GNE)
    return _squared_variation(_over_tokens(chance_GNE, valid_GN))


def orthogonality(weight_ED: Tensor) -> Tensor:
    """SimBal's loss on the router's weights: the sum of the absolute entries of R R^T - I.

    The rows of R, one an expert, are the routers. 0 when they are orthonormal, E at zero weights; a plain sum over
    the E * E entries (not divided by E or E * E), summed over layers. With more experts than width it cannot reach 0:
    its minimum is E - D, where E - D experts' weights are 0, so use it with E <= D. The gradient is a sign, 0 at 0.
    (Omi et al. 2025, "Load balancing mixture of experts with similarity preserving routers"; their R is D x E.)

    Args:
        weight_ED: the router's matrix.

    Returns:
        fp32 scalar.
    """
    # Autocast would take the product to bf16, whose rounding alone leaves about 0.004 an entry.
    with torch.autocast(weight_ED.device.type, enabled=False):
        weight_ED = weight_ED.float()
        gram_EE = weight_ED @ weight_ED.T
    return (gram_EE - torch.eye(gram_EE.shape[0], device=gram_EE.device)).abs().sum()


def mutual_information(scores_GNE: Tensor, valid_GN: Tensor | None = None) -> Tensor:
    """Mutual information of token and expert in each group, in nats: H(mean_t p_t) - mean_t H(p_t).

    Maximised, so subtract it from a loss: the first term spreads the group over the experts, the second makes each
    token's choice sharp. 0 when all tokens have the same probabilities (uniform or collapsed), ln E when each token
    is certain and the experts are used evenly. It knows neither k nor which experts were taken.
    (As a loss on a router: Chen et al. 2023, "Mod-Squad", there between task and expert.)

    Args:
        scores_GNE: scores; normalised here so that each token's sum to 1. 0 ln 0 = 0, and a probability of exactly 0
            gets no gradient (its true one is infinite).
        valid_GN: bool, False at padding.

    Returns:
        (G,) fp32, 0 for a group without a valid token.
    """
    probability_GNE, tokens_G1 = _probabilities(scores_GNE, valid_GN)
    entropy_of_mean_G = _entropy(probability_GNE.sum(1) / tokens_G1)
    return entropy_of_mean_G - _entropy(probability_GNE).sum(1) / tokens_G1.squeeze(1)


def l1_sparsity(
    scores_GNE: Tensor, active_GNE: Tensor, experts_per_token: int, valid_GN: Tensor | None = None
) -> Tensor:
    """ReMoE's load-balanced L1 of each group: 1/N sum_t sum_e f_e R_te.

    f_e = E/(k N) sum_t [e is active for t] carries no gradient; it is 1 when each expert is active for a share k/E of
    the tokens, where the loss is the mean L1 norm of a token's R, and it weighs down experts that are active more
    often. The lower bound is 0, at no activity, so its coefficient must adapt to hold the sparsity. R is not
    normalised. (Wang et al. 2024, "ReMoE", the load-balancing refinement of its L1; the paper averages over layers,
    its code and this one sum.)

    Args:
        scores_GNE: R, the ReLU of the logits.
        active_GNE: bool, R > 0.
        experts_per_token: k, the number of active experts aimed at.
        valid_GN: bool, False at padding.

    Returns:
        (G,) fp32, 0 for a group without a valid token.
    """
    tokens_G1 = _token_count(scores_GNE, valid_GN)
    fraction_GE = _fraction(active_GNE, experts_per_token, tokens_G1, valid_GN)
    total_GE = _over_tokens(scores_GNE.float(), valid_GN)
    return scores_GNE.shape[-1] * (fraction_GE * total_GE / tokens_G1).sum(-1)


def _probabilities(scores_GNE: Tensor, valid_GN: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each token's scores divided by their sum, 0 at padding; and the group's valid tokens (G, 1), at least 1."""
    scores_GNE = scores_GNE.float()
    if valid_GN is not None:
        # Replaced, not multiplied by 0: padding may hold anything, and 0 * inf is not 0, nor is its gradient.
        scores_GNE = torch.where(valid_GN[..., None], scores_GNE, 0.0)
    return scores_GNE / scores_GNE.sum(-1, keepdim=True).clamp_min(1e-20), _token_count(scores_GNE, valid_GN)


def _token_count(scores_GNE: Tensor, valid_GN: Tensor | None) -> Tensor:
    """fp32 (G, 1): valid tokens of a group, 1 where there are none, to divide by."""
    groups, tokens, _ = scores_GNE.shape
    if valid_GN is None:
        return torch.full((groups, 1), float(tokens), device=scores_GNE.device)
    return valid_GN.sum(1, keepdim=True).clamp_min(1).float()


def _fraction(assigned_GNE: Tensor, experts_per_token: int, tokens_G1: Tensor, valid_GN: Tensor | None) -> Tensor:
    """(G, E) share of the k * N assignments; a count of bools, so without gradient."""
    return _over_tokens(assigned_GNE.float(), valid_GN) / (tokens_G1 * experts_per_token)


def _over_tokens(values_GNE: Tensor, valid_GN: Tensor | None) -> Tensor:
    """(G, E) sums over valid tokens."""
    return (values_GNE if valid_GN is None else torch.where(valid_GN[..., None], values_GNE, 0.0)).sum(1)


def _squared_variation(total_GE: Tensor) -> Tensor:
    """(G,) population variance over squared mean, 0 where all are 0. Divided first: squares of small sums underflow."""
    mean_G1 = total_GE.mean(1, keepdim=True)
    return ((total_GE - mean_G1) / mean_G1.clamp_min(1e-20)).square().mean(1)


def _entropy(probability: Tensor) -> Tensor:
    """Entropy over the last dim in nats."""
    return -(probability * torch.where(probability > 0, probability, 1.0).log()).sum(-1)


class _AttachLoss(torch.autograd.Function):
    """Identity on an activation whose backward also starts a gradient of 1 at the loss."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, loss: Tensor) -> Tensor:
        """Hand the activation through."""
        ctx.save_for_backward(loss)
        if torch.compiler.is_compiling():
            # A view of a compiled graph's input is made outside the graph, where nobody would start the loss' gradient.
            return activation.clone()
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
