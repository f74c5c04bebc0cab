"""The held-out choice: a sensible part of every domain, by content and seed only."""

import pytest

from data.errors import DataError
from data.split import choose_held_out, cut_text, rank_key


def choose(texts, fraction=0.02, seed=0):
    keys = [rank_key(text, seed) for text in texts]
    return choose_held_out("d", keys, [len(text.encode()) for text in texts], fraction)


def test_about_the_fraction_is_held_out():
    texts = [f"{number} " * 500 for number in range(1000, 2000)]
    held = sum(len(texts[document]) for document in choose(texts).documents)
    total = sum(map(len, texts))
    assert 0.02 <= held / total <= 0.021


def test_it_depends_on_content_and_seed_not_on_order():
    texts = [f"document {number} " * 50 for number in range(200)]
    held = {texts[document] for document in choose(texts).documents}
    backwards = texts[::-1]
    assert {backwards[document] for document in choose(backwards).documents} == held
    assert {texts[document] for document in choose(texts, seed=1).documents} != held


def test_a_small_domain_holds_out_up_to_a_tenth():
    texts = [f"{number} " * 20 for number in range(100, 200)]  # 8 kB in all
    assert 10 <= len(choose(texts).documents) <= 11


def test_a_single_book_is_cut_near_the_end():
    held = choose(["line of text\n" * 100_000])
    assert (held.documents, held.cut_document, held.cut_bytes) == (frozenset(), 0, 26_000)


def test_a_cut_is_after_a_line_end_and_loses_nothing():
    text = "äöü some line\n" * 1000
    head, tail = cut_text(text, 2000)
    assert head + tail == text and head.endswith("\n")
    assert 1900 <= len(tail.encode()) <= 3100
    assert "".join(cut_text("x" * 500, 50)) == "x" * 500


def test_two_tiny_documents_are_split_one_to_one():
    assert len(choose(["a", "b"]).documents) == 1


def test_one_tiny_document_cannot_be_split():
    with pytest.raises(DataError, match="1 document of 1 bytes.*--heldout-fraction 0"):
        choose(["a"])
    assert choose(["a"], fraction=0).documents == frozenset()


def test_training_always_keeps_a_document():
    held = choose(["x" * 10_000, "y" * 10_000], fraction=0.5)
    assert held.cut_document is not None or len(held.documents) == 1
