"""The mixture layer as plain float64 loops over tokens and experts, written from the papers and not from `moe/`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Pairs = list[tuple[int, int]]


def groups(kind: str, batch: int, length: int, sequences: int, chunk: int = 0) -> list[list[int]]:
    """Token numbers of each routing group."""
    blocks = [range(first, first + sequences) for first in range(0, batch, sequences)]
    if kind == "position":
        return [[b * length + s for b in block] for block in blocks for s in range(length)]
    if kind == "flat":
        return [[b * length + s for b in block for s in range(length)] for block in blocks]
    return [[b * length + s + i for i in range(chunk)] for b in range(batch) for s in range(0, length, chunk)]


def scores(x_TD: Tensor, router_ED: Tensor, kind: str) -> Tensor:
    """Softmax or sigmoid scores."""
    logits_TE = x_TD @ router_ED.T
    if kind == "softmax":
        exp_TE = (logits_TE - logits_TE.max(1, keepdim=True).values.detach()).exp()
        return exp_TE / exp_TE.sum(1, keepdim=True)
    return 1 / (1 + (-logits_TE).exp())


def choose_by_expert(scores_TE: Tensor, token_GN: list[list[int]], capacity: int, valid: list[bool]) -> Pairs:
    """Each expert takes the best `capacity` valid tokens of each group; of equals, the first."""
    table = scores_TE.tolist()
    pairs = []
    for members in token_GN:
        for expert in range(len(table[0])):
            order = sorted((t for t in members if valid[t]), key=lambda t: (-table[t][expert], t))
            pairs += [(token, expert) for token in order[:capacity]]
    return pairs


def choose_by_token(scores_TE: Tensor, k: int, valid: list[bool]) -> Pairs:
    """Each valid token takes its best k experts; of equals, the first."""
    pairs = []
    for token, row in enumerate(scores_TE.tolist()):
        order = sorted(range(len(row)), key=lambda e: (-row[e], e))
        pairs += [(token, expert) for expert in order[:k] if valid[token]]
    return pairs


def choose_by_cutoff(scores_TE: Tensor, cutoffs: list[float], valid: list[bool]) -> Pairs:
    """Every valid pair at or above the expert's cutoff."""
    rows = enumerate(scores_TE.tolist())
    return [(t, e) for t, row in rows for e, score in enumerate(row) if valid[t] and score >= cutoffs[e]]


def swiglu(x_D: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """One expert on one token."""
    gate_F = gate_FD @ x_D
    return down_DF @ (gate_F / (1 + (-gate_F).exp()) * (up_FD @ x_D))


def mixture(x_TD: Tensor, weight_TE: Tensor, pairs: Pairs, w13_E2FD: Tensor, w2_EDF: Tensor) -> Tensor:
    """Sum over the pairs of weight times expert, token by token."""
    rows = [0.0 * x_D for x_D in x_TD]
    for token, expert in pairs:
        gate_FD, up_FD = w13_E2FD[expert]
        rows[token] = rows[token] + weight_TE[token, expert] * swiglu(x_TD[token], gate_FD, up_FD, w2_EDF[expert])
    return torch.stack(rows)


def rotate(x_D: Tensor, position: int, base: float) -> Tensor:
    """Rotary embedding of one head at one position, pair by pair (i, i + D/2)."""
    half = x_D.shape[0] // 2
    out = x_D.clone()
    for i in range(half):
        angle = position * base ** (-2 * i / (2 * half))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x_D[i] * cos - x_D[i + half] * sin
        out[i + half] = x_D[i + half] * cos + x_D[i] * sin
    return out


def rms_norm(x_X: Tensor, weight_X: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of one vector."""
    return x_X / (x_X.square().mean() + epsilon).sqrt() * weight_X
