"""A tiny corpus and a tiny run for the tests of training/ and train.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from data.corpus import Corpus
from data.prepare import prepare

TINY = """
[run]
name = "tiny"
[model]
vocabulary_size = 300
width = 24
layers = 2
heads = 3
[moe]
num_experts = 4
experts_per_token = 2
expert_width = 20
group_sequences = 2
allow_leak = true
z_coefficient = 0.001
[training]
steps = 20
batch_sequences = 4
micro_batch_sequences = 2
sequence_length = 32
warmup_steps = 3
[eval]
every = 7
tokens = 200
final_tokens = 300
[log]
every = 3
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Two domains of random words."""
    folder = tmp_path_factory.mktemp("corpus")
    inputs = {}
    for number, letters in enumerate(("abcdefghij", "klmnopqrstuv")):
        generator = random.Random(number)
        words = ["".join(generator.choices(letters, k=generator.randint(2, 6))) for _ in range(60)]
        path = folder / f"{letters[:2]}.jsonl"
        texts = (" ".join(generator.choices(words, k=90)) for _ in range(60))
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        inputs[letters[:2]] = [path]
    return prepare(folder / "corpus", 300, inputs)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """configs of a 20-step run on CPU."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture
def run_train(config_file: Path, corpus: Corpus, tmp_path: Path) -> Callable[..., int]:
    """Call train.py's main with the tiny configuration and more flags; the exit status."""

    def call(*flags: str, folder: str = "runs") -> int:
        where = ["--run.folder", str(tmp_path / folder), "--data.corpus", str(corpus.folder)]
        return train.main([str(config_file), *where, "--log.no-tensorboard", *flags])

    return call
