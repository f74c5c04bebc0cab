"""A tiny corpus, a tiny base, and results that are made up."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ablations.spec import Ablation, load_ablation
from data.prepare import prepare

BASE = """
[data]
corpus = "{corpus}"
[model]
vocabulary_size = 280
width = 16
layers = 2
heads = 2
[moe]
router = "token_choice"
num_experts = 4
expert_width = 8
group_sequences = 2
[training]
steps = 6
batch_sequences = 4
micro_batch_sequences = 2
sequence_length = 24
warmup_steps = 2
device = "cpu"
[eval]
every = 0
final_tokens = 150
[log]
every = 2
tensorboard = false
"""

TWO_ARMS = """
question = "Does a balance loss cost anything?"
base = "base.toml"
baseline = "none"
seeds = 2
[arms.none]
[arms.balanced]
moe = { balance_coefficient = 0.5 }
"""


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of two domains of random words."""
    folder = tmp_path_factory.mktemp("ablation")
    inputs = {}
    for name, letters in (("low", "abcde"), ("high", "vwxyz")):
        generator = random.Random(letters)
        words = ["".join(generator.choices(letters, k=generator.randint(2, 5))) for _ in range(40)]
        path = folder / f"{name}.txt"
        path.write_text("".join(" ".join(generator.choices(words, k=8)) + ".\n" for _ in range(150)))
        inputs[name] = [path]
    prepare(folder / "corpus", 280, inputs, heldout_fraction=0.3)
    return folder / "corpus"


@pytest.fixture
def write_ablation(tmp_path: Path, tiny_text: Path) -> Callable[[str], Path]:
    """Write an ablation's file beside the base; its path."""

    def write(text: str, name: str = "question") -> Path:
        (tmp_path / "base.toml").write_text(BASE.format(corpus=tiny_text.as_posix()))
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def two_arms(write_ablation: Callable[[str], Path]) -> Ablation:
    """Two arms, two seeds."""
    return load_ablation(write_ablation(TWO_ARMS))


def made_up(bits: float, **more: Any) -> dict[str, Any]:
    """One run's figures."""
    return {
        "bits_per_byte": bits,
        "nats_per_token": 2 * bits,
        "domains": {"low": bits - 0.1, "high": bits + 0.1},
        "heldout_tokens": 1234,
        "max_violation": 0.5,
        "zero_expert_fraction": 0.0,
        "experts_per_token": 2.0,
        "noncausal_bits_per_byte": None,
        "tokens_per_second": 1000.0,
        "logit_norm": 1.0,
        "leak_bits": None,
        "leak_error": None,
        "corpus_sha256": "c" * 64,
        "environment": {"commit": "abc", "packages": {"torch": "2"}},
        "threads": 1,
        "cpu_minutes": 0.25,
        "seconds": 15.0,
        "attempts_killed": 0,
        "date": "2030-01-02",
        **more,
    }
