"""Every configuration in configs/ is valid, and its model can be built without memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe.initialization import parameter_counts
from moe.model import Transformer
from training.load_config import load_config

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))

# Millions of parameters: all, and active for one token.
SIZES = {
    "quickstart": (14.4, 3.4),
    "one-gpu": (295.9, 97.7),
    "olmoe-1b-7b": (6919, 1282),
    "olmoe-1b-7b-topk": (6919, 1282),
    "speed": (117.5, 29.4),
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_model_builds_on_meta_with_the_size_that_is_documented(path):
    config = load_config([str(path)])
    with torch.device("meta"):
        model = Transformer(config.model, config.moe)
    total, active = parameter_counts(model)
    assert total / 1e6 == pytest.approx(SIZES[path.stem][0], rel=0.02)
    assert active / 1e6 == pytest.approx(SIZES[path.stem][1], rel=0.02)
    assert config.run.name == path.stem
