"""Small runs, trained once for all tests of reports."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data.prepare import prepare
from train import train
from training.job import Job
from training.load_config import config_from_dict
from training.run import Run


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ten steps of an expert-choice model on two domains; the last five route by threshold."""
    return _trained(tmp_path_factory.mktemp("run"), 10, {"threshold_after": 0.5})


@pytest.fixture(scope="session")
def dense_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of a dense model."""
    return _trained(tmp_path_factory.mktemp("dense"), 2, {"router": "dense"})


@pytest.fixture(scope="session")
def many_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ten steps on two domains of many documents each."""
    return _trained(tmp_path_factory.mktemp("many"), 10, {"threshold_after": 0.5}, documents=50)


def _trained(folder: Path, steps: int, moe: dict[str, Any], documents: int = 1) -> Run:
    inputs = {
        name: [_text(folder / f"{name}{number}.txt", letters, number) for number in range(documents)]
        for name, letters in (("low", "abcde"), ("high", "vwxyz"))
    }
    prepare(folder / "corpus", 280, inputs, heldout_fraction=0.2)
    values = {
        "run": {"name": "small", "folder": str(folder)},
        "data": {"corpus": str(folder / "corpus")},
        "model": {"vocabulary_size": 280, "width": 16, "layers": 2, "heads": 2},
        "moe": {"num_experts": 4, "expert_width": 8, "group_sequences": 2, "allow_leak": True, **moe},
        "training": {
            "steps": steps,
            "batch_sequences": 4,
            "micro_batch_sequences": 4,
            "sequence_length": 24,
            "warmup_steps": 2,
            "device": "cpu",
        },
        "eval": {"every": 4, "tokens": 100, "final_tokens": 200},
        "log": {"every": 2, "tensorboard": False},
    }
    assert train(config_from_dict(values), Job(), Console(file=io.StringIO())) == 0
    return Run.open(folder / "small")


def _text(path: Path, letters: str, number: int = 0) -> Path:
    generator = random.Random(letters)
    words = ["".join(generator.choices(letters, k=generator.randint(2, 5))) for _ in range(40)]
    lines = 120
    if number:  # documents of unequal length after the first
        generator, lines = random.Random(f"{letters}{number}"), 4 + number % 7
    path.write_text("".join(" ".join(generator.choices(words, k=8)) + ".\n" for _ in range(lines)))
    return path
