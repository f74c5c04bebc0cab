"""Which experts take the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


def coactivation(assigned_TE: np.ndarray) -> np.ndarray:
    """float64 (E, E): N_ij / N_i, the share of expert i's tokens that expert j takes too, over all pairs of experts.

    The diagonal, and the row of an expert without tokens, are nan.
    When every token has k experts drawn alike, every entry is (k - 1)/(E - 1). Counting only experts of adjacent rank
    gives 2/k of that: a quarter at k = 8.
    """
    taken_TE = assigned_TE.astype(np.float32)  # sums stay exact below 2^24 tokens
    both_EE = (taken_TE.T @ taken_TE).astype(np.float64)
    count_E = both_EE.diagonal().copy()
    np.fill_diagonal(both_EE, np.nan)
    return np.divide(both_EE, count_E[:, None], out=np.full_like(both_EE, np.nan), where=count_E[:, None] > 0)


def null(assigned_TE: np.ndarray) -> float:
    """What every entry of `coactivation` would be if each token's experts were drawn alike.

    sum f(f-1) / sum f / (E-1), f the token's number of experts; (k - 1)/(E - 1) where all have k.
    """
    fan_out_T = assigned_TE.sum(1).astype(np.float64)
    total, experts = fan_out_T.sum(), assigned_TE.shape[1]
    return float((fan_out_T * (fan_out_T - 1)).sum() / total / (experts - 1)) if total and experts > 1 else math.nan


def unevenness(share_EE: np.ndarray) -> float:
    """Root mean square of the off-diagonal entries' distance from their mean: 0 when all pairs are alike."""
    return float(np.nanstd(share_EE)) if np.isfinite(share_EE).any() else math.nan


@dataclass(frozen=True)
class Pairing:
    """How unevenly experts share tokens.

    Attributes:
        share_EE: see `coactivation`.
        null: see `null`.
        found: see `unevenness`.
        null_mean, null_95: of the same, when each token's experts are drawn anew by the loads alone.
        strongest: (i, j, share) of the largest entry; None where there is none.
    """

    share_EE: np.ndarray
    null: float
    found: float
    null_mean: float
    null_95: float
    strongest: tuple[int, int, float] | None


def pairing(assigned_TE: np.ndarray, draws: int = 10, most_tokens: int = 20_000, seed: int = 0) -> Pairing:
    """Co-activation beside the null that keeps every token's number of experts and, about, the experts' loads.

    Args:
        assigned_TE: who took which token.
        draws: of the null.
        most_tokens: evenly spaced tokens are taken where there are more.
        seed: of the null.
    """
    assigned_TE = assigned_TE[:: max(1, math.ceil(len(assigned_TE) / most_tokens))]
    share_EE = coactivation(assigned_TE)
    generator = np.random.default_rng(seed)
    values = [unevenness(coactivation(redrawn(assigned_TE, generator))) for _ in range(draws)]
    strongest = None
    if np.isfinite(share_EE).any():
        i, j = divmod(int(np.nanargmax(share_EE)), share_EE.shape[1])
        strongest = (i, j, float(share_EE[i, j]))
    return Pairing(
        share_EE,
        null(assigned_TE),
        unevenness(share_EE),
        float(np.mean(values)),
        float(np.quantile(values, 0.95)),
        strongest,
    )


def redrawn(assigned_TE: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Each token with as many experts as before, drawn without replacement in proportion to the loads.

    The f largest of log load + Gumbel noise are such a draw (Efraimidis and Spirakis 2006). Loads come back about, not
    exactly: a busy expert cannot be drawn twice for one token.
    """
    load_E = assigned_TE.sum(0).astype(np.float64)
    with np.errstate(divide="ignore"):
        key_TE = np.log(load_E) + generator.gumbel(size=assigned_TE.shape)
    rank_TE = (-key_TE).argsort(1).argsort(1)
    return rank_TE < assigned_TE.sum(1, keepdims=True)
