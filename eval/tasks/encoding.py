"""From text to what a model reads: how a prompt starts, where context ends, and what is done with long ones.

A prompt starts as documents in training do: the end-of-text marker, then the context. `eval.harness` does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from data.tokenizer import Tokenizer


class Pair(NamedTuple):
    """A context and what may follow it, in ids.

    Attributes:
        context: begins with the marker, so it is never empty.
        continuation: at least one id.
        merged: in the encoding of the whole text a token crosses from context to continuation, so that both were
            encoded apart.
    """

    context: list[int]
    continuation: list[int]
    merged: bool = False


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """Encode as lm-eval's `TemplateLM._encode_pair` does, behind a marker.

    White space at the end of the context is moved to the continuation, as tokens as a rule begin with their space;
    then context and continuation are encoded together, and what follows the context's own ids is the continuation.
    Where the whole does not begin with the context's ids (a token crosses the border), lm-eval would score a text
    that differs from the one asked about, or nothing at all; here both parts are then encoded apart, and `merged`.

    Raises:
        ValueError: the continuation is empty.
    """
    if not continuation:
        raise ValueError("a continuation is empty: there is nothing to score")
    kept = context.rstrip()
    moved = context[len(kept) :] + continuation
    whole, before = tokenizer.encode(kept + moved), tokenizer.encode(kept)
    if whole[: len(before)] == before and len(whole) > len(before):
        return Pair([tokenizer.end_of_text, *before], whole[len(before) :])
    return Pair([tokenizer.end_of_text, *before], tokenizer.encode(moved), True)


class Piece(NamedTuple):
    """One row for the model: its inputs, and the last so many ids that they predict."""

    inputs: list[int]
    labels: list[int]


def pieces(context: Sequence[int], continuation: Sequence[int], length: int) -> list[Piece]:
    """The rows that score a continuation, each of at most `length` inputs: what the model was trained on.

    As a rule that is one row. What is too long loses its context from the left, the marker first, as a row that
    begins within a document did in training. A continuation over `length` is cut into rows of `length` labels, each
    with as many ids before it as there is room for: one, and in the last row more (lm-eval's rolling windows).
    """
    whole = [*context, *continuation]
    found = []
    for first in range(len(context), len(whole), length):
        end = min(first + length, len(whole))
        found.append(Piece(whole[max(0, end - 1 - length) : end - 1], whole[first:end]))
    return found
