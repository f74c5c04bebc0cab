"""Readers of user files: every odd text has a documented result, never a traceback (F01, F05)."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.documents import ReadReport, read_documents
from data.errors import DataError


@pytest.fixture
def read(tmp_path):
    """Write bytes to a file and read it; gives (texts, report)."""

    def read_bytes(name: str, content: bytes):
        path = tmp_path / name
        path.write_bytes(content)
        report = ReadReport()
        return [document.text for document in read_documents(path, "d", report)], report

    return read_bytes


def error_of(read, name: str, content: bytes) -> str:
    with pytest.raises(DataError) as caught:
        read(name, content)
    message = str(caught.value)
    assert name in message and "\n" not in message
    return message


def test_F01_blank_documents_are_skipped_and_error_lines_are_named(read):
    lines = ['{"text": ""}', '{"text": "a"}', '{"text": "   "}', '{"content": "b"}', '{"text": ""}']
    texts, report = read("d.jsonl", "\n".join(lines).encode())
    assert texts == ["a"]
    assert (report.blank_documents, report.error_lines) == (3, 1)
    assert 'line 4: no key "text" (its keys: "content")' in report.messages[0]


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"text": "a"', "not valid JSON"),
        (b"[1, 2]", "a JSON list"),
        (b'{"text": 3}', "holds a int"),
        (b'{"text": null}', "holds a NoneType"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"text": ' + b"9" * 6000 + b"}", "not valid JSON"),
    ],
)
def test_F01_a_bad_line_is_counted_and_reading_goes_on(read, line, reason):
    texts, report = read("d.jsonl", line + b'\n{"text": "good"}\n')
    assert texts == ["good"]
    assert report.error_lines == 1
    assert "line 1" in report.messages[0] and reason in report.messages[0]


def test_only_the_first_error_lines_are_kept_as_messages(read):
    _, report = read("d.jsonl", b"oops\n" * 1000)
    assert report.error_lines == 1000
    assert len(report.messages) == 5


def test_F01_empty_files_folders_and_missing_files_are_errors(read, tmp_path):
    assert "empty file" in error_of(read, "d.txt", b"")
    for path, reason in [(tmp_path, "is a folder"), (tmp_path / "no.txt", "does not exist")]:
        with pytest.raises(DataError, match=reason):
            list(read_documents(path, "d", ReadReport()))
    assert ".txt, .jsonl, .jsonl.gz" in error_of(read, "d.pdf", b"%PDF")


def test_F05_a_byte_order_mark_is_dropped(read):
    assert read("d.txt", b"\xef\xbb\xbfhello")[0] == ["hello"]
    assert read("d.jsonl", b'\xef\xbb\xbf{"text": "hello"}\n')[0] == ["hello"]


def test_F05_line_ends_become_line_feeds(read):
    assert read("d.txt", b"a\r\nb\rc\n")[0] == ["a\nb\nc\n"]
    assert read("d.jsonl", b'{"text": "a\\r\\nb\\rc"}\r\n')[0] == ["a\nb\nc"]


def test_F05_lone_surrogates_become_the_replacement_character(read):
    texts, report = read("d.jsonl", b'{"text": "hello \\ud800 world \\udcb2"}\n{"text": "\\ud83d\\ude00"}')
    assert texts == ["hello \ufffd world \ufffd", "\U0001f600"]
    assert report.replaced_surrogates == 2


def test_F05_unicode_line_separators_do_not_split_a_line(read):
    text = "one\u2028two\u2029three\u0085four\x0bfive"
    line = json.dumps({"text": text}, ensure_ascii=False)
    assert read("d.jsonl", line.encode() + b"\n")[0] == [text]


def test_F05_what_is_not_utf8_text_is_an_error_with_its_place(read):
    assert "line 2, byte 7: byte 0xB2 is not valid UTF-8" in error_of(read, "d.txt", b"first\nx\xb2")
    assert "line 2, byte 10: byte 0xB2" in error_of(read, "d.jsonl", b'{"text": "a"}\n{"text": "\xb2"}\n')
    assert "line 1, byte 3: a NUL byte" in error_of(read, "d.txt", b"\x7fEL\0F")
    assert "UTF-16" in error_of(read, "d.txt", "hello".encode("utf-16"))
    assert "UTF-16" in error_of(read, "d.jsonl", '{"text": "a"}'.encode("utf-16"))
    assert "NUL byte" in error_of(read, "d.txt", "hello".encode("utf-16-le"))


def test_a_gzipped_file_reads_like_the_plain_one(read):
    content = b'{"text": "a"}\n{"text": "b"}\n'
    assert read("d.jsonl.gz", gzip.compress(content))[0] == ["a", "b"]


def test_a_damaged_gzip_is_an_error(read):
    packed = gzip.compress(b'{"text": "abc"}\n' * 1000)
    assert "damaged" in error_of(read, "d.jsonl.gz", packed[:-20])
    assert "not gzip" in error_of(read, "d.jsonl.gz", b'{"text": "a"}\n')


@settings(max_examples=60, derandomize=True, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(texts=st.lists(st.text(), min_size=1, max_size=5), ascii_only=st.booleans())
def test_every_unicode_text_survives_json(read, texts, ascii_only):
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts]
    expected = [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]
    found, report = read("d.jsonl", "\n".join(lines).encode())
    assert found == [text for text in expected if text.strip()]
    assert report.error_lines == 0
