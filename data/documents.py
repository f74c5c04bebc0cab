r"""User files to documents: .txt, .jsonl and .jsonl.gz.

The rules, which hold for every reader:

- UTF-8 only; a byte-order mark at the start of a file is dropped.
- CRLF and a lone CR become LF.
- Lone surrogates (a JSON text may hold them as ``\udcb2``) become U+FFFD and
  are counted.
- Empty and blank documents are skipped and counted.
- A .jsonl line ends at LF only, so U+2028 and U+0085 do not split it.
- A .jsonl line that is not an object with a text under the key is an error line:
  reported with its number and counted, and reading goes on.
- A file that is not text at all (NUL bytes, UTF-16, invalid UTF-8, a damaged
  gzip) is an error: half a file read in silence would be worse.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from data.errors import DataError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz")
MAXIMUM_LINE_BYTES = 1 << 30  # a .gz of a few MB may unpack to one line without end
REPORTED_ERROR_LINES = 5  # per run; the others are only counted

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class Document(NamedTuple):
    """One text, with the domain it belongs to and a name for messages."""

    domain: str
    name: str
    text: str


@dataclass
class ReadReport:
    """What the readers met besides good documents.

    Attributes:
        blank_documents: documents skipped because they were empty or blank.
        error_lines: .jsonl lines skipped because they held no text.
        replaced_surrogates: lone surrogates turned into U+FFFD.
        messages: one line for each of the first few error lines.
    """

    blank_documents: int = 0
    error_lines: int = 0
    replaced_surrogates: int = 0
    messages: list[str] = field(default_factory=list)

    def add_error_line(self, message: str) -> None:
        """Count an error line, and keep its message if it is among the first."""
        self.error_lines += 1
        if len(self.messages) < REPORTED_ERROR_LINES:
            self.messages.append(message)


def read_documents(path: Path, domain: str, report: ReadReport, text_key: str = "text") -> Iterator[Document]:
    """Yield the documents of one file by its suffix.

    Args:
        path: a .txt file (one document) or a .jsonl or .jsonl.gz file (one a line).
        domain: the domain that the documents get.
        report: counts what was skipped or changed; updated while reading.
        text_key: the key of the text in a .jsonl line.

    Raises:
        DataError: the file is missing, empty, a folder, of another kind, or not text.
    """
    path = Path(path)
    require_input_file(path)
    if path.name.endswith(".txt"):
        yield from _read_text_file(path, domain, report)
    else:
        yield from _read_json_lines(path, domain, report, text_key)


def require_input_file(path: Path) -> None:
    """Raise a `DataError` unless `path` is a file that the readers may open."""
    if path.is_dir():
        raise DataError(f'{path} is a folder; give files or a glob such as "{path}/*.txt"')
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of file; allowed are {', '.join(SUFFIXES)}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is an empty file; remove it from the inputs")


def clean_text(text: str, report: ReadReport) -> str | None:
    """Apply the line-end, surrogate and blank rules.

    Returns:
        The clean text, or None for a blank document, which is counted.
    """
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text, replaced = _LONE_SURROGATE.subn("\ufffd", text)
    report.replaced_surrogates += replaced
    if not text or text.isspace():
        report.blank_documents += 1
        return None
    return text


def decode_utf8(data: bytes, where: str, first_line: int = 1) -> str:
    """Decode strict UTF-8 without NUL bytes.

    Args:
        data: the bytes of a file or of one line.
        where: the file's name, for the message.
        first_line: the line number of `data`'s first line.

    Raises:
        DataError: names the line and the byte position within `data`.
    """
    if first_line == 1 and data.startswith(_UTF16_MARKS):
        raise DataError(f"{where}, line 1, byte 0: the file is UTF-16; convert it first: iconv -f UTF-16 -t UTF-8")
    try:
        text = data.decode("utf-8")
        problem_at = data.find(b"\0")
        problem = "a NUL byte, so this is a binary file or UTF-16"
    except UnicodeDecodeError as error:
        problem_at = error.start
        problem = f"byte 0x{data[problem_at]:02X} is not valid UTF-8"
    if problem_at >= 0:
        line = first_line + data.count(b"\n", 0, problem_at)
        raise DataError(
            f"{where}, line {line}, byte {problem_at}: {problem}; "
            "give UTF-8 text (convert it with iconv, or leave this file out)"
        )
    return text


def _read_text_file(path: Path, domain: str, report: ReadReport) -> Iterator[Document]:
    text = clean_text(decode_utf8(path.read_bytes(), str(path)).removeprefix("\ufeff"), report)
    if text is not None:
        yield Document(domain, path.name, text)


def _read_json_lines(path: Path, domain: str, report: ReadReport, text_key: str) -> Iterator[Document]:
    for number, line in _numbered_lines(path):
        content = decode_utf8(line, f"{path}", first_line=number)
        if number == 1:
            content = content.removeprefix("\ufeff")
        if not content.strip():
            report.blank_documents += 1
            continue
        text = _text_of_line(content, f"{path}, line {number}", text_key, report)
        if text is None:
            continue
        text = clean_text(text, report)
        if text is not None:
            yield Document(domain, f"{path.name}:{number}", text)


def _text_of_line(content: str, where: str, text_key: str, report: ReadReport) -> str | None:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:  # too deep a nesting, too long a number
        reason = getattr(error, "msg", None) or str(error).splitlines()[0]
        report.add_error_line(f"{where}: not valid JSON ({reason})")
        return None
    if not isinstance(record, dict):
        report.add_error_line(f'{where}: a JSON {type(record).__name__}, expected an object with the key "{text_key}"')
    elif text_key not in record:
        keys = ", ".join(json.dumps(key) for key in list(record)[:8]) or "none"
        report.add_error_line(f'{where}: no key "{text_key}" (its keys: {keys})')
    elif not isinstance(record[text_key], str):
        kind = type(record[text_key]).__name__
        report.add_error_line(f'{where}: "{text_key}" holds a {kind}, expected a string')
    else:
        return record[text_key]
    return None


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, bytes of the line), splitting at LF only."""
    with _open_binary(path) as file:
        number = 0
        while True:
            try:
                line = file.readline(MAXIMUM_LINE_BYTES + 1)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(
                    f"{path}, after line {number}: cannot be unpacked ({error}); "
                    "the .gz file is damaged or not gzip, make it again"
                ) from error
            if not line:
                return
            number += 1
            if len(line) > MAXIMUM_LINE_BYTES:
                raise DataError(
                    f"{path}, line {number}: longer than {MAXIMUM_LINE_BYTES:,} bytes; give one document a line"
                )
            yield number, line


def _open_binary(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb")
