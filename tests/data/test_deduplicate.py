"""Near-duplicates are found, everything else is kept, and the outcome is fixed."""

import random

import numpy as np
import pytest

from data import deduplicate
from data.deduplicate import Deduplicator, jaccard


def kept(texts: list[str]) -> list[int]:
    """Give the positions of the texts that are not near-duplicates of earlier kept ones."""
    deduplicator, positions = Deduplicator(), []
    for position, text in enumerate(texts):
        if deduplicator.find_earlier_or_add(text, position, texts.__getitem__) is None:
            positions.append(position)
    return positions


def changed(text: str, words: int, seed: int) -> str:
    """Replace `words` words of `text`, at evenly spaced places."""
    parts = text.split(" ")
    for number in range(words):
        parts[(2 * number + 1) * len(parts) // (2 * words)] = f"other{seed}x{number}"
    return " ".join(parts)


@pytest.fixture
def text() -> str:
    generator = random.Random(0)
    return " ".join(f"word{generator.randrange(10_000)}" for _ in range(600))


def test_copies_and_near_copies_are_removed(text):
    assert kept([text, text, changed(text, 3, seed=1), text.replace(" ", "\n")]) == [0]


def test_texts_that_share_little_are_kept(text):
    assert kept([text, changed(text, 30, seed=1), text[: len(text) // 2]]) == [0, 1, 2]


def test_the_exact_similarity_decides(text):
    """A changed word breaks 8 of 593 shingles, so Jaccard crosses 0.8 between 8 and 9 words."""
    hashes = Deduplicator().shingles
    for words, is_near in [(8, True), (9, False)]:
        other = changed(text, words, seed=2)
        assert (jaccard(hashes(text), hashes(other)) >= 0.8) == is_near
        assert kept([text, other]) == ([0] if is_near else [0, 1])


def test_word_order_matters():
    assert kept(["a b c d e f g h", "h g f e d c b a"]) == [0, 1]


def test_short_texts_are_compared_whole():
    assert kept(["yes", "no", "yes", "yes indeed"]) == [0, 1, 3]


def test_shingle_sets_equal_a_plain_implementation(text):
    words = (text + " " + text[:1000]).split()
    plain = {tuple(words[start : start + 8]) for start in range(len(words) - 7)}
    found = Deduplicator().shingles(" ".join(words))
    assert len(found) == len(plain)
    assert np.array_equal(found, np.unique(found))


@pytest.mark.parametrize("piece", [1, 10, 1000])
def test_a_text_read_in_pieces_has_the_same_shingles(text, monkeypatch, piece):
    whole = Deduplicator().shingles(text)
    monkeypatch.setattr(deduplicate, "_PIECE_CHARACTERS", piece)
    assert np.array_equal(Deduplicator().shingles(text), whole)
