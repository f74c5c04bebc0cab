"""Tiny corpora for the tests of data/; nothing is downloaded."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import data
from data.corpus import Corpus
from data.prepare import prepare
from data.tokenizer import Tokenizer, train_tokenizer

ROOT = Path(data.__file__).resolve().parent.parent


def sentences(seed: int, count: int) -> str:
    """Random words from a small fixed vocabulary: compressible, and never near-duplicates."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefghijklmnop", k=generator.randint(2, 7))) for _ in range(80)]
    lines = (" ".join(generator.choices(words, k=9)) + ".\n" for _ in range(count))
    return "".join(lines)


@pytest.fixture(scope="session")
def make_text():
    return sentences


@pytest.fixture
def write_jsonl(tmp_path):
    """Write texts as one .jsonl file and give its path."""

    def write(name: str, texts: list[str]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return write


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory) -> Corpus:
    """Two domains: "many" of 40 documents, "book" of one long document."""
    folder = tmp_path_factory.mktemp("tiny")
    many = folder / "many.jsonl"
    many.write_text("".join(json.dumps({"text": sentences(seed, 12)}) + "\n" for seed in range(40)))
    book = folder / "book.txt"
    book.write_text(sentences(1000, 150))
    return prepare(folder / "corpus", 300, {"many": [many], "book": [book]})


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory) -> Tokenizer:
    """400 ids trained on Latin words, punctuation, digits and some Greek."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    texts = [sentences(7, 200), "λόγος καὶ νόμος, 2024-11-30!\n\n" * 30, "x = [1, 22, 333]\n" * 30]
    texts.append("a\n\nb\n\n\nc  \n" * 200)  # so that runs of line ends are tokens
    return train_tokenizer(texts, 400, path)


@pytest.fixture
def run_prepare():
    """Run the command as a user would; gives the finished process."""

    def run(*arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "data.prepare", *map(str, arguments)],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


@pytest.fixture
def start_python():
    """Start a Python program that can import the project; killed when the test ends."""
    processes = []

    def start(program: str, *arguments: object) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
