"""The way of a token through the layers: its first expert in each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from training.load_metrics import entropy


@dataclass(frozen=True)
class Paths:
    """Ways through the layers.

    Attributes:
        tokens: with an expert in every layer; only these count.
        share: of all tokens.
        distinct: different paths over `tokens`: 1/tokens when all go one way.
        entropy: of the paths, over L ln E: 0 when all go one way, 1 when layers are independent and uniform and there
            are enough tokens to show it.
        most: ln(tokens) over L ln E: no sample of this size can show a larger entropy.
        independent_distinct, independent_entropy: the same where each layer's experts are dealt among the tokens anew:
            loads stay, and layers know nothing of each other.
    """

    tokens: int
    share: float
    distinct: float
    entropy: float
    most: float
    independent_distinct: float
    independent_entropy: float


def paths(top_TL: np.ndarray, num_experts: int, deals: int = 5, seed: int = 0) -> Paths:
    """Describe the paths.

    Args:
        top_TL: first expert of each token in each layer; -1 without one.
        num_experts: E.
        deals: of the independent layers.
        seed: of these.
    """
    used_TL = top_TL[(top_TL >= 0).all(1)]
    tokens, layers = used_TL.shape
    if tokens == 0 or layers == 0:
        return Paths(0, 0.0 if len(top_TL) else math.nan, *[math.nan] * 5)
    generator = np.random.default_rng(seed)
    whole = layers * math.log(num_experts)
    distinct, found = _of(used_TL, whole)
    dealt = [_of(generator.permuted(used_TL, axis=0), whole) for _ in range(deals)]
    most = math.log(tokens) / whole if whole else math.nan
    means = np.mean(dealt, axis=0)
    return Paths(tokens, tokens / len(top_TL), distinct, found, most, float(means[0]), float(means[1]))


def layer_information(top_TL: np.ndarray, num_experts: int) -> np.ndarray:
    """float64 (L, L): bits that a token's expert in one layer tells about its expert in another, over all pairs.

    The diagonal has the entropy of the load. nan where no token has an expert in both layers.
    0 when independent, the entropy when one decides the other. A sample shows about (E-1)^2 / (2 N ln 2) by itself.
    """
    layers = top_TL.shape[1]
    found_LL = np.full((layers, layers), np.nan)
    for a in range(layers):
        for b in range(layers):
            both_T = (top_TL[:, a] >= 0) & (top_TL[:, b] >= 0)
            place_T = top_TL[both_T, a].astype(np.int64) * num_experts + top_TL[both_T, b]
            if place_T.size:
                joint_EE = np.bincount(place_T, minlength=num_experts**2).reshape(num_experts, num_experts)
                joint_EE = joint_EE / place_T.size
                nats = entropy(joint_EE.sum(0)) + entropy(joint_EE.sum(1)) - entropy(joint_EE)
                found_LL[a, b] = max(nats, 0.0) / math.log(2)
    return found_LL


def layer_information_null(top_TL: np.ndarray, num_experts: int, deals: int = 5, seed: int = 0) -> np.ndarray:
    """The same, averaged over deals of each layer's experts among the tokens. The diagonal is nan."""
    generator = np.random.default_rng(seed)
    null_LL = np.mean(
        [layer_information(generator.permuted(top_TL, axis=0), num_experts) for _ in range(deals)], axis=0
    )
    np.fill_diagonal(null_LL, np.nan)
    return null_LL


def _of(top_TL: np.ndarray, whole: float) -> tuple[float, float]:
    count_X = np.unique(top_TL, axis=0, return_counts=True)[1]
    tokens = len(top_TL)
    return len(count_X) / tokens, entropy(count_X / tokens) / whole if whole else math.nan
