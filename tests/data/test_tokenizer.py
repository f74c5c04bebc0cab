"""The tokenizer: the ids of `tokenizers`, every text given back, no trap in odd input."""

import json
import time

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import tokenizer as tokenizer_module
from data.documents import ReadReport, read_documents
from data.errors import DataError
from data.tokenizer import END_OF_TEXT, Tokenizer, bounded_parts, train_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(" \n\r\tabcde.,'1234éλό", max_size=60)


@pytest.fixture(scope="session")
def reference(tiny_tokenizer, tmp_path_factory):
    """The same file opened by the `tokenizers` library."""
    folders = tmp_path_factory.getbasetemp().glob("tokenizer*/tokenizer.json")
    return tokenizers.Tokenizer.from_file(str(next(iter(folders))))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(text=TEXTS)
@example(text="  two  spaces   three\n\n\n  x\r\n\r\n y 1234567 …!!\n")
def test_ids_equal_those_of_the_tokenizers_library(tiny_tokenizer, reference, text):
    assert tiny_tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


def test_ids_equal_on_long_natural_text(tiny_tokenizer, reference, make_text):
    text = make_text(3, 3000)
    assert len(text) > tokenizer_module.ENCODE_CHARACTERS
    assert tiny_tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


@settings(max_examples=200, derandomize=True, deadline=None)
@given(text=TEXTS)
def test_decode_gives_every_text_back(tiny_tokenizer, text):
    token_ids = tiny_tokenizer.encode(text)
    assert tiny_tokenizer.decode(token_ids) == text
    assert tiny_tokenizer.token_bytes_V[token_ids].sum() == len(text.encode())


def test_the_marker_is_id_0_and_its_letters_are_ordinary_text(tiny_tokenizer):
    assert tiny_tokenizer.end_of_text == 0
    text = f"before {END_OF_TEXT} after"
    token_ids = tiny_tokenizer.encode(text)
    assert 0 not in token_ids
    assert tiny_tokenizer.decode(token_ids) == text
    assert tiny_tokenizer.decode([0]) == END_OF_TEXT


def test_token_bytes_count_utf8_bytes(tiny_tokenizer):
    token_bytes_V = tiny_tokenizer.token_bytes_V
    assert token_bytes_V.dtype == np.int32 and token_bytes_V.shape == (400,)
    assert token_bytes_V[0] == 0
    assert (token_bytes_V[1:257] == 1).all() and (token_bytes_V[257:] > 1).all()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(text=TEXTS, limit=st.integers(1, 12))
def test_a_text_cut_into_parts_is_given_back(tiny_tokenizer, text, limit):
    original = tokenizer_module.ENCODE_CHARACTERS
    tokenizer_module.ENCODE_CHARACTERS = limit
    try:
        assert "".join(bounded_parts(text)) == text
        assert all(len(part) <= limit for part in bounded_parts(text))
        assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text
    finally:
        tokenizer_module.ENCODE_CHARACTERS = original


LINES = st.lists(
    st.tuples(
        st.sampled_from(["\n", "\n\n", "\n  \n", "\n\n\n  ", "\r\n", " \n\t"]),
        st.text("ab 1.,é", min_size=1, max_size=10).filter(str.strip),
    ),
    max_size=20,
)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(lines=LINES, limit=st.integers(60, 100))
@example(lines=[("\n\n", "ab")] * 40, limit=75)
@example(lines=[("\n\n", "ab")] * 40, limit=76)
@example(lines=[("\n\n", "ab")] * 40, limit=77)
@example(lines=[("\n\n", "ab")] * 40, limit=78)
def test_a_cut_at_a_line_end_changes_no_id(tiny_tokenizer, lines, limit):
    text = "start" + "".join(separator + line for separator, line in lines)
    whole = tiny_tokenizer.encode(text)
    original = tokenizer_module.ENCODE_CHARACTERS
    tokenizer_module.ENCODE_CHARACTERS = limit
    try:
        assert all(part[-1] == "\n" for part in list(bounded_parts(text))[:-1])
        assert tiny_tokenizer.encode(text) == whole
    finally:
        tokenizer_module.ENCODE_CHARACTERS = original


@pytest.mark.parametrize("unit", [" ", "\t", "\n", " \n", "a", "1", "!", "\U0001f600", "a "])
def test_F05_a_long_run_of_anything_is_quick_and_exact(tiny_tokenizer, unit):
    """A million spaces at once abort tiktoken's regex engine."""
    text = unit * (1_200_000 // len(unit))
    start = time.perf_counter()
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text
    assert time.perf_counter() - start < 20


def test_F05_a_line_of_50_megabytes(tiny_tokenizer, tmp_path, make_text):
    """No line end in it, and at its end one word of 5 MB."""
    words = make_text(7, 200).replace("\n", " ")
    text = words * (45_000_000 // len(words)) + "x" * 5_000_000
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"text": text}))
    (document,) = read_documents(path, "d", ReadReport())
    token_N = tiny_tokenizer.encode_array(document.text)
    assert token_N.dtype == np.uint32
    assert tiny_tokenizer.token_bytes_V[token_N].sum() == len(text)
    assert tiny_tokenizer.decode(token_N[-100:]) == "x" * 100


def test_a_near_endless_word_does_not_slow_down_training(tmp_path):
    start = time.perf_counter()
    train_tokenizer(["a word " * 1000 + "xyz" * 1_000_000], 300, tmp_path / "t.json")
    assert time.perf_counter() - start < 5


def test_F05_odd_strings(tiny_tokenizer):
    assert tiny_tokenizer.decode(tiny_tokenizer.encode("hello \ud800 world")) == "hello \ufffd world"
    for text in ["", "\0", "a\0b", "\ufeffbom", "a\r\nb\rc", "\u2028"]:
        assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text


def test_F05_a_character_cut_between_tokens_is_whole_again_in_bytes(tiny_tokenizer):
    token_ids = tiny_tokenizer.encode("\U0001f600")
    assert len(token_ids) == 4
    assert tiny_tokenizer.decode(token_ids[:2]) == "\ufffd"
    parts = [tiny_tokenizer.decode_bytes([token]) for token in token_ids]
    assert b"".join(parts).decode() == "\U0001f600"


def test_training_twice_gives_the_same_file(tmp_path, make_text):
    texts = [make_text(seed, 50) for seed in range(5)]
    first = train_tokenizer(texts, 350, tmp_path / "a.json")
    second = train_tokenizer(texts, 350, tmp_path / "b.json")
    assert first.sha256 == second.sha256
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_little_text_gives_fewer_ids_than_asked_for(tmp_path):
    tokenizer = train_tokenizer(["abab"], 5000, tmp_path / "t.json")
    assert 257 <= tokenizer.vocabulary_size < 270
    assert max(tokenizer.encode("abab")) < tokenizer.vocabulary_size


def test_errors_say_what_is_allowed(tmp_path, tiny_tokenizer):
    with pytest.raises(DataError, match="is 256; allowed are 257"):
        train_tokenizer(["a"], 256, tmp_path / "t.json")
    for token in (-1, 400):
        with pytest.raises(DataError, match=f"id {token} is outside the vocabulary of 400"):
            tiny_tokenizer.decode([1, token])


@pytest.mark.parametrize("content", ["", "{}", "[]", "3", '{"model": {"type": "WordPiece"}}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match="tokenizer.json: not a"):
        Tokenizer.load(path)
    with pytest.raises(DataError, match="not a readable"):
        Tokenizer.load(tmp_path / "missing.json")


def test_ids_with_a_gap_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["abab"], 300, path)
    content = json.loads(path.read_text())
    content["model"]["vocab"]["a"] = 5000
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="each once"):
        Tokenizer.load(path)


def test_missing_bytes_or_a_broken_pattern_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["abab"], 300, path)
    good = path.read_text()
    size = Tokenizer.load(path).vocabulary_size
    content = json.loads(good)
    vocabulary = content["model"]["vocab"]
    vocabulary["aaaa"] = vocabulary.pop("a")
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="single bytes have no id"):
        Tokenizer.load(path)
    content = json.loads(good)
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "("
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="refuses the split pattern"):
        Tokenizer.load(path)
    path.write_text(good)
    assert Tokenizer.load(path).vocabulary_size == size
