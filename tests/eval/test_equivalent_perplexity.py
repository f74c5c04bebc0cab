"""Bits per byte in the terms of another tokenizer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tokenizers

from data.tokenizer import train_tokenizer
from eval.equivalent_perplexity import (
    TextSize,
    equivalents,
    heldout_sizes,
    load_tokenizer,
    nats_per_unit,
    perplexity_per_unit,
    text_size,
)
from eval.likelihood import Likelihood, Scores
from training.run import Run


def test_known_values() -> None:
    """One bit a byte: a token of 4 bytes has perplexity 16; a byte has 2."""
    assert perplexity_per_unit(1.0, 4.0) == pytest.approx(16.0)
    assert perplexity_per_unit(1.0, 1.0) == pytest.approx(2.0)
    assert nats_per_unit(0.5, 3.0) == pytest.approx(1.5 * math.log(2))
    assert perplexity_per_unit(0.0, 4.0) == 1.0
    assert perplexity_per_unit(400.0, 4.0) == perplexity_per_unit(math.inf, 4.0) == math.inf


def test_in_its_own_terms_a_run_has_its_own_perplexity() -> None:
    """Where no marker is scored: 30 tokens of 90 bytes at 1.7 nats a token."""
    likelihood = Likelihood(30 * 1.7, 30, 90)
    assert nats_per_unit(likelihood.bits_per_byte, 90 / 30) == pytest.approx(1.7)
    assert perplexity_per_unit(likelihood.bits_per_byte, 3.0) == pytest.approx(likelihood.perplexity)


@pytest.mark.parametrize(("bits", "size"), [(-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf), (1.0, math.nan)])
def test_values_out_of_range_are_refused(bits: float, size: float) -> None:
    with pytest.raises(ValueError, match="allowed are"):
        nats_per_unit(bits, size)


def word_tokenizer(path: Path, **settings: int) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "[S]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[S] $A", special_tokens=[("[S]", 2)])
    if settings:
        made.enable_truncation(settings["most"])
        made.enable_padding(length=settings["least"])
    made.save(str(path))
    return path


def test_tokens_are_counted_without_truncation_padding_and_added_ones(tmp_path: Path) -> None:
    """A file may ask for all three, and each would falsify the bytes per token."""
    plain = load_tokenizer(word_tokenizer(tmp_path / "plain.json"))
    cutting = load_tokenizer(word_tokenizer(tmp_path / "cutting.json", most=3, least=2))
    for tokenizer in (plain, cutting):
        assert text_size(tokenizer, ["a é a b a", "a"]) == TextSize(bytes=11, tokens=6, words=6)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken.json: not a tokenizer.json that can be read"):
        load_tokenizer(tmp_path / "broken.json")


def test_held_out_text_is_counted_by_domain(small_run: Run, tmp_path: Path) -> None:
    corpus = small_run.corpus()
    own = heldout_sizes(load_tokenizer(corpus.folder / "tokenizer.json"), corpus)
    for domain, size in own.items():
        assert size.bytes == corpus.text_bytes("heldout", domain)
        markers = len(corpus.document_starts("heldout", domain))
        assert size.tokens == len(corpus.tokens("heldout", domain)) - markers
    bytewise = train_tokenizer(["a"], 257, tmp_path / "tokenizer.json")
    assert bytewise.vocabulary_size == 257
    sizes = heldout_sizes(load_tokenizer(tmp_path / "tokenizer.json"), corpus)
    assert all(size.tokens == size.bytes for size in sizes.values())


def test_the_table_takes_sums_first() -> None:
    scores = Scores({"a": Likelihood(math.log(2) * 100, 10, 50), "b": Likelihood(math.log(2) * 50, 10, 50)})
    table = equivalents(scores, {"a": TextSize(80, 20, 10), "b": TextSize(40, 40, 8)}, "t")
    assert [row[:5] for row in table.rows] == [
        ("a", "2.0000", "4.000", "5.5452", "256.00"),
        ("b", "1.0000", "1.000", "0.6931", "2.00"),
        ("all bytes", "1.5000", "2.000", "2.0794", "8.00"),
    ]
