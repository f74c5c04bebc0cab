"""Sums of each held-out document: whatever the batches, the ranks and the stride."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from data.batches import document_numbers, heldout_windows
from data.sliding import sliding_windows
from eval import bits_per_byte
from eval.command import run_command
from eval.likelihood import evaluate, evaluate_windows
from moe.model import Transformer
from moe.routing import RoutingContext
from training.run import Run


@pytest.fixture(scope="module")
def model(small_run: Run) -> Transformer:
    loaded = small_run.model("cpu")
    loaded.compute_dtype = torch.float32
    return loaded


def sums(scores):
    return {(d, n): (p.nats, p.tokens, p.bytes) for d, docs in scores.documents.items() for n, p in docs.items()}


def test_documents_add_up_to_their_domain_and_hold_their_own_bytes(many_run: Run) -> None:
    corpus = many_run.corpus()
    scores = evaluate(many_run.model("cpu"), corpus, many_run.config)
    for domain, part in scores.domains.items():
        documents = scores.documents[domain]
        assert len(documents) == len(corpus.document_starts("heldout", domain))
        assert math.fsum(p.nats for p in documents.values()) == pytest.approx(part.nats, rel=1e-9)
        for number, found in documents.items():
            tokens = corpus.file("heldout", domain).document(number)
            assert found.tokens == len(tokens) + 1  # and the marker that ends it
            assert found.bytes == len(corpus.tokenizer.decode_bytes(tokens.tolist()))


def test_batches_of_1_2_and_8_give_the_same_documents(many_run: Run, model: Transformer) -> None:
    corpus = many_run.corpus()
    found = []
    for rows in (1, 2, 8):
        for batches in (heldout_windows(corpus, 24, rows, 300), sliding_windows(corpus, 24, 7, rows, 300)):
            found.append(sums(evaluate_windows(model, batches, corpus.tokenizer.token_bytes_V)))
    for other in found[2:]:
        reference = found[found.index(other) % 2]
        assert other.keys() == reference.keys()
        for key, (nats, tokens, text_bytes) in other.items():
            assert (tokens, text_bytes) == reference[key][1:]
            assert nats == pytest.approx(reference[key][0], rel=1e-5)


def test_a_cut_document_counts_with_what_was_scored(many_run: Run, model: Transformer) -> None:
    corpus = many_run.corpus()
    bytes_v = corpus.tokenizer.token_bytes_V
    whole, part = (sums(evaluate_windows(model, heldout_windows(corpus, 24, 4, n), bytes_v)) for n in (None, 100))
    assert part.keys() < whole.keys()
    assert all(part[key][1] <= whole[key][1] for key in part)


@pytest.mark.parametrize("within", [False, True])
def test_a_stride_of_one_is_a_loop_over_tokens_with_their_exact_context(many_run: Run, model, within: bool) -> None:
    """Every label alone, from the S inputs before it at most; documents apart where attention keeps them apart."""
    corpus, length = many_run.corpus(), 24
    end_of_text = corpus.tokenizer.end_of_text
    batches = sliding_windows(corpus, length, 1, 5, 60, within)
    found = evaluate_windows(model, batches, corpus.tokenizer.token_bytes_V, end_of_text if within else None)
    expected = 0.0
    for domain in corpus.domains:
        token_N = np.asarray(corpus.tokens("heldout", domain), dtype=np.int64)
        label_N = np.append(token_N[1:], end_of_text)
        start_M = corpus.document_starts("heldout", domain)
        windows = -(-len(token_N) // length)
        for chosen in (index * windows // 3 for index in range(3)):
            for place in range(chosen * length, min((chosen + 1) * length, len(token_N))):
                lowest = int(start_M[start_M <= place][-1]) if within else 0
                first = max(lowest, place - (length - 1))
                if place < lowest + length:
                    first = lowest  # the first window is scored in full
                if not within and chosen and place == chosen * length:
                    first = max(0, place - (length - 1))
                tokens = torch.from_numpy(token_N[first : place + 1])[None]
                documents = document_numbers(tokens, end_of_text) if within else None
                with torch.no_grad():
                    context = RoutingContext(1, tokens.shape[1], mode="causal")
                    logits_V = model(tokens, context, documents)[0, -1].double()
                expected -= float(logits_V.log_softmax(-1)[label_N[place]])
    assert found.total.tokens == 2 * 3 * length
    assert found.total.nats == pytest.approx(expected, rel=1e-5)


def test_more_context_helps_and_the_full_stride_is_no_stride(many_run: Run) -> None:
    corpus, config, run_model = many_run.corpus(), many_run.config, many_run.model("cpu")
    plain = evaluate(run_model, corpus, config, 200)
    assert sums(evaluate(run_model, corpus, config, 200, stride=24)) == sums(plain)
    other = evaluate(run_model, corpus, config, 200, stride=3)
    assert other.total.tokens == plain.total.tokens and other.total.nats != plain.total.nats
    with pytest.raises(ValueError, match="causal routing"):
        evaluate(run_model, corpus, config, 200, mode="train_router", stride=3)


def test_processes_that_share_the_rows_have_the_sums_of_one(tmp_path) -> None:
    from tests.parallel.pool import Pool

    pool = Pool(2)
    try:
        first, second = pool.run("tests.eval.document_jobs:document_sums", True, timeout=60)
        from tests.eval.document_jobs import document_sums

        alone = document_sums(False)
    finally:
        pool.close()
    assert first == second
    assert first.keys() == alone.keys()
    for key, (nats, tokens, text_bytes) in alone.items():
        assert first[key][1:] == (tokens, text_bytes)
        assert first[key][0] == pytest.approx(nats, rel=1e-5)


def test_the_command(many_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    bits_per_byte.main([str(many_run.folder), "--stride", "6", "--tokens", "200", "--json"])
    values = json.loads(capsys.readouterr().out)
    assert values["stride"] == 6 and values["total"]["interval"]["half_width"] > 0
    bits_per_byte.main([str(many_run.folder), "--tokens", "200"])
    printed = capsys.readouterr().out
    assert "windows side by side" in printed and "± 0." in printed


def test_one_held_out_document_has_no_interval_and_the_reason(small_run: Run, capsys) -> None:
    bits_per_byte.main([str(small_run.folder)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "No interval for low: 1 document; an interval needs 5." in printed and "nan" not in printed


@pytest.mark.parametrize(
    "flags, message", [(["--stride", "25"], "sequence length, 24"), (["--tokens", "0"], "--tokens")]
)
def test_bad_numbers_are_one_line(small_run: Run, capsys, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda: bits_per_byte.main([str(small_run.folder), *flags]))
    assert stopped.value.code == 1 and message in capsys.readouterr().err
