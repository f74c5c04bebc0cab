"""A corpus folder: its parts belong together, and to the model that reads it (F07)."""

import json
import shutil

import numpy as np
import pytest

from data.corpus import Corpus
from data.errors import DataError
from data.prepare import prepare


@pytest.fixture
def copied(tiny_corpus, tmp_path):
    """A copy of the tiny corpus that a test may damage."""
    return shutil.copytree(tiny_corpus.folder, tmp_path / "copy")


def test_it_knows_its_domains_tokens_and_documents(tiny_corpus):
    assert tiny_corpus.domains == ["many", "book"]
    assert tiny_corpus.vocabulary_size == 300
    for split in ("train", "heldout"):
        for domain in tiny_corpus.domains:
            token_N = tiny_corpus.tokens(split, domain)
            starts = tiny_corpus.document_starts(split, domain)
            assert isinstance(token_N, np.memmap) and token_N.dtype == np.uint16
            assert np.array_equal(np.flatnonzero(token_N == 0), starts)
            text = tiny_corpus.tokenizer.decode_bytes(token_N[token_N != 0])
            assert len(text) == tiny_corpus.text_bytes(split, domain) > 0


def test_no_document_is_in_both_splits(tiny_corpus):
    train = tiny_corpus.file("train", "many")
    heldout = tiny_corpus.file("heldout", "many")
    train_set = {train.document(number).tobytes() for number in range(len(train.start_M))}
    heldout_set = {heldout.document(number).tobytes() for number in range(len(heldout.start_M))}
    assert len(train_set) + len(heldout_set) == 40
    assert not train_set & heldout_set


def test_opening_again_gives_the_same_corpus(tiny_corpus, copied):
    again = Corpus.open(copied)
    assert again.sha256 == tiny_corpus.sha256
    again.verify()


def test_F07_a_model_of_another_vocabulary_is_refused_but_padding_is_not(tiny_corpus):
    for size in (300, 384, 427):
        tiny_corpus.require_model_vocabulary(size)
    for size in (100, 299, 428, 2048):
        with pytest.raises(DataError, match=rf"size is {size}, .* has 300 \(largest id.*: 299\).*set the"):
            tiny_corpus.require_model_vocabulary(size)


def test_F07_another_tokenizer_of_the_same_size_is_refused(tiny_corpus, copied, tmp_path, make_text):
    path = tmp_path / "other.txt"
    path.write_text(make_text(55, 500))
    other = prepare(tmp_path / "other", 300, {"many": [path]})
    assert other.vocabulary_size == tiny_corpus.vocabulary_size
    with pytest.raises(DataError, match="expected the tokenizer with sha256"):
        tiny_corpus.require_tokenizer(other.tokenizer.sha256)
    shutil.copy(other.folder / "tokenizer.json", copied / "tokenizer.json")
    with pytest.raises(DataError, match="expected the tokenizer with sha256"):
        Corpus.open(copied)


def test_F07_token_files_of_another_tokenizer_are_refused(copied, tmp_path, make_text):
    path = tmp_path / "other.txt"
    path.write_text(make_text(55, 500))
    other = prepare(tmp_path / "other", 300, {"many": [path]})
    for suffix in (".bin", ".index.npy", ".json"):
        shutil.copy(other.folder / f"train/many{suffix}", copied / f"train/many{suffix}")
    with pytest.raises(DataError, match="many.bin: expected the tokenizer"):
        Corpus.open(copied)


def test_a_whole_token_file_in_another_place_is_refused(copied):
    for suffix in (".bin", ".index.npy", ".json"):
        shutil.copy(copied / f"heldout/many{suffix}", copied / f"train/many{suffix}")
    with pytest.raises(DataError, match="a token file was replaced"):
        Corpus.open(copied)


def test_changed_ids_are_found_by_verify(copied):
    path = copied / "train/book.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="book.bin: sha256"):
        Corpus.open(copied).verify()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format_version": 1}', '{"domains": {"../x": {}}}'])
def test_an_unreadable_description_is_one_line(copied, content):
    (copied / "corpus.json").write_text(content)
    with pytest.raises(DataError, match="corpus.json"):
        Corpus.open(copied)


def test_another_format_is_refused(copied):
    description = json.loads((copied / "corpus.json").read_text()) | {"format_version": 99}
    (copied / "corpus.json").write_text(json.dumps(description))
    with pytest.raises(DataError, match="corpus format 99, this code reads 1"):
        Corpus.open(copied)


def test_errors_name_what_there_is(tiny_corpus, tmp_path):
    with pytest.raises(DataError, match='"poems".*domains: many, book'):
        tiny_corpus.tokens("train", "poems")
    with pytest.raises(DataError, match="splits: train, heldout"):
        tiny_corpus.tokens("test", "book")
    with pytest.raises(DataError, match="no corpus.json.*data.prepare"):
        Corpus.open(tmp_path)
