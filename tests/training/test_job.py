"""Processes of one job: what they say when something is wrong, once, and what they refuse to start with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from training.job import CONTINUE, Job

ROOT = Path(__file__).parents[2]
QUICKSTART = "configs/quickstart.toml"


@pytest.fixture
def torchrun(tmp_path):
    """(exit status, output) of a job of two processes that each run a script; one that hangs fails."""

    def run(script: str, *arguments: str, timeout: float = 60.0) -> tuple[int, str]:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(path), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--parallel.expert", "error: parallel.expert = 3"),
        ("--parallel.expertt", "Unrecognized options: --parallel.ex"),
    ],
)
def test_an_error_of_all_is_shown_once_though_the_main_process_is_the_last_to_have_it(torchrun, flag, message):
    status, output = torchrun(
        """
        import os, sys, time
        import train
        if os.environ["RANK"] == "0":
            time.sleep(2)
        sys.exit(train.main(sys.argv[1:]))
        """,
        *(QUICKSTART, flag, "3"),
    )
    assert status != 0
    assert output.count(message) == 1, output


def test_a_process_that_dies_takes_the_job_down_with_its_own_error(torchrun):
    status, output = torchrun(
        """
        import torch, torch.distributed as dist
        from training.job import Job
        job = Job()
        job.connect("cpu")
        if job.rank == 1:
            raise RuntimeError("the disk is gone")
        dist.all_reduce(torch.ones(1))
        """
    )
    assert status != 0
    assert "RuntimeError: the disk is gone" in output


@pytest.mark.parametrize(
    ("flag", "zero", "one", "message"),
    [
        ("--run.seed", "0", "1", "error: process 1 has run.seed = 1 where process 0 has 0: start all processes alike"),
        ("--parallel.tensor", "1", "3", "error: process 1: parallel.pipeline = 1 x parallel.tensor = 3 = 3 does not"),
        ("--parallel.tensorr", "1", "1", "Unrecognized options: --parallel.tensorr"),
    ],
)
def test_processes_that_were_started_differently_do_not_train_together(
    torchrun, tmp_path, config_file, corpus, flag, zero, one, message
):
    """Where only one of them has the error, its turn to speak comes after the main process' has passed."""
    status, output = torchrun(
        """
        import os, sys
        import train, training.job
        training.job.MAIN_FIRST_S = 3.0
        *arguments, flag, zero, one = sys.argv[1:]
        values = [flag, one] if os.environ["RANK"] == "1" else [flag.replace("tensorr", "tensor"), zero]
        sys.exit(train.main([*arguments, *values]))
        """,
        *(str(config_file), "--data.corpus", str(corpus.folder), "--run.folder", str(tmp_path / "runs")),
        *(flag, zero, one),
    )
    assert status != 0
    assert output.count(message) == 1, output


def test_a_run_folder_that_a_process_does_not_see_is_refused_before_training(torchrun, tmp_path, config_file, corpus):
    """As on machines that share no file system: the second process looks into a folder of its own."""
    status, output = torchrun(
        """
        import os, sys
        from pathlib import Path
        import train, training.run
        training.run.SEE_S = 1.0
        sees = training.run.Run._sees
        def elsewhere(run, token):
            run.folder = Path(str(run.folder) + os.environ["RANK"].strip("0"))
            return sees(run, token)
        training.run.Run._sees = elsewhere
        sys.exit(train.main(sys.argv[1:]))
        """,
        *(str(config_file), "--data.corpus", str(corpus.folder), "--run.folder", str(tmp_path / "runs")),
    )
    assert status != 0
    assert len(re.findall(r"runs/tiny: processes \[1\] do not see .* file system that all machines share", output)) == 1
    assert not (tmp_path / "runs/tiny/metrics.jsonl").exists()


def test_the_command_to_go_on_with_does_not_grow(monkeypatch):
    job = Job()
    assert job.continue_command(["train.py", "a b.toml"]) == "python train.py 'a b.toml' " + " ".join(CONTINUE)
    assert job.continue_command(["train.py", *CONTINUE]) == "python train.py " + " ".join(CONTINUE)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Job().continue_command(["train.py"]).startswith("the same launcher on each of the 2 machines: train.py ")
