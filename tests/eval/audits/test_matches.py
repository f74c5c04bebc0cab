"""Longest verbatim matches, against a plain search."""

from __future__ import annotations

import numpy as np
import pytest

from eval.audits import matches
from eval.audits.matches import longest_matches


def plain(query: list[int], texts: list[np.ndarray]) -> int:
    for length in range(len(query), 0, -1):
        for start in range(len(query) - length + 1):
            wanted = query[start : start + length]
            if any(text[p : p + length].tolist() == wanted for text in texts for p in range(len(text) - length + 1)):
                return length
    return 0


@pytest.mark.parametrize("seed", range(5))
def test_lengths_are_those_of_a_plain_search(seed: int) -> None:
    generator = np.random.default_rng(seed)
    texts = [generator.integers(0, 4, size).astype(np.uint16) for size in (90, 1, 0, 40)]
    queries = [generator.integers(0, 5, size).tolist() for size in (1, 7, 13, 0, 20)]
    found = longest_matches(queries, texts)
    assert [length for _, length in found] == [plain(query, texts) for query in queries]
    for query, (start, length) in zip(queries, found, strict=True):
        assert plain(query[start : start + length], texts) == length


def test_a_match_is_found_anywhere_and_stays_within_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.arange(1000)
    query = [7777, *range(500, 540), 8888]
    assert longest_matches([query], [np.arange(3), text]) == [(1, 40)]
    assert longest_matches([query], [text[:520], text[520:]]) == [(1, 20)]
    real = matches._walk
    monkeypatch.setattr(matches, "_walk", lambda text, levels, reached: real(text, levels, reached, chunk=7))
    assert longest_matches([query], [text]) == [(1, 40)]  # across the parts in which a text is read


def test_nothing_matches_nothing() -> None:
    assert longest_matches([[5, 6], []], [np.array([1, 2])]) == [(0, 0), (0, 0)]
