"""Sweeps from the command line: in processes, after an interruption, with a failure, as an array of jobs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ablations import run as run_module
from ablations.job import AblationJob, jobs_of, train_and_measure
from ablations.jobs import run_jobs
from ablations.run import default_processes, main
from ablations.spec import Ablation
from eval.leak import Estimate
from eval.likelihood import evaluate
from moe.config import ConfigError
from tests.ablations.conftest import TWO_ARMS
from train import train
from training.job import Job
from training.run import Run

Write = Callable[[str], Path]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[AblationJob]:
    """Jobs run in this process, which starts quickly; those that ran are listed."""
    ran: list[AblationJob] = []

    def in_this_process(
        body: Any, jobs: Sequence[tuple[AblationJob]], processes: int, timeout: float, keep_going: bool
    ) -> Iterator[tuple[int, Any]]:
        for place, (job,) in enumerate(jobs):
            ran.append(job)
            yield place, train_and_measure(job)

    threads = torch.get_num_threads()
    monkeypatch.setattr(run_module, "run_jobs", in_this_process)
    yield ran
    torch.set_num_threads(threads)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_sweep_of_two_arms_and_two_seeds_in_processes(write_ablation: Write, tmp_path: Path) -> None:
    main([str(write_ablation(TWO_ARMS)), "--output", str(tmp_path / "out"), "--processes", "2"])
    folder = tmp_path / "out" / "question"
    report = json.loads((folder / "results.json").read_text())
    assert list(report["arms"]) == ["none", "balanced"] and report["missing"] == []
    for arm, values in report["arms"].items():
        assert sorted(values["runs"]) == ["0", "1"]
        for seed, found in values["runs"].items():
            run = Run.open(folder / f"{arm}-{seed}")
            assert run.config.run.seed == int(seed)
            final = run.metrics()[-1]
            assert found["bits_per_byte"] == pytest.approx(final["final/bits_per_byte"], abs=1e-6)
            assert found["nats_per_token"] == pytest.approx(final["final/loss"], abs=1e-6)
            assert found["domains"]["low"] == pytest.approx(final["final/low/bits_per_byte"], abs=1e-6)
            assert found["cpu_minutes"] > 0 and found["threads"] == max(1, run_module.available_cpus() // 2)
    a, b = (report["arms"][arm]["runs"] for arm in ("balanced", "none"))
    differences = [a[seed]["bits_per_byte"] - b[seed]["bits_per_byte"] for seed in ("0", "1")]
    assert report["arms"]["balanced"]["against_baseline"]["mean"] == pytest.approx(sum(differences) / 2)
    assert (folder / "results.md").read_text().startswith("# question")
    assert (folder / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_finished_runs_are_left_alone_and_interrupted_ones_continue(
    two_arms: Ablation, tmp_path: Path, here: list[AblationJob]
) -> None:
    jobs = jobs_of(two_arms, tmp_path / "out", 1)
    train_and_measure(jobs[0])
    half = dataclasses.replace(jobs[1].config, run=dataclasses.replace(jobs[1].config.run, stop_after=3))
    train(half, Job(), Console(file=io.StringIO()))
    early = contents(jobs[1].run_folder)["metrics.jsonl"][1]
    before = contents(jobs[0].run_folder)
    arguments = [str(two_arms.path), "--output", str(tmp_path / "out")]
    main(arguments)
    assert [str(job) for job in here] == ["balanced, seed 0", "none, seed 1", "balanced, seed 1"]
    assert contents(jobs[0].run_folder) == before
    assert contents(jobs[1].run_folder)["metrics.jsonl"][1].startswith(early)  # the first steps were not run again
    here.clear()
    everything = {job.run: contents(job.run_folder) for job in jobs}
    main(arguments)
    assert here == [] and {job.run: contents(job.run_folder) for job in jobs} == everything


def test_an_interrupted_run_ends_as_if_it_had_not_been(two_arms: Ablation, tmp_path: Path) -> None:
    whole, parts = (jobs_of(two_arms, tmp_path / name, torch.get_num_threads())[1] for name in ("whole", "parts"))
    half = dataclasses.replace(parts.config, run=dataclasses.replace(parts.config.run, stop_after=2))
    train(half, Job(), Console(file=io.StringIO()))
    assert train_and_measure(parts)["bits_per_byte"] == train_and_measure(whole)["bits_per_byte"]


def test_a_run_that_was_trained_and_not_measured_is_only_measured(two_arms: Ablation, tmp_path: Path) -> None:
    job = jobs_of(two_arms, tmp_path, 1)[0]
    first = train_and_measure(job)
    before = contents(job.run_folder / "checkpoints") | {"": contents(job.run_folder)["metrics.jsonl"]}
    (job.run_folder / "eval" / "ablation.json").unlink()
    second = train_and_measure(job)
    assert second["bits_per_byte"] == first["bits_per_byte"]
    assert contents(job.run_folder / "checkpoints") | {"": contents(job.run_folder)["metrics.jsonl"]} == before
    assert second["cpu_minutes"] > first["cpu_minutes"]  # what it cost in all


def test_an_attempt_that_was_killed_is_counted(two_arms: Ablation, tmp_path: Path) -> None:
    job = jobs_of(two_arms, tmp_path, 1)[0]
    job.attempts.parent.mkdir(parents=True)
    job.attempts.write_text('{"event": "begin", "time": 0}\n')
    assert train_and_measure(job)["attempts_killed"] == 1


def test_a_run_that_fails_is_reported_with_its_log_and_the_others_go_on(
    write_ablation: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diverges = TWO_ARMS.replace("seeds = 2", "seeds = 1").replace("moe = { balance_coefficient = 0.5 }", "")
    path = write_ablation(diverges + "training.learning_rate = 1e30\ntraining.clip_norm = 0.0\n")
    with pytest.raises(SystemExit, match="1"):
        main([str(path), "--output", str(tmp_path), "--processes", "2"])
    printed = capsys.readouterr().out
    assert "balanced, seed 0: failed" in printed and "end of" in printed
    assert "NonFiniteGradient" in printed and "lower training.learning_rate" in printed  # the log's last lines
    report = json.loads((tmp_path / "question" / "results.json").read_text())
    assert list(report["arms"]["none"]["runs"]) == ["0"] and report["arms"]["balanced"]["runs"] == {}
    assert len(report["missing"]) == 1 and "NonFiniteGradient" in report["missing"][0]


def test_jobs_go_on_after_one_that_raises_and_one_that_dies() -> None:
    found = dict(run_jobs(math.sqrt, [(-1,), (4,)], processes=1, timeout=60, keep_going=True))
    assert isinstance(found[0], ChildProcessError) and "ValueError" in str(found[0]) and found[1] == 2.0
    died = dict(run_jobs(os._exit, [(3,), (4,)], processes=2, timeout=60, keep_going=True))
    assert all("died" in str(died[place]) for place in (0, 1))


def test_jobs_go_on_after_one_that_hangs() -> None:
    found = dict(run_jobs(time.sleep, [(50,), (0,)], processes=1, timeout=4, keep_going=True))
    assert isinstance(found[0], TimeoutError) and found[1] is None


def test_one_job_a_task_and_the_table_when_all_are_done(
    two_arms: Ablation, tmp_path: Path, here: list[AblationJob], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(two_arms.path), "--output", str(tmp_path / "out")]
    main([*arguments, "--slurm"])
    assert "#SBATCH --array=0-3" in capsys.readouterr().out
    for index in range(3):
        main([*arguments, "--job", str(index)])
    with pytest.raises(SystemExit, match="1"):
        main([*arguments, "--collect"])
    assert "balanced, seed 1: not finished" in capsys.readouterr().out
    main([*arguments, "--job", "3"])
    main([*arguments, "--collect"])
    assert here == []
    with pytest.raises(ValueError, match="jobs of .* are 0 to 3"):
        main([*arguments, "--job", "4"])


def test_a_changed_file_does_not_mix_with_old_runs(
    write_ablation: Write, tmp_path: Path, here: list[AblationJob]
) -> None:
    arguments = ["--output", str(tmp_path / "out")]
    main([str(write_ablation(TWO_ARMS)), "--seeds", "1", *arguments])
    here.clear()
    with pytest.raises(ConfigError, match="another configuration .moe.balance_coefficient: 0.5 -> 0.25"):
        main([str(write_ablation(TWO_ARMS.replace("0.5", "0.25"))), *arguments])
    assert here == []  # nothing was run, no seed 1 either


def test_more_held_out_text_is_measured_without_training_again(
    write_ablation: Write, tmp_path: Path, here: list[AblationJob]
) -> None:
    arguments = ["--seeds", "1", "--output", str(tmp_path / "out")]
    main([str(write_ablation(TWO_ARMS)), *arguments])
    weights = contents(tmp_path / "out" / "question" / "none-0" / "checkpoints")
    main([str(write_ablation(TWO_ARMS + "[overrides]\neval.final_tokens = 300\n")), *arguments])
    assert len(here) == 4 and contents(tmp_path / "out" / "question" / "none-0" / "checkpoints") == weights
    report = json.loads((tmp_path / "out" / "question" / "results.json").read_text())
    assert report["provenance"]["heldout_tokens"] > 500


def test_the_leak_is_measured_where_it_is_asked_for_and_its_loss_is_kept_apart(
    write_ablation: Write, tmp_path: Path, here: list[AblationJob]
) -> None:
    arms = """
[overrides]
moe = { router = "expert_choice", allow_leak = true, threshold_after = 1.0 }
[arms.none]
moe = { group = "chunk", chunk_length = 4 }
[arms.position]
moe = { group = "position" }
"""
    head = TWO_ARMS.split("[arms")[0].replace("seeds = 2", "seeds = 1\nleak_pairs = 2")
    main([str(write_ablation(head + arms)), "--output", str(tmp_path / "out")])
    folder = tmp_path / "out" / "question"
    found = {arm: json.loads((folder / f"{arm}-0/eval/ablation.json").read_text()) for arm in ("none", "position")}
    assert found["position"]["leak_bits"] == pytest.approx(0, abs=1e-6)
    assert found["position"]["noncausal_bits_per_byte"] is None
    assert abs(found["none"]["leak_bits"]) > 1e-6
    run = Run.open(folder / "none-0")
    scores = evaluate(run.model(), run.corpus(), run.config, 150, "train_router")
    assert found["none"]["noncausal_bits_per_byte"] == pytest.approx(scores.bits_per_byte)
    assert isinstance(found["none"]["leak_error"], float) and Estimate.of([0.0, 1.0]).draws == 2


def test_a_quick_run_is_marked_kept_apart_and_never_recorded(
    two_arms: Ablation, tmp_path: Path, here: list[AblationJob]
) -> None:
    main([str(two_arms.path), "--quick", "--output", str(tmp_path / "quick")])
    assert (tmp_path / "quick" / "question" / "results.md").read_text().startswith("# SMOKE RUN")
    with pytest.raises(ValueError, match="not recorded"):
        main([str(two_arms.path), "--quick", "--record"])


@pytest.mark.parametrize("flag", ["--seeds", "--processes", "--threads", "--timeout"])
def test_a_count_below_one_is_refused(two_arms: Ablation, flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} 0: must be at least 1"):
        main([str(two_arms.path), flag, "0"])


def test_a_missing_corpus_is_one_error_before_any_run(
    two_arms: Ablation, tmp_path: Path, here: list[AblationJob]
) -> None:
    with pytest.raises(ValueError, match="is not a corpus"):
        main([str(two_arms.path), "--corpus", str(tmp_path / "nowhere"), "--output", str(tmp_path / "out")])
    assert here == []


def test_runs_share_the_cpus_and_not_a_gpu(two_arms: Ablation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_processes(two_arms, 3) == 3 and default_processes(two_arms, 64) == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_processes(two_arms, 8) == 4  # the base says device = "cpu"
    config = two_arms.arms[0].config
    auto = dataclasses.replace(config, training=dataclasses.replace(config.training, device="auto"))
    on_gpu = dataclasses.replace(two_arms, arms=(dataclasses.replace(two_arms.arms[0], config=auto),))
    assert default_processes(on_gpu, 8) == 1
