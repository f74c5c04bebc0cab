"""Held-out windows that overlap, so that every label is predicted from much of what precedes it.

Windows side by side predict the first labels of each window from next to nothing. Windows that move on by `stride`
labels score only the last `stride` of their labels, all but the first window of a text; the labels before are context.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from data.batches import IGNORED_LABEL, HeldoutBatch, heldout_labels, spread_windows
from data.corpus import Corpus
from data.errors import DataError


class Window(NamedTuple):
    """One row, as positions in a domain's held-out tokens.

    Attributes:
        start: first input.
        scored: first input whose label is scored.
        end: after the last input.
    """

    start: int
    scored: int
    end: int


def sliding_windows(
    corpus: Corpus,
    sequence_length: int,
    stride: int,
    batch_sequences: int = 8,
    max_tokens: int | None = None,
    within_documents: bool = False,
) -> Iterator[HeldoutBatch]:
    """Yield the held-out split in overlapping windows, in the batches that `heldout_windows` yields.

    The labels that are scored are those of `heldout_windows` with the same arguments, each exactly once. A label is
    predicted from its input and at least `sequence_length - stride` tokens before that, or from all there are: back
    to the start of its document (`within_documents`) or of the domain. A window never goes past a document's last
    label then. Context has the label -100 and is valid.

    Args:
        corpus: an open corpus.
        sequence_length: S, inputs of a window at most.
        stride: labels that one window goes on from the last, 1 to S.
        batch_sequences: B, the rows of every batch.
        max_tokens: see `heldout_windows`.
        within_documents: whether a window keeps to one document. Say True for a model whose attention does.

    Raises:
        DataError: an argument is out of range, or the corpus holds nothing out.
    """
    for name, value in (("sequence_length", sequence_length), ("batch_sequences", batch_sequences)):
        if value < 1:
            raise DataError(f"{name} is {value}; allowed are integers >= 1")
    if not 1 <= stride <= sequence_length:
        raise DataError(f"the stride is {stride}; allowed are 1 to the sequence length, {sequence_length}")
    if max_tokens is not None and max_tokens < 1:
        raise DataError(f"max_tokens is {max_tokens}; allowed are integers >= 1")
    if not any(len(corpus.tokens("heldout", domain)) for domain in corpus.domains):
        raise DataError(f"{corpus.folder} holds nothing out; build it with --heldout-fraction above 0")
    return _batches(corpus, sequence_length, stride, batch_sequences, max_tokens, within_documents)


def plan(first: int, last: int, lowest: int, length: int, stride: int) -> Iterator[Window]:
    """Windows that score the labels of the inputs [first, last), with context back to `lowest`."""
    position = first
    while position < last:
        start = max(lowest, position - (length - stride))
        end = min(last, start + length)
        yield Window(start, position, end)
        position = end


def _batches(
    corpus: Corpus, length: int, stride: int, rows: int, max_tokens: int | None, within_documents: bool
) -> Iterator[HeldoutBatch]:
    for domain in corpus.domains:
        token_N, label_N = heldout_labels(corpus, domain)
        start_M = corpus.document_starts("heldout", domain)
        windows = list(_windows(len(token_N), start_M, length, stride, max_tokens, within_documents))
        for first in range(0, len(windows), rows):
            token_BS = np.full((rows, length), corpus.tokenizer.end_of_text, dtype=np.int64)
            label_BS = np.full_like(token_BS, IGNORED_LABEL)
            document_BS = np.full_like(token_BS, -1)
            for row, window in enumerate(windows[first : first + rows]):
                inputs = slice(0, window.end - window.start)
                context = window.scored - window.start
                token_BS[row, inputs] = token_N[window.start : window.end]
                label_BS[row, context : inputs.stop] = label_N[window.scored : window.end]
                place_N = np.arange(window.start, window.end)
                document_BS[row, inputs] = np.searchsorted(start_M, place_N, side="right") - 1
            documents = torch.from_numpy(document_BS)
            yield HeldoutBatch(
                domain, torch.from_numpy(token_BS), torch.from_numpy(label_BS), documents >= 0, documents
            )


def _windows(
    tokens: int, start_M: np.ndarray, length: int, stride: int, max_tokens: int | None, within_documents: bool
) -> Iterator[Window]:
    """All windows of a domain: runs of neighbouring chosen stretches, cut at documents where asked."""
    runs: list[list[int]] = []
    for chosen in spread_windows(tokens, length, max_tokens):
        first, last = chosen * length, min(tokens, (chosen + 1) * length)
        if runs and runs[-1][1] == first:
            runs[-1][1] = last
        else:
            runs.append([first, last])
    for first, last in runs:
        if not within_documents:
            yield from plan(first, last, 0, length, stride)
            continue
        inside = start_M[(start_M > first) & (start_M < last)].tolist()
        for begin, end in zip([first, *inside], [*inside, last], strict=True):
            lowest = int(start_M[np.searchsorted(start_M, begin, side="right") - 1])
            yield from plan(begin, end, lowest, length, stride)
