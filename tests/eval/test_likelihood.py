"""Sums first, divisions last; causal, and independent of how rows are batched and padded."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from data.batches import HeldoutBatch
from eval.likelihood import Likelihood, MixedWindows, Scores, evaluate_windows, model_nats, score
from moe.model import Transformer
from tests.eval.small_models import END_OF_TEXT, ROUTERS, VOCABULARY, random_text, small_model, window

BYTES = np.arange(VOCABULARY)  # id 0, the marker, stands for no byte


def nats_of(model: Transformer, batch: HeldoutBatch, mode: str = "causal") -> np.ndarray:
    rows = MixedWindows(["a"] * len(batch.token_BS), batch.token_BS, batch.label_BS, batch.valid_BS)
    return model_nats(model, rows, None, mode)  # type: ignore[arg-type]


def test_parts_are_summed_before_they_are_divided() -> None:
    """H07: neither a mean of means nor one of perplexities."""
    both = Likelihood(0.0, 2, 5) + Likelihood(math.log(10), 1, 1)
    assert both.perplexity == pytest.approx(10 ** (1 / 3))  # not the mean of perplexities, 5.5
    assert both.nats_per_token == pytest.approx(math.log(10) / 3)
    assert both.bits_per_byte == pytest.approx(math.log2(10) / 6)


def test_total_and_mean_over_domains_differ() -> None:
    scores = Scores({"long": Likelihood(math.log(2) * 90, 30, 90), "short": Likelihood(math.log(2) * 30, 5, 10)})
    assert scores.bits_per_byte == pytest.approx(1.2)
    assert scores.mean_bits_per_byte == pytest.approx(2.0)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_value_is_minus_the_log_probability_of_each_label(router: str) -> None:
    model = small_model(router)
    batch = window("a", [random_text(1, 8)[0]], 7)
    with torch.no_grad():
        logits_SV = model(batch.token_BS)[0].double()
    expected = -logits_SV.log_softmax(-1).gather(1, batch.label_BS[0][:, None]).sum()
    scores = evaluate_windows(model, [batch], BYTES)
    assert scores.total.nats == pytest.approx(float(expected), rel=1e-5)
    assert scores.total.tokens == 7
    assert scores.total.bytes == int(batch.label_BS.sum())  # id n stands for n bytes here


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("left", [False, True])
def test_batch_size_and_padding_change_nothing(router: str, left: bool) -> None:
    """H07, H01: batches of 1, 2 and 8, padding on either side."""
    model = small_model(router)
    documents = [random_text(1, length, seed=length)[0] for length in (4, 10, 6, 3, 9)]
    alone = sum(evaluate_windows(model, [window("a", [d], len(d) - 1)], BYTES).total.nats for d in documents)
    for rows in (1, 2, 8):
        parts = [documents[i : i + rows] for i in range(0, len(documents), rows)]
        scores = evaluate_windows(model, [window("a", part, 11, left) for part in parts], BYTES)
        assert scores.total.nats == pytest.approx(alone, rel=1e-5)
        assert scores.total.tokens == 4 + 10 + 6 + 3 + 9 - 5


@pytest.mark.parametrize("router", ["expert_choice", "token_choice"])
def test_a_document_mask_scores_packed_documents_as_if_apart(router: str) -> None:
    model = small_model(router)
    first, second = (
        torch.cat([torch.tensor([END_OF_TEXT]), random_text(1, length, seed=length)[0]]) for length in (4, 6)
    )
    packed = HeldoutBatch("a", torch.cat([first, second])[None], torch.full((1, 12), -100), torch.ones(1, 12).bool())
    packed.label_BS[0, :4], packed.label_BS[0, 5:11] = first[1:], second[1:]
    apart = sum(evaluate_windows(model, [window("a", [d], len(d) - 1)], BYTES).total.nats for d in (first, second))
    masked = evaluate_windows(model, [packed], BYTES, END_OF_TEXT).total.nats
    assert masked == pytest.approx(apart, rel=1e-5)
    assert evaluate_windows(model, [packed], BYTES).total.nats != pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize("router", ROUTERS)
def test_later_tokens_and_other_rows_change_no_causal_value(router: str) -> None:
    """H02, H01: to the last bit."""
    model = small_model(router)
    text = random_text(4, 13)
    changed = text.clone()
    changed[0, 8:] = random_text(1, 5, seed=9)[0]  # a later token of row 0, and all other rows
    changed[1:] = random_text(3, 13, seed=10)
    before, after = (nats_of(model, window("a", list(rows), 12)) for rows in (text, changed))
    assert (before[0, :7] == after[0, :7]).all()
    assert (before[0, 8:] != after[0, 8:]).any()


def test_the_training_router_of_expert_choice_is_not_causal_and_says_so() -> None:
    """H02: measured, through the name of its mode."""
    model = small_model("expert_choice", group="flat")
    text = random_text(4, 13)
    changed = text.clone()
    changed[0, 8:] = random_text(1, 5, seed=9)[0]
    before, after = (nats_of(model, window("a", list(rows), 12), "train_router") for rows in (text, changed))
    assert np.abs(before[0, :7] - after[0, :7]).max() > 1e-3


def test_rows_that_do_not_fill_a_group_are_skipped_and_counted() -> None:
    model = small_model("expert_choice", group_sequences=3)
    batches = [
        window("a", list(random_text(4, 9, seed=1)), 8),
        # One row of the second domain is padded (5 labels), and one is nothing but padding.
        window("b", [*random_text(2, 9, seed=2), random_text(1, 6, seed=3)[0], torch.zeros(1).long()], 8),
    ]
    scores = evaluate_windows(model, batches, BYTES, mode="train_router")
    assert scores.total.tokens == 48  # 6 whole rows, two groups
    assert (scores.skipped_rows, scores.skipped_tokens) == (1, 5)
    assert set(scores.domains) == {"a", "b"}
    five = evaluate_windows(model, batches[:1], BYTES, mode="train_router")
    assert (five.total.tokens, five.skipped_rows, five.skipped_tokens) == (24, 1, 8)


def test_a_router_that_looks_at_one_token_gives_one_value_in_both_modes() -> None:
    model = small_model("token_choice")
    batches = [window("a", list(random_text(4, 9)), 8)]
    causal = evaluate_windows(model, batches, BYTES)
    assert evaluate_windows(model, batches, BYTES, mode="train_router").bits_per_byte == pytest.approx(
        causal.bits_per_byte, rel=1e-6
    )


@pytest.mark.parametrize("mode", ["causal", "train_router"])
def test_evaluation_leaves_the_model_as_it_was(mode: str) -> None:
    model = small_model("expert_choice")
    before = copy.deepcopy(dict(model.named_buffers()))
    evaluate_windows(model, [window("a", list(random_text(4, 10)), 9)], BYTES, mode=mode)  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_markers_count_as_tokens_and_not_as_bytes() -> None:
    rows = window("a", [torch.tensor([END_OF_TEXT, 5, 7, END_OF_TEXT])], 3)
    scores = score([rows], lambda batch: np.ones(batch.label_BS.shape), BYTES)
    assert (scores.total.tokens, scores.total.bytes, scores.total.nats) == (3, 12, 3.0)


def test_long_sums_stay_exact() -> None:
    """H07: a million tokens."""
    value = np.float32(1.1)
    rows = window("a", list(random_text(10, 100_001)), 100_000)
    scores = score([rows], lambda batch: np.full(batch.label_BS.shape, value, dtype=np.float64), BYTES)
    assert abs(scores.total.nats / (1e6 * float(value)) - 1) < 1e-9


def test_overflow_is_infinite_and_not_an_accident() -> None:
    """H07: loss 800 has perplexity inf."""
    assert Likelihood(800.0, 1, 1).perplexity == math.inf
    rows = window("a", [random_text(1, 4)[0]], 3)
    scores = score([rows], lambda batch: np.array([[1.0, np.inf, 2.0]]), BYTES)
    assert scores.bits_per_byte == scores.mean_bits_per_byte == scores.total.perplexity == math.inf


def test_nothing_and_nan_are_errors() -> None:
    """H07: an empty set is an error and not NaN."""
    rows = window("a", [random_text(1, 4)[0]], 3)
    with pytest.raises(ValueError, match="no held-out token"):
        evaluate_windows(small_model(), [], BYTES)
    with pytest.raises(ValueError, match="no held-out token"):
        evaluate_windows(small_model(), [window("a", [torch.zeros(1).long()], 3)], BYTES)
    with pytest.raises(ValueError, match="not a number"):
        score([rows], lambda batch: np.full((1, 3), np.nan), BYTES)
    with pytest.raises(ValueError, match="no tokens to divide by"):
        _ = Likelihood().nats_per_token
