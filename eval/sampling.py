"""From logits to the next token, one row at a time, with random numbers that belong to the row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Sampler:
    """Draws each row's next tokens from a stream of its own.

    A row's stream is keyed by its seed and its prompt, and each position takes one number of it: neither the other
    rows, nor their number, nor when they finish, change what a row draws. Equal prompts with equal seeds give equal
    continuations.

    Args:
        prompts: token ids of each row.
        seeds: one of each row.
        temperature: 0 takes the most probable token (the lowest id among equals).
        top_k: keep the k most probable tokens.
        top_p: then keep the fewest most probable tokens that together reach this probability.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature is {temperature}; allowed are 0 (greedy) and above")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}; allowed are 1 and above, or None for no limit")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}; allowed are above 0 and up to 1, or None for no limit")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._streams = [
            np.random.Generator(np.random.Philox(key=_key(seed, prompt)))
            for seed, prompt in zip(seeds, prompts, strict=True)
        ]

    def draw(self, logits_BV: Tensor, wanted: Sequence[bool]) -> list[int | None]:
        """The next token of each wanted row, None for the others.

        Raises:
            ValueError: a wanted row's logits are not numbers.
        """
        logits_BV = logits_BV.detach().float().cpu()
        if logits_BV[torch.tensor(wanted)].isnan().any():
            raise ValueError("the model's logits are not numbers (nan): its parameters are damaged or have overflowed")
        return [self._draw_row(row, logits_BV[row]) if want else None for row, want in enumerate(wanted)]

    def _draw_row(self, row: int, logits_V: Tensor) -> int:
        if self.temperature == 0:
            return int(logits_V.argmax())
        probability_V = filtered_probabilities(logits_V.double(), self.temperature, self.top_k, self.top_p)
        cumulative_V = np.cumsum(probability_V.numpy())
        # The first token whose cumulative probability passes the number; the last positive one guards the rounding.
        place = int(np.searchsorted(cumulative_V, self._streams[row].random() * cumulative_V[-1], side="right"))
        return min(place, int(probability_V.nonzero()[-1]))


def filtered_probabilities(
    logits_V: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Softmax at a temperature, with improbable tokens cut off; sums to 1. Of equal tokens the lowest ids are kept.

    Args:
        logits_V: float64.
        temperature: above 0.
        top_k: see `Sampler`.
        top_p: see `Sampler`.
    """
    # The largest logit first: dividing infinities by a small temperature would give nan.
    probability_V = torch.softmax((logits_V - logits_V.max()) / temperature, dim=0)
    if top_k is None and top_p is None:
        return probability_V
    sorted_V, index_V = probability_V.sort(descending=True, stable=True)
    if top_k is not None:
        sorted_V[top_k:] = 0
        sorted_V /= sorted_V.sum()
    if top_p is not None:
        # A token stays while what precedes it has not reached top_p: at least one does.
        sorted_V[(sorted_V.cumsum(0) - sorted_V) >= top_p] = 0
    probability_V = torch.zeros_like(probability_V).scatter_(0, index_V, sorted_V)
    return probability_V / probability_V.sum()


def _key(seed: int, prompt: Sequence[int]) -> int:
    text = repr((int(seed), [int(token) for token in prompt]))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
