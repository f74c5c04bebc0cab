"""Continuation questions: nothing but the context tells right from wrong, and anyone can make the same ones."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from data.corpus import Corpus
from data.prepare import prepare
from eval.tasks.continuation import APART_BYTES, TooLittleText, continuation_questions, main
from eval.tasks.requests import Requests
from training.run import Run

WORDS = ("alpha", "béta", "γάμμα", "delta", "ελ", "zeta;", "eta\n\n", "θ", "iota (", "k")


def corpus_of(folder: Path, documents: dict[str, int], words: int = 900) -> Corpus:
    """Domains of so many random documents, all of them held out but a few."""
    inputs = {}
    for domain, count in documents.items():
        generator = random.Random(domain)
        lines = []
        for _ in range(count):
            text = " ".join(f"{generator.choice(WORDS)}{generator.randint(0, 99)}" for _ in range(words))
            lines.append(json.dumps({"text": text}))
        (folder / f"{domain}.jsonl").write_text("\n".join(lines))
        inputs[domain] = [folder / f"{domain}.jsonl"]
    prepare(folder / "corpus", 280, inputs, heldout_fraction=0.5)
    return Corpus.open(folder / "corpus")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of(tmp_path_factory.mktemp("continuation"), {"many": 12, "few": 4})


def heldout(corpus: Corpus, domain: str) -> list[str]:
    file = corpus.file("heldout", domain)
    return [corpus.tokenizer.decode(file.document(n)) for n in range(len(file.start_M))]


@pytest.mark.parametrize("variant", ["domain", "document"])
def test_the_right_answer_goes_on_and_all_are_real_passages(corpus: Corpus, variant) -> None:  # type: ignore[no-untyped-def]
    questions = continuation_questions(corpus, variant, 8)
    assert Counter(q.domain for q in questions) == {"many": 8, "few": 8}
    for question in questions:
        texts = heldout(corpus, question.domain or "")
        (context,) = set(question.contexts)
        whole = context + question.continuations[question.label]
        (home,) = [text for text in texts if whole in text]
        here = home.index(whole) + len(context)
        for number, answer in enumerate(question.continuations):
            sources = [home] if variant == "document" else texts
            assert any(answer in text for text in sources)
            if number != question.label and answer in home:
                places = [i for i in range(len(home)) if home.startswith(answer, i)]
                assert any(
                    abs(len(home[:i].encode()) - len(home[:here].encode())) >= APART_BYTES for i in places
                ) or any(answer in text for text in texts if text is not home)


@pytest.mark.parametrize("variant", ["domain", "document"])
def test_length_place_and_first_letter_give_nothing_away(corpus: Corpus, variant) -> None:  # type: ignore[no-untyped-def]
    questions = continuation_questions(corpus, variant, 8, continuation_bytes=30, context_bytes=100)
    for question in questions:
        assert {len(text.encode()) for text in question.continuations} == {30}
        assert len({len(text) for text in question.continuations}) == 1
        assert len(set(question.continuations)) == 4
        assert all(text[0] == " " for text in question.continuations)
        assert question.contexts[0][-1:].strip()
        assert 50 - 4 <= len(question.contexts[0].encode()) <= 100
    for domain in ("many", "few"):
        labels = Counter(q.label for q in questions if q.domain == domain)
        assert labels == {0: 2, 1: 2, 2: 2, 3: 2}


def test_passages_of_questions_do_not_overlap(corpus: Corpus) -> None:
    for domain in ("many", "few"):
        questions = [q for q in continuation_questions(corpus, questions=40) if q.domain == domain]
        spans = []
        for question in questions:
            whole = question.contexts[0] + question.continuations[question.label]
            (number,) = [n for n, text in enumerate(heldout(corpus, domain)) if whole in text]
            start = heldout(corpus, domain)[number].index(whole)
            spans.append((number, start, start + len(whole)))
        spans.sort()
        assert len(questions) >= 8 and all(a[0] < b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))


def test_they_depend_on_corpus_seed_and_variant_only(corpus: Corpus, tmp_path: Path) -> None:
    again = continuation_questions(Corpus.open(corpus.folder), questions=8)
    assert again == continuation_questions(corpus, questions=8)
    assert again != continuation_questions(corpus, questions=8, seed=1)
    assert again != continuation_questions(corpus, "document", 8)
    # The first questions are of all domains in turn.
    assert [q.domain for q in again[:4]] == ["many", "few", "many", "few"]
    assert [q.id for q in again[:4]] == ["many-0", "few-0", "many-1", "few-1"]
    other = corpus_of(tmp_path, {"many": 12, "few": 5})
    assert again[:16:2] != continuation_questions(other, questions=8)[:16:2]


def test_a_domain_with_too_little_text_has_no_questions(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, {"long": 8, "short": 8}, 900)
    assert {q.domain for q in continuation_questions(corpus, questions=4, context_bytes=4000)} <= {"long", "short"}
    with pytest.raises(TooLittleText, match="no domain's held-out text has 4 questions of 90000 \\+ 48 bytes"):
        continuation_questions(corpus, context_bytes=90_000)
    with pytest.raises(ValueError, match="questions is 0; allowed are 1 and above"):
        continuation_questions(corpus, questions=0)


def test_the_command_writes_what_the_reader_reads(small_run: Run, tmp_path: Path, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("eval.tasks.continuation.APART_BYTES", 0)  # its held-out text is short
    path = tmp_path / "questions.jsonl"
    sizes = ["--context-bytes", "40", "--continuation-bytes", "12", "--questions", "4"]
    main([str(small_run.folder), "--output", str(path), *sizes])
    expected = continuation_questions(small_run.corpus(), "domain", 4, 0, 40, 12)
    assert list(Requests(path)) == expected
    assert f"{len(expected)} questions (" in capsys.readouterr().out
    with pytest.raises(ValueError, match="must end in .jsonl"):
        main([str(small_run.folder), "--output", str(tmp_path / "questions.csv")])
