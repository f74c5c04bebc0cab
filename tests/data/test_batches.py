"""Batches: a function of the step, rows for each rank, labels one token on."""

from collections import Counter

import pytest
import torch

from data.batches import Batches, document_numbers, heldout_windows
from data.errors import DataError

S = 16


@pytest.fixture(scope="module")
def batches(tiny_corpus):
    return Batches(tiny_corpus, S, 12, seed=3)


def test_rows_are_windows_of_one_domain_and_labels_are_the_next_tokens(tiny_corpus, batches):
    batch = batches.batch(5)
    assert batch.token_BS.shape == batch.label_BS.shape == (12, S)
    assert all(part.dtype == torch.int64 and part.is_contiguous() for part in batch[:3])
    assert batch.valid_BS is None  # windows have no padding
    assert torch.equal(batch.token_BS[:, 1:], batch.label_BS[:, :-1])
    for row in range(12):
        token_N = tiny_corpus.tokens("train", tiny_corpus.domains[batch.domain_B[row]])
        window = [*batch.token_BS[row].tolist(), int(batch.label_BS[row, -1])]
        starts = range(0, len(token_N) - S, S)
        assert any(token_N[start : start + S + 1].tolist() == window for start in starts)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_F09_ranks_read_disjoint_rows_that_make_the_whole_batch(tiny_corpus, batches, ranks):
    whole = batches.batch(7)
    parts = [
        Batches(tiny_corpus, S, 12, seed=3).batch(7, rank * 12 // ranks, (rank + 1) * 12 // ranks)
        for rank in range(ranks)
    ]
    for field in range(3):
        assert torch.equal(torch.cat([part[field] for part in parts]), whole[field])


def test_F09_a_pass_reads_every_window_once_and_the_next_pass_in_another_order(tiny_corpus):
    batches = Batches(tiny_corpus, S, 1, seed=0, mixture_exponent=1.0)
    windows = batches.windows_per_domain["many"]
    rows = []
    step = 0
    while len(rows) < 2 * windows:
        batch = batches.batch(step)
        step += 1
        if batch.domain_B[0] == 0:
            rows.append(tuple(batch.token_BS[0].tolist()))
    first, second = rows[:windows], rows[windows:]
    assert Counter(first) == Counter(second)
    assert first != second


def test_the_mixture_follows_the_exponent(tiny_corpus):
    tokens = [len(tiny_corpus.tokens("train", domain)) for domain in tiny_corpus.domains]
    for exponent in (0.0, 0.5, 1.0):
        counts = Batches(tiny_corpus, S, 4, 0, exponent).domain_counts
        expected = tokens[0] ** exponent / sum(number**exponent for number in tokens)
        assert abs(counts["many"] / 1024 - expected) < 1 / 1024


def test_passes_are_counted(tiny_corpus, batches):
    assert batches.passes(0) == {"many": 0, "book": 0}
    steps = 1024 // 4
    batches = Batches(tiny_corpus, S, 4, 0)
    for domain, passes in batches.passes(steps).items():
        expected = batches.domain_counts[domain] / batches.windows_per_domain[domain]
        assert passes == pytest.approx(expected)


@pytest.mark.parametrize("sequence_length, rows", [(16, 4), (7, 3), (1, 1), (5000, 2)])
def test_each_heldout_token_is_a_label_once(tiny_corpus, sequence_length, rows):
    labels: dict[str, list[int]] = {domain: [] for domain in tiny_corpus.domains}
    inputs: dict[str, list[int]] = {domain: [] for domain in tiny_corpus.domains}
    for batch in heldout_windows(tiny_corpus, sequence_length, rows):
        assert batch.token_BS.shape == (rows, sequence_length)
        assert torch.equal(batch.valid_BS, batch.label_BS != -100)
        assert (batch.token_BS[~batch.valid_BS] == tiny_corpus.tokenizer.end_of_text).all()
        labels[batch.domain] += batch.label_BS[batch.valid_BS].tolist()
        inputs[batch.domain] += batch.token_BS[batch.valid_BS].tolist()
    for domain in tiny_corpus.domains:
        tokens = tiny_corpus.tokens("heldout", domain).tolist()
        assert inputs[domain] == tokens
        # Each document's tokens and its end; the domain's first marker stands at the end.
        assert labels[domain] == [*tokens[1:], tokens[0]]
        label_bytes = int(tiny_corpus.tokenizer.token_bytes_V[labels[domain]].sum())
        assert label_bytes == tiny_corpus.text_bytes("heldout", domain)


def test_limited_heldout_windows_are_whole_and_spread_over_the_split(tiny_corpus):
    """The first windows alone might be one long document, and no sample of the domain."""
    for domain in tiny_corpus.domains:
        whole, part = (
            torch.cat(
                [
                    batch.label_BS[batch.valid_BS.any(1)]
                    for batch in heldout_windows(tiny_corpus, S, 2, limit)
                    if batch.domain == domain
                ]
            )
            for limit in (None, 3 * S - 1)
        )
        windows = len(whole)
        assert windows > 6
        expected = whole[[0, windows // 3, 2 * windows // 3]]
        assert torch.equal(part, expected)


def test_document_numbers_count_markers():
    token_BS = torch.tensor([[0, 5, 6, 0, 7], [5, 0, 0, 6, 6]])
    numbers = document_numbers(token_BS, end_of_text=0)
    assert numbers.dtype == torch.int64
    assert numbers.tolist() == [[1, 1, 1, 2, 2], [0, 1, 2, 2, 2]]


def test_every_prediction_is_made_from_its_own_document(tiny_corpus, batches):
    """The marker starts a document, so input and label differ in document only at its end."""
    batch = batches.batch(0)
    end_of_text = tiny_corpus.tokenizer.end_of_text
    numbers = document_numbers(batch.token_BS, end_of_text)
    changes = numbers[:, 1:] != numbers[:, :-1]
    assert torch.equal(changes, batch.label_BS[:, :-1] == end_of_text)


def test_a_corpus_that_is_too_small_is_refused_with_numbers(tiny_corpus):
    with pytest.raises(DataError, match="fewer than one window of 1,000,001; shorten"):
        Batches(tiny_corpus, 1_000_000, 1, 0)
    with pytest.raises(DataError, match="fewer than one batch of 100,000; use a smaller"):
        Batches(tiny_corpus, S, 100_000, 0)


def test_arguments_out_of_range_are_refused(tiny_corpus, batches):
    for start, stop in [(0, 13), (-1, 3), (5, 4)]:
        with pytest.raises(DataError, match=r"a batch has rows \[0, 12\)"):
            batches.batch(0, start, stop)
    with pytest.raises(DataError, match="step is -1"):
        batches.batch(-1)
    for arguments in [(0, 4), (4, 0), (4.5, 4), (True, 4)]:
        with pytest.raises(DataError, match="allowed are integers >= 1"):
            Batches(tiny_corpus, *arguments, 0)
        with pytest.raises(DataError, match="allowed are integers >= 1"):
            heldout_windows(tiny_corpus, *arguments)
    with pytest.raises(DataError, match="mixture_exponent"):
        Batches(tiny_corpus, S, 4, 0, float("nan"))
