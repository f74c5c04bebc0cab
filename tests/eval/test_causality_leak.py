"""A3 and A6 on models whose leak is known: exact numbers, not signs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from eval.leak import Estimate, measure_leak, mixed_rows
from training.run import Run

S, ROWS, V = 5, 2, 4
TWO_BYTES_V = np.full(V, 2)


def text(pairs: int) -> tuple[Tensor, Tensor]:
    """True rows of ids 0 and 1, and others of ids 2 and 3, in turn: no replaced token is ever the true one."""
    token_RS = torch.cat([torch.randint(2, (ROWS, S + 1)) + 2 * (block % 2) for block in range(2 * pairs)])
    return token_RS[:, :-1], token_RS[:, 1:]


def peeking(token_BS: Tensor, label_BS: Tensor) -> np.ndarray:
    """Gives the next token of the input 0.7 and each of the other three 0.1; uniform where there is no next token."""
    nats_BS = torch.full(label_BS.shape, math.log(V), dtype=torch.float64)
    seen_BS = token_BS[:, 1:] == label_BS[:, :-1]
    nats_BS[:, :-1] = torch.where(seen_BS, -math.log(0.7), -math.log(0.1))
    return nats_BS.numpy()


def honest(token_BS: Tensor, label_BS: Tensor) -> np.ndarray:
    """Depends on the token before the label only."""
    return (1.0 + 0.25 * token_BS.double()).numpy()


def test_the_leak_of_a_model_that_peeks() -> None:
    """0.7 with the true future, 0.1 without: log2 7 bits at each position that has a future, 4 of 5."""
    token_RS, label_RS = text(pairs=3)
    report = measure_leak(peeking, honest, token_RS, label_RS, TWO_BYTES_V, ROWS, pairs=3, positions=S)
    assert report.leak.mean == pytest.approx(0.8 * math.log2(7))
    assert report.leak.standard_error == pytest.approx(0, abs=1e-12) and report.leak.draws == 3
    per_byte = report.per_byte(report.leak)
    assert per_byte is not None and per_byte.mean == pytest.approx(0.4 * math.log2(7))


def test_a_causal_model_leaks_exactly_nothing_and_its_gap_is_not_a_leak() -> None:
    token_RS, label_RS = text(pairs=2)
    report = measure_leak(honest, peeking, token_RS, label_RS, TWO_BYTES_V, ROWS, pairs=2)
    assert report.leak == Estimate(0.0, 0.0, 2)
    assert report.gap.mean == pytest.approx(report.causal_bits - report.native_bits)
    assert report.causal_bits == pytest.approx((0.8 * -math.log(0.7) + 0.2 * math.log(V)) / math.log(2))


def test_only_what_follows_the_position_is_replaced_and_in_every_row() -> None:
    token_RS, label_RS = text(pairs=2)
    seen: list[Tensor] = []

    def record(token_BS: Tensor, label_BS: Tensor) -> np.ndarray:
        seen.append(token_BS.clone())
        return honest(token_BS, label_BS)

    measure_leak(record, honest, token_RS, label_RS, TWO_BYTES_V, ROWS, pairs=2, positions=S)
    assert len(seen) == 2 * (1 + S)
    for t, changed_BS in enumerate(seen[1 : 1 + S]):
        assert changed_BS[:, : t + 1].equal(token_RS[:ROWS, : t + 1])
        assert changed_BS[:, t + 1 :].equal(token_RS[ROWS : 2 * ROWS, t + 1 :])
    assert seen[1 + S].equal(token_RS[2 * ROWS : 3 * ROWS])  # no row serves two pairs


def test_the_standard_error_is_that_of_independent_pairs() -> None:
    """Three draws of 1, 2 and 6: mean 3, variance 7, standard error sqrt(7 / 3)."""
    estimate = Estimate.of([1.0, 2.0, 6.0])
    assert (estimate.mean, estimate.draws) == (3.0, 3)
    assert estimate.standard_error == pytest.approx(math.sqrt(7 / 3))


def test_text_without_bytes_has_no_bits_a_byte() -> None:
    token_RS, label_RS = text(pairs=2)
    report = measure_leak(peeking, honest, token_RS, label_RS, np.zeros(V), ROWS, pairs=2)
    assert report.per_byte(report.leak) is None


def test_too_little_text_and_overflow_are_errors() -> None:
    token_RS, label_RS = text(pairs=2)
    with pytest.raises(ValueError, match="7 whole rows of held-out text: two pairs of 2 rows .* need 8"):
        measure_leak(peeking, honest, token_RS[:7], label_RS[:7], TWO_BYTES_V, ROWS, pairs=2)
    with pytest.raises(ValueError, match="not finite"):
        measure_leak(lambda t, y: honest(t, y) * np.nan, honest, token_RS, label_RS, TWO_BYTES_V, ROWS, pairs=2)


def test_rows_are_whole_windows_of_all_domains(small_run: Run) -> None:
    corpus = small_run.corpus()
    token_RS, label_RS = mixed_rows(corpus, 24, 10)
    assert token_RS.shape == label_RS.shape == (10, 24)
    assert token_RS[:, 1:].equal(label_RS[:, :-1]) and label_RS.min() >= 0
    texts = [corpus.tokenizer.decode(row_S.tolist()) for row_S in token_RS]
    low = [any(letter in text for letter in "abcde") for text in texts]
    assert 0 < sum(low) < 10 and low != sorted(low)
    assert mixed_rows(corpus, 24, 10)[0].equal(token_RS)
