"""A search from the command line: survivors continue, everything is resumable, the winner is to be confirmed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ablations import search as search_module
from ablations.job import AblationJob
from ablations.search import main, steps_at
from ablations.spec import load_ablation
from eval.likelihood import evaluate
from moe.config import ConfigError
from training.run import Run

SEARCH = """
question = "Which width?"
base = "base.toml"
baseline = "expert_width=8"
seeds = 1
[grid]
"moe.expert_width" = [8, 4, 16]
[halving]
rungs = [0.34, 1.0]
keep = 0.5
"""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Jobs run in this process; those that ran are listed, with the step that they went to."""
    ran: list[str] = []
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)  # the log is for a process of its own

    def in_this_process(
        body: Any, jobs: Sequence[tuple[AblationJob]], processes: int, timeout: float, keep_going: bool
    ) -> Iterator[tuple[int, Any]]:
        for place, (job,) in enumerate(jobs):
            ran.append(f"{job.arm} to {job.config.run.stop_after}")
            try:
                yield place, body(job)
            except RuntimeError as error:
                yield place, ChildProcessError(str(error))

    threads = torch.get_num_threads()
    monkeypatch.setattr(search_module, "run_jobs", in_this_process)
    yield ran
    torch.set_num_threads(threads)


def test_survivors_continue_from_their_checkpoints(
    write_ablation: Callable[[str], Path], tmp_path: Path, here: list[str]
) -> None:
    main([str(write_ablation(SEARCH)), "--output", str(tmp_path / "out")])
    folder = tmp_path / "out" / "question"
    report = json.loads((folder / "search.json").read_text())
    first, last = report["rungs"]
    assert here[:3] == ["expert_width=8 to 2", "expert_width=4 to 2", "expert_width=16 to 2"]
    assert here[3:] == [f"{name} to 6" for name in first["kept"]] and len(first["kept"]) == 2
    assert [name for name, _ in first["scores"]][:2] == first["kept"]
    bits = [value for _, value in first["scores"]]
    assert bits == sorted(bits) and len(set(bits)) == 3
    winner = last["kept"][0]
    run = Run.open(folder / winner.replace("_", "-").join(["", "-0"]))
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6, 6]  # each step once, and the final scores
    assert dict(last["scores"])[winner] == pytest.approx(
        evaluate(run.model(), run.corpus(), run.config, 150).bits_per_byte, abs=1e-6
    )
    here.clear()
    main([str(tmp_path / "question.toml"), "--output", str(tmp_path / "out")])
    assert here == []  # the same command again has nothing to do
    assert json.loads((folder / "search.json").read_text())["rungs"] == report["rungs"]


def test_the_winner_is_to_be_confirmed_with_fresh_seeds(
    write_ablation: Callable[[str], Path], tmp_path: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {"expert_width=8": 2.0, "expert_width=4": 3.0, "expert_width=16": 1.0}
    monkeypatch.setattr(search_module, "scored", lambda job: scores[job.arm])
    main([str(write_ablation(SEARCH.replace("seeds = 1", "seeds = 2"))), "--output", str(tmp_path / "out")])
    confirm = load_ablation(tmp_path / "out" / "question" / "confirm.toml")
    assert [arm.name for arm in confirm.arms] == ["expert_width=8", "expert_width=16"]
    assert [arm.config.moe.expert_width for arm in confirm.arms] == [8, 16]
    assert confirm.seed_list == [2, 3, 4, 5, 6]  # the search saw 0 and 1
    assert confirm.claims[0].arm_better_than == ("expert_width=16", "expert_width=8")
    text = (tmp_path / "out" / "question" / "search.md").read_text()
    # 3 arms for 0.34 and 2 for 0.66 of a run
    assert (
        "expert_width=16 won among 3 arms, at 1.0000 bits a byte over 2 seeds, for the cost of 2.3 whole runs" in text
    )
    assert "which therefore flatters it" in text


def test_an_arm_that_fails_is_dropped_and_the_command_fails(
    write_ablation: Callable[[str], Path], tmp_path: Path, here: list[str]
) -> None:
    path = write_ablation(
        SEARCH.split("[grid]")[0].replace("expert_width=8", "a")
        + "[arms.a]\n[arms.b]\ntraining.learning_rate = 1e30\ntraining.clip_norm = 0.0\ntraining.bad_steps = 1\n"
        + "[halving]\nrungs = [0.5, 1.0]\n"
    )
    with pytest.raises(SystemExit, match="1"):
        main([str(path), "--output", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "question" / "search.json").read_text())
    assert [rung["kept"] for rung in report["rungs"]] == [["a"], ["a"]]
    assert report["failed"][0].startswith("b, seed 0: failed")


def test_a_file_without_rungs_is_an_ablation(write_ablation: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"needs a \[halving\] section"):
        main([str(write_ablation(SEARCH.split("[halving]")[0]))])


def test_a_rung_is_at_least_one_step() -> None:
    assert [steps_at(160, share) for share in (0.2, 0.45, 1.0)] == [32, 72, 160]
    assert steps_at(2, 0.01) == 1
