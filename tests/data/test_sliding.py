"""Windows that overlap score the same labels, each once, with at least the context that they promise."""

from __future__ import annotations

import numpy as np
import pytest

from data.batches import heldout_windows
from data.errors import DataError
from data.sliding import plan, sliding_windows


def scored(batches, corpus):
    """(domain, document, tokens before the label in the window) of every scored label, in order."""
    found = []
    for batch in batches:
        for row, label in np.argwhere(batch.label_BS.numpy() >= 0):
            document = int(batch.document_BS[row, label])
            found.append((batch.domain, document, int(batch.label_BS[row, label]), int(label)))
    return found


def test_the_first_window_is_scored_in_full_and_each_later_one_in_its_last_stride():
    windows = [tuple(w) for w in plan(0, 11, 0, length=5, stride=2)]
    assert windows == [(0, 0, 5), (2, 5, 7), (4, 7, 9), (6, 9, 11)]
    assert [tuple(w) for w in plan(0, 10, 0, 5, 5)] == [(0, 0, 5), (5, 5, 10)]
    assert [tuple(w) for w in plan(7, 9, 3, 5, 1)] == [(3, 7, 8), (4, 8, 9)]  # context from before what is scored
    assert list(plan(4, 4, 0, 5, 1)) == []


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("stride", [1, 7, 16])
@pytest.mark.parametrize("tokens", [None, 50])
def test_the_labels_are_those_of_windows_side_by_side_each_once(tiny_corpus, within, stride, tokens):
    side_by_side = scored(heldout_windows(tiny_corpus, 16, 3, tokens), tiny_corpus)
    sliding = scored(sliding_windows(tiny_corpus, 16, stride, 3, tokens, within), tiny_corpus)
    assert [label[:3] for label in sliding] == [label[:3] for label in side_by_side]


def test_context_is_as_long_as_promised_and_stays_in_its_document(tiny_corpus):
    for batch in sliding_windows(tiny_corpus, 16, 4, 3, within_documents=True):
        start_M = tiny_corpus.document_starts("heldout", batch.domain)
        for document_S, label_S, valid_S in zip(batch.document_BS, batch.label_BS, batch.valid_BS, strict=True):
            if not valid_S.any():
                continue
            assert len(set(document_S[valid_S].tolist())) == 1
            first = int((label_S >= 0).nonzero()[0])
            markers = (batch.token_BS == tiny_corpus.tokenizer.end_of_text) & batch.valid_BS
            assert first >= 12 or bool(markers.any())  # S - stride tokens before it, or the document's start
        assert len(start_M)


def test_document_numbers_are_those_of_the_held_out_file(tiny_corpus):
    for batch in heldout_windows(tiny_corpus, 16, 4):
        file = tiny_corpus.file("heldout", batch.domain)
        assert batch.document_BS is not None
        assert (batch.document_BS[~batch.valid_BS] == -1).all()
        for number in np.unique(batch.document_BS[batch.valid_BS]):
            inside = batch.token_BS[batch.document_BS == number]
            allowed = {tiny_corpus.tokenizer.end_of_text, *file.document(int(number)).tolist()}
            assert set(inside.tolist()) <= allowed


@pytest.mark.parametrize("stride", [0, -3, 17])
def test_a_stride_out_of_range_is_refused(tiny_corpus, stride):
    with pytest.raises(DataError, match=r"allowed are 1 to the sequence length, 16"):
        sliding_windows(tiny_corpus, 16, stride)
