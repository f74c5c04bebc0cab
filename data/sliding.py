"""Held-out windows that overlap, so that every label is predicted from much of what precedes it.

Windows side by side predict the first labels of each window from next to nothing. Windows that move on by `stride`
labels score only the last `stride` of their labels, all but the first window of a text; the labels before are context.
"""

from collections.abc import Iterator

import numpy as np

from data.batches import (
    HeldoutBatch,
    Window,
    neighbouring_windows,
    require_heldout,
    spread_windows,
    window_batches,
)
from data.corpus import Corpus
from data.errors import DataError


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
    require_heldout(corpus, sequence_length, batch_sequences, max_tokens)
    if not 1 <= stride <= sequence_length:
        raise DataError(f"the stride is {stride}; allowed are 1 to the sequence length, {sequence_length}")
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
        tokens, start_M = len(corpus.tokens("heldout", domain)), corpus.document_starts("heldout", domain)
        windows = list(_windows(tokens, start_M, length, stride, max_tokens, within_documents))
        yield from window_batches(corpus, domain, windows, length, rows)


def _windows(
    tokens: int, start_M: np.ndarray, length: int, stride: int, max_tokens: int | None, within_documents: bool
) -> Iterator[Window]:
    """All windows of a domain: runs of neighbouring chosen stretches, cut at documents where asked."""
    for low, high in neighbouring_windows(spread_windows(tokens, length, max_tokens)):
        first, last = low * length, min(tokens, high * length)
        if not within_documents:
            yield from plan(first, last, 0, length, stride)
            continue
        inside = start_M[(start_M > first) & (start_M < last)].tolist()
        for begin, end in zip([first, *inside], [*inside, last], strict=True):
            lowest = int(start_M[np.searchsorted(start_M, begin, side="right") - 1])
            yield from plan(begin, end, lowest, length, stride)
