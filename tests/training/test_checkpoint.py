"""A checkpoint is complete or it is refused with the fault named; reading one runs no code."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import training.checkpoint as checkpoints
from moe.config import ModelConfig, MoEConfig
from moe.initialization import build_model
from tests.training import checkpoint_jobs
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
ROOT = Path(__file__).parents[2]
FILE = "shard-00001-model-00001-of-00001.safetensors"


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
    save_checkpoint(tmp_path, 4, [model], optimizer, {"tokens": 99})
    return tmp_path


def test_weights_router_state_and_moments_come_back_bit_for_bit(tmp_path):
    model, optimizer = trained()
    save_checkpoint(tmp_path, 4, [model], optimizer, {"tokens": 99})
    other, other_optimizer = trained(seed=5)
    checkpoint = newest_checkpoint(tmp_path)
    assert (checkpoint.step, checkpoint.state) == (4, {"tokens": 99})
    load_model(checkpoint, [other])
    load_optimizer(checkpoint, [other], other_optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, other_optimizer.state[b][key]), key


def test_the_newest_is_the_highest_step_as_a_number(saved):
    model, optimizer = trained()
    save_checkpoint(saved, 10, [model], optimizer, {})
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
        (f"model/{FILE}", Path.unlink, f"model/{FILE}: damaged checkpoint: the file is missing"),
        (f"model/{FILE}", cut, "bytes, expected"),
        (f"optimizer/{FILE}", flip, "the checksum does not match"),
    ],
)
def test_damage_is_named_and_refused(saved, file, damage, message):
    damage(saved / "step_4" / file)
    with pytest.raises(CheckpointError) as caught:
        newest_checkpoint(saved)
    assert message in str(caught.value)
    assert "step_4" in str(caught.value)


@pytest.mark.parametrize("version", [1, 99])
def test_a_checkpoint_of_another_format_is_refused(saved, version):
    path = saved / "step_4" / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": version}))
    with pytest.raises(CheckpointError, match=f"checkpoint format {version}; this version reads 2"):
        open_checkpoint(saved / "step_4")


def test_a_file_that_does_not_belong_is_refused(saved):
    path = saved / "step_4" / "model" / FILE
    path.with_name("shard-00002-model-00001-of-00001.safetensors").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="shard-00002.*checkpoint.json does not know the file"):
        newest_checkpoint(saved)


def test_only_the_parts_that_are_asked_for_are_checked(saved):
    cut(saved / "step_4" / "optimizer" / FILE)
    assert newest_checkpoint(saved, parts=("model",)).step == 4


def test_large_states_are_written_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "FILE_BYTES", 600)
    model, optimizer = trained()
    folder = save_checkpoint(tmp_path, 4, [model], optimizer, {})
    files = {path: load_file(path) for path in (folder / "model").iterdir()}
    assert len(files) > 2
    for path, tensors in files.items():
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 600, path
    other, other_optimizer = trained(seed=5)
    load_model(newest_checkpoint(tmp_path), [other])
    load_optimizer(newest_checkpoint(tmp_path), [other], other_optimizer)
    checkpoint_jobs.assert_same(checkpoint_jobs.whole(other, other_optimizer), checkpoint_jobs.whole(model, optimizer))


def test_a_checkpoint_from_before_the_first_step_has_no_moments(tmp_path):
    model = build_model(MODEL, MOE)
    save_checkpoint(tmp_path, 0, [model], build_optimizer(model, TrainingConfig()), {})
    _, optimizer = other = trained(seed=5)
    load_optimizer(newest_checkpoint(tmp_path), [other[0]], optimizer)
    assert not optimizer.state


def test_values_of_another_type_are_refused_and_not_rounded(saved):
    model = build_model(MODEL, MOE).double()
    with pytest.raises(CheckpointError, match=r"is torch.float32, the model wants torch.float64"):
        load_model(newest_checkpoint(saved), [model])


def test_a_model_of_another_shape_is_refused_with_the_names(saved):
    other = build_model(MODEL, MoEConfig(num_experts=3, expert_width=6))
    with pytest.raises(CheckpointError, match=r"w13_E2FD has shape \(3, 2, 5, 8\), the model wants \(3, 2, 6, 8\)"):
        load_model(newest_checkpoint(saved), [other])
    deeper = build_model(ModelConfig(vocabulary_size=30, width=8, layers=2, heads=2), MOE)
    with pytest.raises(CheckpointError, match="missing blocks.1"):
        load_model(newest_checkpoint(saved), [deeper])


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_half_written(saved, monkeypatch):
    model, optimizer = trained()

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.checkpoint.commit", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(saved, 5, [model], optimizer, {})
    assert [path.name for path in saved.iterdir()] == ["step_4"]
    monkeypatch.undo()
    assert newest_checkpoint(saved).step == 4


def test_what_the_disk_refuses_is_an_error_that_says_so(saved, monkeypatch):
    model, optimizer = trained()

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.os.fsync", disk_full)
    with pytest.raises(CheckpointError, match="cannot be written: OSError.*No space left"):
        save_checkpoint(saved, 5, [model], optimizer, {})
    assert [path.name for path in saved.iterdir()] == ["step_4"]


def test_what_was_not_written_whole_is_not_published(saved, monkeypatch):
    model, optimizer = trained()
    write = checkpoints.dcp.save

    def forgetful(tensors, **kwargs):
        write({name: tensor for name, tensor in tensors.items() if "w2_EDF" not in name}, **kwargs)

    monkeypatch.setattr(checkpoints.dcp, "save", forgetful)
    with pytest.raises(CheckpointError, match="missing blocks.0.feed_forward.experts.w2_EDF"):
        save_checkpoint(saved, 5, [model], optimizer, {})
    assert [path.name for path in saved.iterdir()] == ["step_4"]


def test_a_planted_pickle_is_not_run(saved, tmp_path):
    """Known failure I01: loading a checkpoint must not run code from the file."""
    witness = tmp_path / "ran"

    class Hostile:
        def __reduce__(self):
            return Path.touch, (witness,)

    for name in (f"model/{FILE}", f"optimizer/{FILE}"):
        path = saved / "step_4" / name
        path.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError):
        newest_checkpoint(saved)
    # Even with a manifest that vouches for the file.
    folder = saved / "step_4"
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["files"] = {name: checkpoints._fingerprint(folder / name) for name in manifest["files"]}
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    for part in ("model", "optimizer"):  # where torch keeps a pickle in its own format
        (folder / part / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_model(newest_checkpoint(saved), [build_model(MODEL, MOE)])
    assert not witness.exists()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    """The folder of the jobs of `checkpoint_jobs`, and what their cases came to, by process."""
    folder = tmp_path_factory.mktemp("jobs")
    command = [sys.executable, "-m", "tests.training.checkpoint_jobs"]
    processes = [
        subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        for rank in range(4)
    ]
    try:
        for process in processes:
            process.wait(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return folder, [json.loads((folder / f"results_{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize(
    ("world", "case"),
    [(n, case.__name__) for n, cases in checkpoint_jobs.CASES.items() for case in cases],
)
def test_in_a_job_of_several_processes(jobs, world, case):
    for rank, results in enumerate(jobs[1][:world]):
        assert results[case] == "ok", f"process {rank}: {results[case]}"


def test_what_all_processes_hold_is_written_once_and_nothing_by_pickle(jobs):
    folder = jobs[0] / "four" / "step_2"
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    stored = [load_file(path) for path in folder.glob("*/*.safetensors")]
    for name in ("plain.weight", "used", "plain.weight/exp_avg", "experts.weight/step", "fsdp.weight/step"):
        assert sum(name in tensors for tensors in stored) == 1, name
    for name, shape in checkpoint_jobs.SHAPES.items():
        parts = [tensors[f"{name}.weight"] for tensors in stored if f"{name}.weight" in tensors]
        assert sum(part.numel() for part in parts) == torch.Size(shape).numel(), name


def test_both_copies_of_a_tied_embedding_are_filled_in_one_process(jobs):
    expected, stages = (checkpoint_jobs.first_and_last(seed) for seed in (3, 4))
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()])
    checkpoint = newest_checkpoint(jobs[0] / "pipeline")
    load_model(checkpoint, stages)
    load_optimizer(checkpoint, stages, optimizer)
    for stage, other in zip(stages, expected, strict=True):
        step = checkpoint_jobs.one_step(other)
        checkpoint_jobs.assert_same(dict(stage.state_dict()), dict(other.state_dict()))
        for a, b in zip(stage.parameters(), other.parameters(), strict=True):
            for key, value in step.state[b].items():
                assert torch.equal(optimizer.state[a][key], value), key
