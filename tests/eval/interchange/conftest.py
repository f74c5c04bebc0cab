"""Runs made without training, on one small corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data.corpus import Corpus
from data.prepare import prepare
from moe.initialization import build_model
from moe.routing import RoutingContext
from training.checkpoint import save_checkpoint
from training.load_config import config_from_dict, config_to_toml
from training.optimizer import build_optimizer
from training.run import Run

MakeRun = Callable[..., Run]
VOCABULARY = 270


@pytest.fixture(scope="session", autouse=True)
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modelling files that are loaded are copied to a folder of the tests, not to the user's."""
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """One domain, 270 ids."""
    folder = tmp_path_factory.mktemp("text")
    line = "the quick brown fox jumps over the lazy dog, and then another one; na\u00efve caf\u00e9 {}.\n"
    (folder / "text.txt").write_text("".join(line.format(number) for number in range(400)), encoding="utf-8")
    found = prepare(folder / "corpus", VOCABULARY, {"text": [folder / "text.txt"]}, heldout_fraction=0.2)
    assert found.vocabulary_size == VOCABULARY
    return found


@pytest.fixture
def make_run(tmp_path: Path, corpus: Corpus) -> MakeRun:
    """A run whose checkpoint holds random weights, large enough that choices matter; cutoffs come from random text."""

    def make(model: dict[str, Any] | None = None, moe: dict[str, Any] | None = None, name: str = "run") -> Run:
        config = config_from_dict(
            {
                "run": {"name": name, "folder": str(tmp_path)},
                "data": {"corpus": str(corpus.folder)},
                "model": {"vocabulary_size": VOCABULARY, "width": 24, "layers": 3, "heads": 4, "kv_heads": 2}
                | (model or {}),
                "moe": {"num_experts": 5, "expert_width": 10, "group_sequences": 5} | (moe or {}),
                "training": {"steps": 4, "batch_sequences": 5, "sequence_length": 16, "warmup_steps": 0},
                "eval": {"every": 0, "tokens": 64, "final_tokens": 64},
                "log": {"tensorboard": False},
            }
        )
        network = build_model(config.model, config.moe, seed=3)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(8)
            for parameter in network.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(1.2)
                else:
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            # Cutoffs are the mean of two steps, so that no score equals one and rounding decides nothing.
            for seed in (71, 72):
                token_BS = torch.randint(VOCABULARY, (5, 16), generator=torch.Generator().manual_seed(seed))
                network(token_BS, RoutingContext(5, 16, mode="train"))
                network.after_step()
        run = Run(tmp_path / name, config)
        run.checkpoints.mkdir(parents=True)
        (run.folder / "config.toml").write_text(config_to_toml(config))
        run.write_environment(corpus)
        save_checkpoint(run.checkpoints, 2, [network], build_optimizer(network, config.training), {"tokens": 0})
        return Run.open(run.folder)

    return make
