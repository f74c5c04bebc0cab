"""What a training router leaks, in bits, and how far it is from causal routing.

A3, the leak: the loss at position t is measured twice, with the true tokens after t and with independent text in
their place, in every row of the batch so that the competition for experts stays what it was. A causal router gives
the same number twice. The difference is what the future told about the label.

A6, the gap: the loss under causal routing minus that under the training router. It holds the leak and also the
mismatch of a model that was trained with one router and is run with another; it is never called a leak.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.batches import heldout_windows
from data.corpus import Corpus

Nats = Callable[[Tensor, Tensor], np.ndarray]
"""(token_BS, label_BS) to the float64 (B, S) negative log-likelihood of each label."""


@dataclass(frozen=True)
class Estimate:
    """A mean over independent draws.

    Attributes:
        mean: bits a token.
        standard_error: of it, from the spread of the draws.
        draws: how many.
    """

    mean: float
    standard_error: float
    draws: int

    @classmethod
    def of(cls, values: list[float]) -> Estimate:
        """Mean and standard error of at least two independent values."""
        return cls(float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values))), len(values))


@dataclass(frozen=True)
class LeakReport:
    """A3 and A6.

    Attributes:
        leak: bits a token that the true future is worth to the training router.
        gap: bits a token, causal minus training router.
        bytes_per_token: UTF-8 bytes of the labels over the labels; 0 where none stands for text.
        native_bits: bits a token under the training router: not a result.
        causal_bits: bits a token under causal routing, on the same text.
    """

    leak: Estimate
    gap: Estimate
    bytes_per_token: float
    native_bits: float
    causal_bits: float

    def per_byte(self, estimate: Estimate) -> Estimate | None:
        """The same in bits a byte; None without text."""
        if not self.bytes_per_token:
            return None
        scale = 1 / self.bytes_per_token
        return Estimate(estimate.mean * scale, estimate.standard_error * scale, estimate.draws)


def measure_leak(
    native: Nats,
    causal: Nats,
    token_RS: Tensor,
    label_RS: Tensor,
    token_bytes_V: np.ndarray,
    rows: int,
    pairs: int,
    positions: int = 8,
    seed: int = 0,
) -> LeakReport:
    """Measure A3 and A6 on text.

    Each pair is `rows` rows of text and as many others, used in no other pair. One position is probed in each of
    `positions` equal parts of the sequence, at random, so that the mean is that over all positions, wherever chunks
    begin.

    Args:
        native: likelihoods under the training router.
        causal: likelihoods under causal routing.
        token_RS: int64, whole rows of text in random order.
        label_RS: int64, the token after each.
        token_bytes_V: UTF-8 bytes that each id stands for.
        rows: of one pass, a multiple of the routing group's sequences.
        pairs: at most; fewer where there is not enough text.
        positions: probed in each pair.
        seed: of the positions.

    Raises:
        ValueError: not enough text for two pairs, or the likelihood is not a number.
    """
    pairs = min(pairs, len(token_RS) // (2 * rows))
    if pairs < 2:
        raise ValueError(
            f"{len(token_RS)} whole rows of held-out text: two pairs of {rows} rows and as many others need {4 * rows}"
        )
    rng = np.random.default_rng(seed)
    length = token_RS.shape[1]
    edges = np.linspace(0, length, min(positions, length) + 1).astype(int)
    leaks, gaps, native_nats, causal_nats = [], [], [], []
    text_bytes = 0
    for pair in range(pairs):
        true = slice(2 * pair * rows, (2 * pair + 1) * rows)
        token_BS, label_BS = token_RS[true], label_RS[true]
        other_BS = token_RS[(2 * pair + 1) * rows : (2 * pair + 2) * rows]
        with_future_BS = native(token_BS, label_BS)
        without_BS = causal(token_BS, label_BS)
        differences = []
        for low, high in itertools.pairwise(edges):
            t = int(rng.integers(low, high))
            changed_BS = torch.cat([token_BS[:, : t + 1], other_BS[:, t + 1 :]], dim=1)
            differences.append((native(changed_BS, label_BS)[:, t] - with_future_BS[:, t]).mean())
        leaks.append(float(np.mean(differences)) / math.log(2))
        gaps.append(float((without_BS - with_future_BS).mean()) / math.log(2))
        native_nats.append(with_future_BS.mean())
        causal_nats.append(without_BS.mean())
        text_bytes += int(np.asarray(token_bytes_V, dtype=np.int64)[label_BS.numpy()].sum())
    if not all(map(math.isfinite, [*leaks, *gaps])):
        raise ValueError("the model's log-likelihood is not finite: its activations or parameters have overflowed")
    return LeakReport(
        Estimate.of(leaks),
        Estimate.of(gaps),
        text_bytes / (pairs * rows * length),
        float(np.mean(native_nats)) / math.log(2),
        float(np.mean(causal_nats)) / math.log(2),
    )


def mixed_rows(corpus: Corpus, length: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Whole held-out windows, mixed over domains as training mixes them, in random order.

    A routing group of one domain alone would make that domain's experts full and the others idle, which the router
    never met in training.

    Args:
        corpus: of the run.
        length: S.
        rows: wanted; every domain gives an equal share where it has so many.
        seed: of the order.

    Returns:
        (token_RS, label_RS) with R at most `rows`, none of them padded.
    """
    share = -(-rows // len(corpus.domains))
    kept = []
    for batch in heldout_windows(corpus, length, max_tokens=share * length):
        whole_B = batch.valid_BS.all(1)
        kept.append(torch.stack([batch.token_BS[whole_B], batch.label_BS[whole_B]], dim=1))
    both_R2S = torch.cat(kept)
    order_R = np.random.default_rng(seed).permutation(len(both_R2S))[:rows]
    token_RS, label_RS = both_R2S[torch.from_numpy(order_R)].unbind(1)
    return token_RS, label_RS
