"""A pair's score is the model's own, whatever its neighbours; and the metrics are those of lm-eval."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from eval.likelihood import MixedWindows, model_nats
from eval.ngram import Bigram, PairCounts, Unigram
from eval.tasks.encoding import Pair
from eval.tasks.loglikelihood import Scored, model_scorer, ngram_scorer
from eval.tasks.metrics import Answer, bits_per_byte, mean_and_error, paired, summary
from eval.tasks.requests import Question
from tests.eval.small_models import END_OF_TEXT, ROUTERS, VOCABULARY, random_text, small_model

BYTES = np.arange(VOCABULARY)


def pairs(seed: int = 0) -> list[Pair]:
    """Contexts of 1 to 13 ids and continuations of 1 to 7."""
    sizes = [(1, 3), (13, 1), (5, 7), (2, 2), (9, 4), (1, 1), (6, 6), (11, 2)]
    return [
        Pair([END_OF_TEXT, *random_text(1, c, seed + c)[0].tolist()][:c], random_text(1, n, seed + 99 + n)[0].tolist())
        for c, n in sizes
    ]


@pytest.mark.parametrize("router", ROUTERS)
def test_a_score_is_the_sum_of_the_continuations_log_probabilities(router: str) -> None:
    """Against one pass over each row alone, in float64."""
    model = small_model(router)
    for pair, found in zip(pairs(), model_scorer(model, 24, BYTES)(pairs()), strict=True):
        whole = torch.tensor([pair.context + pair.continuation])
        with torch.no_grad():
            logprobs_SV = model(whole[:, :-1])[0].double().log_softmax(-1)[len(pair.context) - 1 :]
        expected = -sum(logprobs_SV[i, token].item() for i, token in enumerate(pair.continuation))
        assert found.nats == pytest.approx(expected, abs=1e-5)
        assert found.greedy == (logprobs_SV.argmax(-1).tolist() == pair.continuation)
        assert (found.tokens, found.bytes) == (len(pair.continuation), sum(pair.continuation))
        assert (found.lost, found.pieces) == (0, 1)


def test_the_greedy_continuation_is_said_to_be_greedy() -> None:
    model, context = small_model("token_choice"), [END_OF_TEXT, 3, 4]
    with torch.no_grad():
        first = int(model(torch.tensor([context]))[0, -1].argmax())
        second = int(model(torch.tensor([[*context, first]]))[0, -1].argmax())
    scorer = model_scorer(model, 24, BYTES)
    asked = [Pair(context, [first, second]), Pair(context, [first, (second + 1) % VOCABULARY])]
    assert [scored.greedy for scored in scorer(asked)] == [True, False]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("rows", [1, 2, 32])
def test_neighbours_order_and_batch_size_change_no_score(router: str, rows: int) -> None:
    """H01, H07: alone, in batches of unequal lengths, and in reverse order."""
    model, asked = small_model(router), pairs()
    alone = [model_scorer(model, 24, BYTES)([pair])[0].nats for pair in asked]
    together = model_scorer(model, 24, BYTES, rows=rows)
    assert [s.nats for s in together(asked)] == pytest.approx(alone, abs=1e-5)
    assert [s.nats for s in together(asked[::-1])] == pytest.approx(alone[::-1], abs=1e-5)


def test_scoring_is_held_out_likelihood_on_the_same_row() -> None:
    """One function of the text: what `eval.likelihood` reports for a window, `eval.score` reports for it."""
    model, row = small_model("expert_choice"), random_text(1, 13)
    batch = MixedWindows(["a"], row[:, :-1], row[:, 1:].contiguous(), torch.ones(1, 12, dtype=torch.bool))
    (found,) = model_scorer(model, 24, BYTES)([Pair(row[0, :1].tolist(), row[0, 1:].tolist())])
    assert found.nats == pytest.approx(model_nats(model, batch).sum(), rel=1e-6)


def test_what_is_too_long_is_cut_and_counted() -> None:
    """Rows of 8: a context loses its beginning; a continuation of 11 is read in rows of 8 and 3 labels."""
    model = small_model("token_choice")
    scorer, text = model_scorer(model, 8, BYTES), random_text(1, 40)[0].tolist()
    cut, fits, long = scorer([Pair(text[:20], text[20:23]), Pair(text[14:20], text[20:23]), Pair(text[:2], text[2:13])])
    assert (cut.lost, fits.lost, long.lost) == (14, 0, 1)
    assert cut.nats == pytest.approx(fits.nats, abs=1e-5)
    parts = scorer([Pair(text[1:2], text[2:10]), Pair(text[4:10], text[10:13])])
    assert (long.pieces, long.tokens) == (2, 11)
    assert long.nats == pytest.approx(parts[0].nats + parts[1].nats, abs=1e-5)


def test_equal_rows_tie_exactly() -> None:
    """Two in batches of unequal widths would differ by rounding, and which of them counts as right by chance."""
    asked = [pairs()[1], *pairs(), pairs()[1]]
    found = model_scorer(small_model("expert_choice"), 24, BYTES, rows=2)(asked)
    assert found[0] == found[2] == found[-1]


def test_nan_is_an_error() -> None:
    model = small_model("dense")
    with torch.no_grad():
        model.final_norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="not a number"):
        model_scorer(model, 24, BYTES)(pairs())


def test_a_bigram_sees_one_token_of_context_and_a_unigram_none() -> None:
    counts = PairCounts(5)
    counts.add(np.array([[1, 2, 1, 2, 1, 3]]), np.array([[2, 1, 2, 1, 3, 4]]))
    unigram, bigram = Unigram(counts), Bigram(counts)
    asked = [Pair([0, 1], [2, 1]), Pair([0, 4, 1], [2, 1]), Pair([0, 3], [2, 1])]
    one, two = (ngram_scorer(b, np.arange(5))(asked) for b in (unigram, bigram))
    assert one[0].nats == one[1].nats == one[2].nats == pytest.approx(-np.log(unigram.probability_V[[2, 1]]).sum())
    assert two[0].nats == two[1].nats != two[2].nats
    expected = -np.log(bigram.probability(np.array([1, 2]), np.array([2, 1]))).sum()
    assert two[0].nats == pytest.approx(expected)
    assert [(s.tokens, s.bytes) for s in two] == [(2, 3)] * 3


def answered(nats: list[float], alone: list[float], texts: list[str], label: int = 0) -> Answer:
    question = Question("q", ("x",) * len(nats), tuple(texts), label)
    made = [[Scored(n, 1, len(t.encode())) for n, t in zip(ns, texts, strict=True)] for ns in (nats, alone)]
    return Answer(question, *made)


def test_the_metrics_by_hand() -> None:
    """Nats 4, 3, 6 for texts of 4, 2 and 5 characters and 4, 2 and 7 bytes; without context 7, 3, 8."""
    found = answered([4.0, 3.0, 6.0], [7.0, 3.0, 8.0], [" abc", " d", " éfgé"])
    metrics = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "without_context")
    # Highest: -3 of the second; -1 of the first (4/4 against 3/2, 6/5); -6/7 of the third; 3 of the first; -3.
    assert [found.correct(metric) for metric in metrics] == [0.0, 1.0, 0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="there is no metric f1"):
        found.correct("f1")


def test_the_first_of_equal_ones_counts() -> None:
    assert answered([2.0, 2.0], [0.0, 0.0], ["a", "b"], 0).correct("acc") == 1.0
    assert answered([2.0, 2.0], [0.0, 0.0], ["a", "b"], 1).correct("acc") == 0.0


def test_mean_and_standard_error_by_hand() -> None:
    assert mean_and_error([1.0, 0.0, 0.0, 1.0, 1.0]) == (0.6, pytest.approx(math.sqrt(1.2 / 4 / 5)))
    assert mean_and_error([1.0]) == (1.0, None)
    with pytest.raises(ValueError, match="no question"):
        mean_and_error([])
    assert paired([1.0, 1.0, 0.0], [1.0, 0.0, 0.0]) == (pytest.approx(1 / 3), pytest.approx(math.sqrt(2 / 3 / 2 / 3)))
    with pytest.raises(ValueError, match="argument 2"):
        paired([1.0], [1.0, 0.0])


def test_bits_per_byte_is_a_ratio_of_sums_with_the_error_of_one() -> None:
    """2 bits for 1 byte and 2 bits for 4: 4/5 and not the mean of 2 and 1/2; inf stays inf."""
    two = [answered([math.log(4)], [0.0], [text]) for text in ("a", "abcd")]
    ratio, error = bits_per_byte(two)
    assert ratio == pytest.approx(0.8)
    assert error == pytest.approx(math.sqrt(2 * (1.2**2 + 1.2**2)) / 5)
    assert bits_per_byte(two[:1]) == (pytest.approx(2.0), None)
    assert bits_per_byte([*two, answered([math.inf], [0.0], ["a"])]) == (math.inf, None)
    # Equal rates have no error, whatever the lengths.
    assert bits_per_byte([answered([n * 0.3], [0.0], ["a" * n]) for n in (1, 5, 9)])[1] == pytest.approx(0, abs=1e-12)


def test_a_summary_counts_questions_without_a_choice_for_bits_only() -> None:
    found = summary([answered([1.0, 2.0], [1.0, 1.0], [" a", " b"]), answered([3.0], [1.0], [" c"])])
    assert (found["questions"], found["with_choice"], found["right_nats"], found["right_bytes"]) == (2, 1, 4.0, 4)
    assert found["acc"] == (1.0, None) and found["less_chance"] == (0.5, None)
    alone = summary([answered([3.0], [1.0], [" c"])])
    assert alone["acc"] is None and alone["bits_per_byte"] == (pytest.approx(3 / math.log(2) / 2), None)
