"""Token files: no id wraps around (F03), no damaged file opens (F02)."""

import json
import shutil
import signal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.token_file import TokenFile, token_dtype, write_token_file

SHA = "ab" * 32


@pytest.fixture
def write(tmp_path):
    """Write documents and give the path of the .bin file."""

    def write_documents(name, documents, vocabulary_size=100, end_of_text=0):
        path = tmp_path / f"{name}.bin"
        with write_token_file(path, vocabulary_size, end_of_text, SHA) as writer:
            for document in documents:
                writer.add(document, text_bytes=len(document))
        return path

    return write_documents


TEN = [[1 + (number + k) % 99 for k in range(number + 1)] for number in range(10)]
FIVE = [[7] * 11] * 5  # as many tokens as TEN has without markers, plus 5


@settings(max_examples=40, derandomize=True, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(documents=st.lists(st.lists(st.integers(1, 99), max_size=5), max_size=6))
def test_documents_are_read_back(write, documents):
    file = TokenFile(write("d", documents))
    assert [file.document(number).tolist() for number in range(len(documents))] == documents
    assert file.header.tokens == sum(len(document) + 1 for document in documents)
    assert file.header.text_bytes == sum(map(len, documents))


def test_the_marker_starts_each_document(write):
    file = TokenFile(write("d", [[5, 6], [7]], end_of_text=42))
    assert file.token_N.tolist() == [42, 5, 6, 42, 7]
    assert file.start_M.tolist() == [0, 3]
    assert not file.token_N.flags.writeable
    with pytest.raises(DataError, match="document 2 of 2"):
        file.document(2)


def test_F03_large_ids_survive(write):
    file = TokenFile(write("d", [[1, 65535, 65536, 69999]], vocabulary_size=70000))
    assert file.document(0).tolist() == [1, 65535, 65536, 69999]
    assert (file.header.dtype, file.header.maximum_id) == ("uint32", 69999)


def test_F03_the_vocabulary_with_added_tokens_decides_the_type():
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32
    assert token_dtype(65530 + 10) == np.uint32
    for size in (0, -5, 2**31 + 1):
        with pytest.raises(DataError, match=f"vocabulary size is {size}"):
            token_dtype(size)


@pytest.mark.parametrize("token", [-1, 100, 65536, 2**40])
def test_F03_an_id_outside_the_vocabulary_is_refused(write, tmp_path, token):
    with pytest.raises(DataError, match=f"token id {token}; allowed are 0 to 99"):
        write("d", [[1], [2, token]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("document", [[1.5], [[1, 2]], ["a"], [2**70], [True]])
def test_what_is_not_a_sequence_of_integers_is_refused(write, document):
    with pytest.raises(DataError, match="flat sequence of integers"):
        write("d", [document])


def test_the_marker_inside_a_document_is_refused(write):
    with pytest.raises(DataError, match="document 0 holds the end-of-text id 0"):
        write("d", [[1, 0, 2]])


def test_F02_a_cut_file_is_refused_with_both_sizes(write):
    path = write("d", TEN)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="expected 130 bytes.*65 tokens of uint16.*found 128.*cut"):
        TokenFile(path)


def test_F02_an_extended_file_is_refused(write):
    path = write("d", TEN)
    path.write_bytes(path.read_bytes() + b"\1\0")
    with pytest.raises(DataError, match="expected 130 bytes.*found 132.*extended"):
        TokenFile(path)


@pytest.mark.parametrize("suffix", [".bin", ".index.npy", ".json"])
def test_F02_a_part_of_another_set_is_refused(write, suffix):
    ten, five = write("ten", TEN), write("five", FIVE)
    shutil.copy(five.with_suffix(suffix), ten.with_suffix(suffix))
    with pytest.raises(DataError, match="another corpus"):
        TokenFile(ten)


def test_F02_data_of_equal_size_with_other_starts_is_refused(write):
    first, second = write("first", [[1, 2], [3]]), write("second", [[1], [2, 3]])
    shutil.copy(second, first)
    with pytest.raises(DataError, match="end-of-text id 0 at the start of document 1.*found"):
        TokenFile(first)


def test_F02_changed_ids_are_found_by_verify(write):
    path = write("d", TEN)
    TokenFile(path).verify()
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="sha256"):
        TokenFile(path).verify()


def test_F02_a_missing_part_is_named(write):
    for suffix in (".bin", ".index.npy", ".json"):
        path = write("d", TEN)
        path.with_suffix(suffix).unlink()
        with pytest.raises(DataError, match=suffix):
            TokenFile(path)


def test_F02_two_sets_merge_into_their_documents(write):
    ten, five = TokenFile(write("ten", TEN)), TokenFile(write("five", FIVE))
    merged = TokenFile(write("all", [file.document(n) for file in (ten, five) for n in range(len(file.start_M))]))
    assert len(merged.start_M) == 15
    assert np.array_equal(merged.token_N, np.concatenate([ten.token_N, five.token_N]))


def test_F02_a_killed_writer_leaves_no_file_with_the_final_name(start_python, tmp_path):
    program = """
import sys, time
from pathlib import Path
from data.token_file import write_token_file
with write_token_file(Path(sys.argv[1]), 100, 0, "ab" * 32) as writer:
    for number in range(1000):
        writer.add([1] * 1000)
    print("writing", flush=True)
    time.sleep(60)
"""
    process = start_python(program, tmp_path / "d.bin")
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = [path.name for path in tmp_path.iterdir()]
    assert left and all(name.startswith(".") and name.endswith(".partial") for name in left)
    with pytest.raises(DataError, match="missing"):
        TokenFile(tmp_path / "d.bin")


def test_F03_another_type_than_the_recorded_one_is_refused(write):
    path = write("d", TEN)
    header = json.loads(path.with_suffix(".json").read_text())
    for change in (
        {"dtype": "uint32"},
        {"dtype": "float64"},
        {"format_version": 99},
        {"more": 1},
        {"tokens": "65"},
    ):
        path.with_suffix(".json").write_text(json.dumps(header | change))
        with pytest.raises(DataError):
            TokenFile(path)


def test_an_index_with_objects_is_never_unpickled(write):
    path = write("d", TEN)
    with open(path.with_suffix(".index.npy"), "wb") as file:
        np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="index"):
        TokenFile(path)
