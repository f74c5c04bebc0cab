"""Are experts copies of each other? In what they compute, in their weights, and in what their router looks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moe.layer import MoELayer

MOST_PAIRS = 120  # of experts that are compared weight by weight


@torch.no_grad()
def expert_outputs(layer: MoELayer, x_ND: Tensor) -> Tensor:
    """fp32 (E, N, D): what every expert makes of the same inputs, whether it took them or not."""
    outputs = []
    for w13_2FD, w2_DF in zip(layer.experts.w13_E2FD.float(), layer.experts.w2_EDF.float(), strict=True):
        outputs.append(F.linear(F.silu(F.linear(x_ND, w13_2FD[0])) * F.linear(x_ND, w13_2FD[1]), w2_DF))
    return torch.stack(outputs)


def cka(output_END: Tensor) -> np.ndarray:
    """float64 (E, E): linear centred kernel alignment of experts' outputs (Kornblith et al. 2019).

    With the unbiased estimate of HSIC (Song et al. 2012, eq. 5), so that unrelated outputs give about 0 however many
    features there are. Copies, also rotated or scaled, give 1.
    """
    centred_END = output_END.double() - output_END.double().mean(1, keepdim=True)
    tokens = centred_END.shape[1]
    if tokens < 4:
        raise ValueError(f"{tokens} shared tokens: the unbiased estimate needs 4 or more")
    gram_ENN = centred_END @ centred_END.transpose(1, 2)
    gram_ENN.diagonal(dim1=1, dim2=2).zero_()
    row_EN = gram_ENN.sum(2)
    all_E = row_EN.sum(1)
    flat_EX = gram_ENN.flatten(1)
    hsic_EE = (
        flat_EX @ flat_EX.T
        + torch.outer(all_E, all_E) / ((tokens - 1) * (tokens - 2))
        - 2 / (tokens - 2) * (row_EN @ row_EN.T)
    )
    own_E = hsic_EE.diagonal().clamp_min(0).sqrt()
    whole_EE = torch.outer(own_E, own_E)
    return torch.where(whole_EE > 0, hsic_EE / whole_EE, torch.nan).numpy()


def matched_cosine(w13_a2FD: Tensor, w2_aDF: Tensor, w13_b2FD: Tensor, w2_bDF: Tensor) -> float:
    """Cosine of two experts' weights after their hidden units are matched as well as they can be.

    A unit is its gate, up and down weights together; the matching maximises the sum of the units' products (Hungarian
    method). Copies give 1, also with their units in another order. Unrelated experts give somewhat more than 0,
    because the best of F! matchings is taken: see `shuffled`.
    """
    unit_aFX, unit_bFX = _units(w13_a2FD, w2_aDF), _units(w13_b2FD, w2_bDF)
    product_FF = (unit_aFX @ unit_bFX.T).numpy()
    norm = float(unit_aFX.norm() * unit_bFX.norm())
    rows, columns = linear_sum_assignment(product_FF, maximize=True)
    return float(product_FF[rows, columns].sum()) / norm if norm else math.nan


def matched_cosines(layer: MoELayer, most_pairs: int = MOST_PAIRS) -> list[tuple[int, int, float]]:
    """(i, j, cosine) of pairs of experts; evenly spaced ones of all pairs where there are more than `most_pairs`."""
    w13_E2FD, w2_EDF = layer.experts.w13_E2FD.detach().float().cpu(), layer.experts.w2_EDF.detach().float().cpu()
    pairs = spread(list(combinations(range(len(w2_EDF)), 2)), most_pairs)
    return [(i, j, matched_cosine(w13_E2FD[i], w2_EDF[i], w13_E2FD[j], w2_EDF[j])) for i, j in pairs]


def matched_cosine_null(layer: MoELayer, pairs: int = 6, seed: int = 0) -> float:
    """Mean matched cosine of experts whose weights are put in random order, each matrix by itself."""
    generator = torch.Generator().manual_seed(seed)
    w13_E2FD, w2_EDF = layer.experts.w13_E2FD.detach().float().cpu(), layer.experts.w2_EDF.detach().float().cpu()
    values = [
        matched_cosine(w13_E2FD[i], w2_EDF[i], shuffled(w13_E2FD[j], generator), shuffled(w2_EDF[j], generator))
        for i, j in spread(list(combinations(range(len(w2_EDF)), 2)), pairs)
    ]
    return math.fsum(values) / len(values) if values else math.nan


@torch.no_grad()
def cka_null(layer: MoELayer, x_ND: Tensor, seed: int = 0) -> float:
    """Mean `cka` of pairs of experts whose weights are put in random order: what sharing the input alone gives."""
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for w13_2FD, w2_DF in zip(layer.experts.w13_E2FD.float().cpu(), layer.experts.w2_EDF.float().cpu(), strict=True):
        gate_FD, up_FD, down_DF = (shuffled(w, generator) for w in (w13_2FD[0], w13_2FD[1], w2_DF))
        outputs.append(F.linear(F.silu(F.linear(x_ND.cpu(), gate_FD)) * F.linear(x_ND.cpu(), up_FD), down_DF))
    return off_diagonal_mean(cka(torch.stack(outputs)))


def router_gram(weight_ED: Tensor) -> np.ndarray:
    """float64 (E, E): cosines between the experts' router vectors; random ones have a root mean square of 1/sqrt(D)."""
    unit_ED = F.normalize(weight_ED.detach().double().cpu(), dim=1)
    return (unit_ED @ unit_ED.T).numpy()


def off_diagonal_mean(value_EE: np.ndarray) -> float:
    """Mean over pairs of different experts."""
    values = value_EE[~np.eye(len(value_EE), dtype=bool)]
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else math.nan


def off_diagonal_rms(value_EE: np.ndarray) -> float:
    """Root mean square over pairs of different experts."""
    return math.sqrt(off_diagonal_mean(value_EE**2))


def shuffled(weight: Tensor, generator: torch.Generator) -> Tensor:
    """The entries of a matrix in random order."""
    return weight.flatten()[torch.randperm(weight.numel(), generator=generator)].view_as(weight)


def spread(items: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """At most so many items, evenly spaced."""
    count = min(most, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def _units(w13_2FD: Tensor, w2_DF: Tensor) -> Tensor:
    return torch.cat([w13_2FD[0], w13_2FD[1], w2_DF.T], dim=1).double()
