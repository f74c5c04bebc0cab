"""Bits per byte in the terms of another tokenizer: the perplexity per token and per word that say the same.

A perplexity per token means nothing without its tokenizer: one with longer tokens has fewer and harder ones to
predict. Bits per byte do not depend on it, and n bytes a token turn them into that tokenizer's terms:

    nats per token = bits per byte * ln 2 * bytes per token        perplexity = exp(nats per token)

This is the perplexity of a model that needs as many bits for the text and reads it in those tokens; a model that was
trained on those tokens would have another number of bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from data.corpus import Corpus
from eval.likelihood import Likelihood, Scores
from eval.report_tables import Table


def nats_per_unit(bits_per_byte: float, bytes_per_unit: float) -> float:
    """Nats for one unit (a token of any tokenizer, a word) of so many bytes on average.

    Args:
        bits_per_byte: of a model on a text; not negative, may be inf.
        bytes_per_unit: UTF-8 bytes of the text over its units.

    Raises:
        ValueError: a value is out of range.
    """
    if not bits_per_byte >= 0:
        raise ValueError(f"bits_per_byte is {bits_per_byte}; allowed are 0 and above")
    if not 0 < bytes_per_unit < math.inf:
        raise ValueError(f"bytes_per_unit is {bytes_per_unit}; allowed are numbers above 0")
    return bits_per_byte * math.log(2) * bytes_per_unit


def perplexity_per_unit(bits_per_byte: float, bytes_per_unit: float) -> float:
    """exp of `nats_per_unit`; inf where that overflows."""
    try:
        return math.exp(nats_per_unit(bits_per_byte, bytes_per_unit))
    except OverflowError:
        return math.inf


@dataclass
class TextSize:
    """How long a text is.

    Attributes:
        bytes: of UTF-8.
        tokens: by some tokenizer, without any that it adds at the ends.
        words: between white space (`str.split`).
    """

    bytes: int = 0
    tokens: int = 0
    words: int = 0

    def __add__(self, other: TextSize) -> TextSize:
        return TextSize(self.bytes + other.bytes, self.tokens + other.tokens, self.words + other.words)


def load_tokenizer(path: str | Path) -> tokenizers.Tokenizer:
    """A tokenizer.json of any kind that the library `tokenizers` reads, without truncation and padding.

    Raises:
        ValueError: the file is missing or is none.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; give a tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer.json that can be read ({error})") from None
    # A file may say that texts are cut at 512 tokens, which would make every token seem long.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def text_size(tokenizer: tokenizers.Tokenizer, texts: Iterable[str]) -> TextSize:
    """Of all texts together."""
    size = TextSize()
    for text in texts:
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        size += TextSize(len(text.encode("utf-8", errors="replace")), tokens, len(text.split()))
    return size


def heldout_sizes(tokenizer: tokenizers.Tokenizer, corpus: Corpus) -> dict[str, TextSize]:
    """Of all held-out documents of each domain that has any."""
    sizes = {}
    for domain in corpus.domains:
        texts = (text.decode("utf-8", errors="replace") for text in corpus.documents("heldout", domain))
        size = text_size(tokenizer, texts)
        if size.tokens:
            sizes[domain] = size
    return sizes


def equivalents(scores: Scores, sizes: dict[str, TextSize], name: str) -> Table:
    """Bits per byte of each domain and of all bytes, in a tokenizer's terms.

    Args:
        scores: of a model on held-out text of the domains.
        sizes: by domain, of the text whose bytes per token are taken.
        name: of the tokenizer.
    """
    parts: list[tuple[str, Likelihood, TextSize]] = [
        (domain, scores.domains[domain], size) for domain, size in sizes.items() if domain in scores.domains
    ]
    parts.append(("all bytes", scores.total, sum((size for _, _, size in parts), TextSize())))
    rows = []
    for domain, likelihood, size in parts:
        bits = likelihood.bits_per_byte
        per_token, per_word = size.bytes / size.tokens, size.bytes / max(1, size.words)
        rows.append(
            (
                domain,
                f"{bits:.4f}",
                f"{per_token:.3f}",
                f"{nats_per_unit(bits, per_token):.4f}",
                f"{perplexity_per_unit(bits, per_token):,.2f}",
                f"{per_word:.3f}",
                f"{perplexity_per_unit(bits, per_word):,.4g}",
            )
        )
    return Table(
        f"Held-out perplexity in the terms of {name}",
        ("domain", "bits/byte", "bytes/token", "nats/token", "perplexity/token", "bytes/word", "perplexity/word"),
        rows,
        "Computed from bits per byte and the tokenizer's bytes per token over the whole held-out text; not the "
        "perplexity of a model trained on those tokens. Words are what stands between white space.",
    )
