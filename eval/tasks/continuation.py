"""A task made from held-out text: which of four passages goes on from here?

    python -m eval.tasks.continuation RUN --output FILE.jsonl [--variant document] [--questions 100] [--seed 0]

The right answer is what follows the context in the text; the others are passages of the same domain ("domain"), or of
the same document ("document", harder, since names and style no longer tell). Nothing but the context can tell them
apart: all begin with a space after something else, and have equally many bytes and characters; right and wrong ones
are drawn from the same text; the right one stands equally often in each place. So a model that ignores the context is
right 25% of the time, whatever it knows of the language. The questions depend on the corpus' sha256, the variant, the
counts and the seed, and on nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from data.atomic import write_atomically
from data.corpus import Corpus
from eval.command import run_command
from eval.tasks.requests import SUFFIXES, Question
from training.run import Run

Variant = Literal["domain", "document"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
CHOICES = 4
CONTEXT_BYTES = 320
CONTINUATION_BYTES = 48
QUESTIONS = 100  # of each domain at most
APART_BYTES = 1024  # between a question's passage and a wrong answer: the next sentences would be a second right one
TRIES = 64


class TooLittleText(ValueError):
    """No domain's held-out text has a question in it."""


def continuation_questions(
    corpus: Corpus,
    variant: Variant = "domain",
    questions: int = QUESTIONS,
    seed: int = 0,
    context_bytes: int = CONTEXT_BYTES,
    continuation_bytes: int = CONTINUATION_BYTES,
) -> list[Question]:
    """Make the questions of every domain that has text enough.

    Args:
        corpus: whose held-out documents are read; those that are not UTF-8 are left out.
        variant: where wrong answers come from.
        questions: of each domain at most, rounded down to a multiple of four. Their passages do not overlap, so short
            texts give fewer.
        seed: of the drawing.
        context_bytes: of each context, or less where its document begins within.
        continuation_bytes: of each continuation.

    Raises:
        TooLittleText: no domain gives four questions.
        ValueError: a count is below 1.
    """
    for name, value in (("questions", questions), ("context", context_bytes), ("continuation", continuation_bytes)):
        if value < 1:
            raise ValueError(f"{name} is {value}; allowed are 1 and above")
    by_domain = []
    for domain in corpus.domains:
        generator = random.Random(f"{corpus.sha256} {domain} {variant} {seed} {context_bytes} {continuation_bytes}")
        passages = _Passages(_documents(corpus, domain), continuation_bytes)
        by_domain.append(_domain_questions(domain, passages, variant, questions, context_bytes, generator))
    # The domains take turns, so that the first questions are of all of them.
    made = [question for turn in itertools.zip_longest(*by_domain) for question in turn if question is not None]
    if not made:
        raise TooLittleText(
            f"{corpus.folder}: no domain's held-out text has {CHOICES} questions of {context_bytes} + "
            f"{continuation_bytes} bytes in it; hold more text out, or ask for shorter passages"
        )
    return made


class _Passages:
    """Every passage that may be an answer: it begins with a space behind something else and ends with a character.

    Attributes:
        document_P, start_P, characters_P: of each: its document, first byte and number of characters.
    """

    def __init__(self, documents: list[bytes], length: int) -> None:
        self.documents, self.length = documents, length
        found = [_starts(text, length) for text in documents]
        self.document_P = np.repeat(np.arange(len(found)), [len(start_M) for start_M, _ in found])
        self.start_P = np.concatenate([np.empty(0, dtype=np.int64), *(start_M for start_M, _ in found)])
        self.characters_P = np.concatenate([np.empty(0, dtype=np.int64), *(count_M for _, count_M in found)])

    def text(self, place: int) -> str:
        """A passage."""
        start = self.start_P[place]
        return self.documents[self.document_P[place]][start : start + self.length].decode()

    def context(self, place: int, most: int) -> str:
        """What stands before it: at most so many bytes, in whole characters."""
        start = self.start_P[place]
        before = self.documents[self.document_P[place]][max(0, start - most) : start]
        return before.decode(errors="ignore")  # only a character that is cut at its beginning is left out

    def others(self, place: int, variant: Variant, apart: int) -> np.ndarray:
        """Passages of as many characters from the same domain or document, so many bytes away, in order."""
        same_P = self.document_P == self.document_P[place]
        near_P = same_P & (np.abs(self.start_P - self.start_P[place]) < apart)
        alike_P = (self.characters_P == self.characters_P[place]) & ~near_P
        return np.flatnonzero(alike_P & same_P if variant == "document" else alike_P)


def _starts(text: bytes, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(start_M, characters_M) of a document's passages."""
    byte_N = np.frombuffer(text, dtype=np.uint8)
    if len(byte_N) <= length:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    begins_N = np.append((byte_N & 0xC0) != 0x80, True)  # a character begins here, or the text ends
    before_N = np.concatenate([[0], begins_N[:-1].cumsum()])  # characters that begin before here
    space_N = np.isin(byte_N, list(b" \t\n\r\f\v"))
    start_M = np.flatnonzero((byte_N[1:] == ord(" ")) & ~space_N[:-1]) + 1
    start_M = start_M[start_M + length <= len(byte_N)]
    start_M = start_M[begins_N[start_M + length]]
    return start_M, before_N[start_M + length] - before_N[start_M]


def _documents(corpus: Corpus, domain: str) -> list[bytes]:
    kept = []
    for text in corpus.documents("heldout", domain):
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        kept.append(text)
    return kept


def _domain_questions(
    domain: str, passages: _Passages, variant: Variant, questions: int, context_bytes: int, generator: random.Random
) -> list[Question]:
    """A multiple of four questions, of passages that do not overlap."""
    places = np.flatnonzero(passages.start_P >= context_bytes // 2).tolist()
    _shuffle(places, generator)
    taken: dict[int, list[int]] = defaultdict(list)  # by document, where chosen passages begin, in order
    reach = context_bytes + passages.length
    found: list[tuple[int, list[int]]] = []
    for place in places:
        if len(found) == questions - questions % CHOICES:
            break
        start, starts = int(passages.start_P[place]), taken[int(passages.document_P[place])]
        at = bisect_left(starts, start)
        if any(abs(start - starts[i]) < reach for i in (at - 1, at) if 0 <= i < len(starts)):
            continue
        wrong = _wrong(place, passages, variant, max(APART_BYTES, reach), generator)
        if wrong is not None:
            starts.insert(at, start)
            found.append((place, wrong))
    del found[len(found) - len(found) % CHOICES :]
    labels = [number % CHOICES for number in range(len(found))]
    _shuffle(labels, generator)
    made = []
    for number, ((place, wrong), label) in enumerate(zip(found, labels, strict=True)):
        answers = [passages.text(other) for other in wrong]
        answers.insert(label, passages.text(place))
        contexts = (passages.context(place, context_bytes),) * CHOICES
        made.append(Question(f"{domain}-{number}", contexts, tuple(answers), label, domain))
    return made


def _wrong(place: int, passages: _Passages, variant: Variant, apart: int, generator: random.Random) -> list[int] | None:
    """Three passages that are far from this one and all different; None where they are not to be found."""
    others, chosen, texts = passages.others(place, variant, apart), list[int](), {passages.text(place)}
    for _ in range(TRIES if len(others) else 0):
        other = int(others[int(generator.random() * len(others))])
        if passages.text(other) not in texts:
            texts.add(passages.text(other))
            chosen.append(other)
            if len(chosen) == CHOICES - 1:
                return chosen
    return None


def _shuffle(items: list, generator: random.Random) -> None:
    """Fisher-Yates from `random()` alone, the one drawing that Python promises to keep between versions."""
    for last in range(len(items) - 1, 0, -1):
        other = int(generator.random() * (last + 1))
        items[last], items[other] = items[other], items[last]


def write_questions(questions: Sequence[Question], path: Path) -> None:
    """A question a line, complete or not at all."""
    with write_atomically(path) as file:
        for question in questions:
            file.write((json.dumps(question.to_json(), ensure_ascii=False) + "\n").encode())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.tasks.continuation", description="Make continuation questions of a run's held-out text."
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--output", type=Path, required=True, help="the file to write; its name ends in .jsonl")
    parser.add_argument("--variant", choices=VARIANTS, default="domain", help="where wrong answers come from")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help=f"of each domain (default {QUESTIONS})")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (default 0)")
    parser.add_argument("--context-bytes", type=int, default=CONTEXT_BYTES, help=f"default {CONTEXT_BYTES}")
    parser.add_argument("--continuation-bytes", type=int, default=CONTINUATION_BYTES, help=f"{CONTINUATION_BYTES}")
    options = parser.parse_args(arguments)
    if not options.output.name.endswith(SUFFIXES[0]):
        raise ValueError(f"--output is {options.output}; its name must end in {SUFFIXES[0]}")
    corpus = Run.open(options.run).corpus()
    questions = continuation_questions(
        corpus, options.variant, options.questions, options.seed, options.context_bytes, options.continuation_bytes
    )
    write_questions(questions, options.output)
    domains = [question.domain for question in questions]
    counts = ", ".join(f"{domain} {domains.count(domain)}" for domain in dict.fromkeys(domains))
    print(f"wrote {options.output}: {len(questions)} questions ({counts})")


if __name__ == "__main__":
    run_command(main)
