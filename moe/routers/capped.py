"""Expert choice with at most b experts a token (EC-CAP; Zhou et al. 2022, section 3.3).

The paper solves a linear programme softened by an entropy, then lets every expert take its top C of the solution:

    max_A <S, A> + lambda H(A)   with   sum_n A[e, n] = C,   sum_e A[e, n] <= b,   0 <= A <= 1

The solution has a closed form in one price for each token and one level for each expert,

    A[e, n] = min(1, exp((S[e, n] - price[n] + level[e]) / lambda)),   price >= 0,

so that TopK(A) of an expert is the top C of its scores less the prices: a token in demand by more than b experts
becomes dearer until all but b turn elsewhere. That difference is what this file computes. Unlike A itself it neither
saturates at 1 nor underflows to 0, where entries would tie.

The cap is not strict, in the paper as here: A is fractional where scores nearly tie and not converged after a fixed
number of iterations, and the top C of A may then exceed b. Identical tokens have identical prices and cannot be told
apart: each expert takes the first C.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Dykstra's steps shrink with lambda, so it starts at a hundredfold and falls: see `capped_affinity`.
_FIRST_ENTROPY = 100.0


def capped_affinity(
    scores_GEN: Tensor, capacity: int, cap: int, iterations: int = 300, entropy: float = 1e-3
) -> Tensor:
    """What the experts rank their tokens by: scores less the prices of the tokens.

    Dykstra's algorithm (1985) for the three sets, in the logarithm: each step projects onto one set, in
    Kullback-Leibler divergence, after taking back that set's last correction. The corrections are the level, the
    price and the excess over 1 below.

    The paper runs at most 100 iterations at lambda = 0.001. From a cold start that is far from converged when scores
    are peaked, because every expert starts with its whole mass on its best token: the share of tokens above the cap
    hardly fell. Hence lambda falls geometrically to its value over the iterations, with the corrections kept. Of
    1,024 tokens with 2 of 16 experts on average and normal logits, a quarter have more than 2; with a cap of 2 one in
    thirty after 300 iterations and one in fifteen after 100.

    Padding is a token whose score is just below 0: it fills slots where the valid tokens have all their experts.

    Args:
        scores_GEN: fp32 scores in [0, 1]; -inf at padding.
        capacity: C, tokens an expert takes.
        cap: b, experts a token gets at most; E or more is plain expert choice.
        iterations: more come closer to the cap.
        entropy: lambda, in units of scores.

    Returns:
        (G, E, N), whose C largest of each row are the expert's choice.

    Raises:
        ValueError: if cap * N < C * E, more slots than the tokens may fill.
    """
    _, num_experts, tokens = scores_GEN.shape
    if cap >= num_experts:
        return scores_GEN
    if cap * tokens < capacity * num_experts:
        raise ValueError(
            f"{num_experts} experts with {capacity} slots each are more than {tokens} tokens with at most {cap} "
            f"experts each can fill: the cap must be at least {math.ceil(capacity * num_experts / tokens)}"
        )
    scores_GEN = scores_GEN.masked_fill(scores_GEN == -torch.inf, -entropy)
    price_G1N = torch.zeros_like(scores_GEN[:, :1])
    excess_GEN = torch.zeros_like(scores_GEN)
    for iteration in range(1, iterations + 1):
        scale = entropy * _FIRST_ENTROPY ** (1 - iteration / iterations)
        mass_GE1 = ((scores_GEN - price_G1N - excess_GEN) / scale).logsumexp(2, keepdim=True)
        offer_GEN = scores_GEN + scale * (math.log(capacity) - mass_GE1)
        demand_G1N = ((offer_GEN - excess_GEN) / scale).logsumexp(1, keepdim=True)
        price_G1N = (scale * (demand_G1N - math.log(cap))).clamp_min(0)
        excess_GEN = (offer_GEN - price_G1N).clamp_min(0)
    return scores_GEN - price_G1N
