"""A checkpoint is complete or it is refused with the fault named; reading one runs no code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from moe.config import ModelConfig, MoEConfig
from moe.initialization import build_model
from training.checkpoint import (
    CheckpointError,
    load_model,
    load_optimizer,
    newest_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from training.config import TrainingConfig
from training.optimizer import build_optimizer

MODEL = ModelConfig(vocabulary_size=30, width=8, layers=1, heads=2)
MOE = MoEConfig(num_experts=3, expert_width=5)


def trained(seed: int = 0):
    """A model and an optimizer with moments that are not zero."""
    model = build_model(MODEL, MOE, seed)
    optimizer = build_optimizer(model, TrainingConfig())
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    model.blocks["0"].feed_forward.router.cutoff_E += torch.tensor([0.1, 0.2, 0.3])
    return model, optimizer


@pytest.fixture
def saved(tmp_path) -> Path:
    model, optimizer = trained()
    save_checkpoint(tmp_path, 4, model, optimizer, {"tokens": 99})
    return tmp_path


def test_weights_router_state_and_moments_come_back_bit_for_bit(tmp_path):
    model, optimizer = trained()
    save_checkpoint(tmp_path, 4, model, optimizer, {"tokens": 99})
    other, other_optimizer = trained(seed=5)
    checkpoint = newest_checkpoint(tmp_path)
    assert (checkpoint.step, checkpoint.state) == (4, {"tokens": 99})
    load_model(checkpoint, other)
    load_optimizer(checkpoint, other, other_optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, other_optimizer.state[b][key]), key


def test_the_newest_is_the_highest_step_as_a_number(saved):
    model, optimizer = trained()
    save_checkpoint(saved, 10, model, optimizer, {})
    (saved / "step_11.partial").mkdir()
    (saved / ".step_12.writing").mkdir()
    assert newest_checkpoint(saved).step == 10


def test_no_checkpoint_is_none_and_not_an_error(tmp_path):
    assert newest_checkpoint(tmp_path / "checkpoints") is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("checkpoint.json", Path.unlink, "checkpoint.json is missing"),
        ("checkpoint.json", cut, "checkpoint.json cannot be read"),
        ("checkpoint.json", lambda p: p.write_text(p.read_text().replace('"step": 4', '"step": 6')), "says step 6"),
        ("model.safetensors", Path.unlink, "model.safetensors: damaged checkpoint: the file is missing"),
        ("model.safetensors", cut, "bytes, expected"),
        ("optimizer.safetensors", flip, "the checksum does not match"),
    ],
)
def test_damage_is_named_and_refused(saved, file, damage, message):
    damage(saved / "step_4" / file)
    with pytest.raises(CheckpointError) as caught:
        newest_checkpoint(saved)
    assert message in str(caught.value)
    assert "step_4" in str(caught.value)


def test_a_checkpoint_of_another_format_is_refused(saved):
    path = saved / "step_4" / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="checkpoint format 99; this version reads 1"):
        open_checkpoint(saved / "step_4")


def test_a_model_of_another_shape_is_refused_with_the_names(saved):
    other = build_model(MODEL, MoEConfig(num_experts=3, expert_width=6))
    with pytest.raises(CheckpointError, match=r"w13_E2FD has shape \(3, 2, 5, 8\), the model wants \(3, 2, 6, 8\)"):
        load_model(newest_checkpoint(saved), other)
    deeper = build_model(ModelConfig(vocabulary_size=30, width=8, layers=2, heads=2), MOE)
    with pytest.raises(CheckpointError, match="missing blocks.1"):
        load_model(newest_checkpoint(saved), deeper)


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_half_written(saved, monkeypatch):
    model, optimizer = trained()

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.checkpoint.json.dumps", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(saved, 5, model, optimizer, {})
    assert [path.name for path in saved.iterdir()] == ["step_4"]
    monkeypatch.undo()
    assert newest_checkpoint(saved).step == 4


def test_a_planted_pickle_is_not_run(saved, tmp_path):
    """Known failure I01: loading a checkpoint must not run code from the file."""
    witness = tmp_path / "ran"

    class Hostile:
        def __reduce__(self):
            return Path.touch, (witness,)

    for name in ("model.safetensors", "optimizer.safetensors"):
        path = saved / "step_4" / name
        path.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError):
        newest_checkpoint(saved)
    # Even with a manifest that vouches for the file.
    from training.checkpoint import _fingerprint

    manifest = json.loads((saved / "step_4" / "checkpoint.json").read_text())
    manifest["files"] = {name: _fingerprint(saved / "step_4" / name) for name in manifest["files"]}
    (saved / "step_4" / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_model(newest_checkpoint(saved), build_model(MODEL, MOE))
    assert not witness.exists()
