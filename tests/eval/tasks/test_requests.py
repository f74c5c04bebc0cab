"""Request files: two layouts, read line by line; what is wrong is refused with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eval.tasks.requests import Question, RequestError, Requests, digest

QUESTION = {"context": "1 + 1 =", "continuations": [" 3", " 2", " two"], "label": 1}


def write(path: Path, *lines: Any) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def oe_eval(doc_id: int, idx: int, continuation: str, label: Any, context: str = "Q") -> dict[str, Any]:
    """A line as AI2's request files have it."""
    return {
        "request_type": "loglikelihood",
        "doc": {"id": "Mercury_1", "query": context, "choices": ["a", "b"], "gold": label},
        "request": {"context": context, "continuation": continuation},
        **{"idx": idx, "task_name": "arc", "doc_id": doc_id, "native_id": "Mercury_1", "label": label},
    }


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_question_a_line(tmp_path: Path, suffix: str) -> None:
    named = QUESTION | {"id": "sum", "domain": "maths", "anything": {"else": 1}}
    path = write(tmp_path / f"sums{suffix}", QUESTION, named, {"context": "", "continuations": ["é"]})
    requests = Requests(path)
    first, second, third = requests
    assert requests.name == "sums"
    assert first == Question("line 1", ("1 + 1 =",) * 3, (" 3", " 2", " two"), 1)
    assert (second.id, second.domain, second.continuations) == ("sum", "maths", first.continuations)
    assert third == Question("line 3", ("",), ("é",), 0)  # one continuation: no choice, no label
    assert second.to_json() == {key: named[key] for key in ("id", "domain", "context", "continuations", "label")}


def test_a_continuation_a_line_as_in_oe_evals_files(tmp_path: Path) -> None:
    """Questions of 2 and 3 continuations, contexts that differ (WinoGrande), and copies without context."""
    lines = [
        *(oe_eval(0, 0, " a", 1), oe_eval(0, 1, " b", 1)),
        *(oe_eval(1, i, " same", 2, context) for i, context in enumerate(("x", "y", "z"))),
        *(oe_eval(1_000_000, i, text, 1, "Answer:") for i, text in enumerate((" a", " b"))),
    ]
    requests = Requests(write(tmp_path / "arc" / "rc_0shot" / "requests.jsonl.gz", *lines))
    two, three = requests
    assert (requests.name, requests.unconditional) == ("arc/rc_0shot", 2)
    assert two == Question("0", ("Q", "Q"), (" a", " b"), 1)
    assert three == Question("1", ("x", "y", "z"), (" same",) * 3, 2)
    with pytest.raises(ValueError, match="question 1 has several contexts"):
        three.to_json()


@pytest.mark.parametrize("label", [None, "signs", ["signs", "sign"], 0])
def test_one_continuation_is_right_whatever_its_label_is_called(tmp_path: Path, label: Any) -> None:
    """Bits-per-byte requests of oe_eval."""
    (question,) = Requests(write(tmp_path / "bpb.jsonl", oe_eval(7, 0, " signs", label)))
    assert (question.id, question.label, question.continuations) == ("7", 0, (" signs",))


def test_plain_lines_without_doc_id_are_questions_of_their_own(tmp_path: Path) -> None:
    lines = [{"context": "a", "continuation": " b", "label": 0}, {"context": "a", "continuation": " c"}]
    assert [q.continuations for q in Requests(write(tmp_path / "x.jsonl", *lines))] == [(" b",), (" c",)]


def test_a_file_is_read_only_as_far_as_is_asked(tmp_path: Path) -> None:
    requests = iter(Requests(write(tmp_path / "x.jsonl", QUESTION, "{broken")))
    assert next(requests).label == 1
    with pytest.raises(RequestError, match="line 2"):
        next(requests)


PLAIN = {"context": "a", "continuation": " b", "label": 0, "doc_id": 0, "idx": 0}
BAD = {
    "not JSON": ("{", "not a line of JSON in UTF-8"),
    "a blank line": ("", "not a line of JSON in UTF-8"),
    "nested too deeply": ("[" * 100_000, "not a line of JSON in UTF-8"),
    "no object": ([1], "expected an object, found a list"),
    "no context": ({"continuations": [" a"], "label": 0}, '"context" is missing'),
    "context is no text": (QUESTION | {"context": 5}, '"context" is the number 5; expected text'),
    "no continuations": (QUESTION | {"continuations": []}, '"continuations" is a list; expected a list of at least'),
    "a null continuation": (QUESTION | {"continuations": [" a", None]}, '"continuations"[1] is null; expected text'),
    "an empty continuation": (QUESTION | {"continuations": ["", " a"]}, '"continuations"[0] is empty'),
    "half a character": (QUESTION | {"context": "\ud800"}, '"context" holds half a surrogate pair'),
    "no label": ({k: QUESTION[k] for k in ("context", "continuations")}, '"label" is missing; expected the index'),
    "a label of text": (QUESTION | {"label": "2"}, '"label" is text; expected the index of the right one of 3'),
    "a label of true": (QUESTION | {"label": True}, '"label" is a truth value'),
    "a label of 1.0": (QUESTION | {"label": 1.0}, '"label" is the number 1.0'),
    "a label too large": (QUESTION | {"label": 3}, '"label" is 3, but the question has 3 continuations: 0 to 2'),
    "a label below 0": (QUESTION | {"label": -1}, '"label" is -1'),
    "an id that is none": (QUESTION | {"id": 5}, '"id" is the number 5'),
    "neither layout": ({"prompt": "a"}, 'expected the key "continuations", "continuation" or "request"'),
    "the other layout": (PLAIN, "a continuation a line, but the lines before hold a question each"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, case: str) -> None:
    line, message = BAD[case]
    path = write(tmp_path / "bad.jsonl", QUESTION, line)
    with pytest.raises(RequestError) as refused:
        list(Requests(path))
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert message in str(refused.value)


BAD_LINES = {
    "a gap": ([PLAIN, PLAIN | {"idx": 2}], 2, '"idx" is 2; 1 comes next in this question'),
    "twice": ([PLAIN, PLAIN], 2, '"idx" is 0; 1 comes next in this question'),
    "beginning at 1": ([PLAIN | {"idx": 1}], 1, '"idx" is 1; 0 comes next'),
    "another label": ([PLAIN, PLAIN | {"idx": 1, "label": 1}], 2, "must be those of the question's first line"),
    "a label beyond": (
        [PLAIN | {"label": 2}, PLAIN | {"label": 2, "idx": 1}],
        1,
        '"label" is 2, but the question has 2',
    ),
    "apart": ([PLAIN, PLAIN | {"doc_id": 1}, PLAIN], 3, '"doc_id" 0 comes again'),
    "doc_id of a list": ([PLAIN | {"doc_id": []}], 1, '"doc_id" is a list; expected a whole number or text'),
    "idx of text": ([PLAIN | {"idx": "0"}], 1, '"idx" is text; expected a whole number'),
    "another request": (
        [oe_eval(0, 0, " a", 0) | {"request_type": "generate_until"}],
        1,
        "'generate_until'; scored are",
    ),
    "no continuation": ([{"continuation": " a"}], 1, '"context" is missing'),
    "no request": ([oe_eval(0, 0, " a", 0) | {"request": " a"}], 1, '"request" is text; expected an object'),
    "nothing in it": ([oe_eval(0, 0, " a", 0) | {"request": {"context": "a"}}], 1, '"continuation" is missing'),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_lines_that_do_not_belong_together_are_refused_with_their_place(tmp_path: Path, case: str) -> None:
    lines, number, message = BAD_LINES[case]
    path = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(RequestError) as refused:
        list(Requests(path))
    assert f"{path}, line {number}: " in str(refused.value)
    assert message in str(refused.value)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the name of a request file ends in .jsonl or .jsonl.gz"):
        Requests(tmp_path / "requests.pkl")
    with pytest.raises(RequestError, match="cannot be read"):
        list(Requests(tmp_path / "missing.jsonl"))
    with pytest.raises(RequestError, match=r"holds no question \(0 lines\)"):
        list(Requests(write(tmp_path / "empty.jsonl")))
    only_copies = write(tmp_path / "copies.jsonl", oe_eval(1_000_000, 0, " a", 0))
    with pytest.raises(RequestError, match=r"holds no question \(1 lines\)"):
        list(Requests(only_copies))
    whole = write(tmp_path / "whole.jsonl.gz", *[QUESTION | {"id": str(i)} for i in range(2000)]).read_bytes()
    cut, mangled, plain = (tmp_path / f"{name}.jsonl.gz" for name in ("cut", "mangled", "plain"))
    cut.write_bytes(whole[: len(whole) // 2])
    mangled.write_bytes(whole[:200] + b"\xff" * 50 + whole[250:])
    plain.write_bytes(b"{}\n")
    for path in (cut, mangled, plain):
        with pytest.raises(RequestError, match=r"line \d+: (the compressed file is damaged|not a line of JSON)"):
            list(Requests(path))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"context": "\xe9"}\n')
    with pytest.raises(RequestError, match="line 1: not a line of JSON in UTF-8"):
        list(Requests(latin))


def test_the_digest_is_of_what_is_asked_and_of_nothing_else() -> None:
    question = Question("a", ("x", "x"), (" 1", " 2"), 0)
    same = Question("b", ("x", "x"), (" 1", " 2"), 0, "domain")
    others = [
        Question("a", ("x", "x"), (" 1", " 2"), 1),
        Question("a", ("x", "y"), (" 1", " 2"), 0),
        Question("a", ("x", "x"), (" 2", " 1"), 0),
    ]
    assert digest([question]) == digest([same])
    assert len({digest([q]) for q in [question, *others]}) == 4
