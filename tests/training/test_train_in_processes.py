"""train.py under torchrun: the run of one process, in any number, and gone on with under any other layout."""

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

from training.run import Run

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    4: ["--parallel.expert", "2", "--parallel.pipeline", "2", "--parallel.zero", "1"],
    2: ["--parallel.tensor", "2", "--parallel.expert-tensor", "2", "--parallel.recompute", "full"],
}


@pytest.fixture
def command(config_file, corpus, tmp_path):
    """The command line of a job of so many processes, in fp32 with heads that two processes can split."""

    def build(processes: int, folder: str, *flags: str) -> list[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        where = ["--run.folder", str(tmp_path / folder), "--data.corpus", str(corpus.folder), "--log.no-tensorboard"]
        same = ["--model.heads", "4", "--training.batch-sequences", "8", "--training.micro-batch-sequences", "2"]
        return [*launcher, "train.py", str(config_file), *where, *same, *flags]

    return build


def run(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(300)
def test_a_run_moves_between_layouts_and_stays_the_run_of_one_process(command, tmp_path):
    """Losses, validation, telemetry and weights, over three layouts of one run against one process throughout."""
    whole = run(command(1, "one", "--training.steps", "9"))
    output = run(command(4, "moving", "--training.steps", "9", "--run.stop-after", "4", *LAYOUTS[4]))
    assert "torchrun --nproc-per-node 4 train.py" in " ".join(output.split())
    assert [row.split()[0] for row in output.splitlines() if row[:1].isdigit()] == ["0", "1", "2", "3"]
    resume = ("--run.resume", "auto")
    run(command(2, "moving", "--training.steps", "9", "--run.stop-after", "7", *resume, *LAYOUTS[2]))
    output = run(command(1, "moving", "--training.steps", "9", *resume))
    assert [line for line in whole.splitlines() if "bits per byte" in line] == [
        line for line in output.splitlines() if "bits per byte" in line
    ]
    for name in ("metrics.jsonl", "routing/steps.jsonl"):
        one, moving = (lines(tmp_path / folder / "tiny" / name) for folder in ("one", "moving"))
        assert len(one) == len(moving) > 2
        for a, b in zip(one, moving, strict=True):
            assert a.keys() == b.keys()
            for key in a.keys() - {"tokens_per_second"}:
                assert _close(a[key], b[key]), (name, a["step"], key, a[key], b[key])
    models = [Run.open(tmp_path / folder / "tiny").model("cpu").state_dict() for folder in ("one", "moving")]
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def _close(a: object, b: object) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return b == pytest.approx(a, rel=1e-4, abs=1e-5)
    return a == b


@pytest.mark.timeout(200)
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGUSR1], ids=["Ctrl-C", "the scheduler's notice"])
def test_asked_to_stop_all_processes_save_the_same_step(command, tmp_path, which):
    flags = ("--training.steps", "100000", "--eval.every", "0", "--parallel.pipeline", "2")
    launch = command(2, "runs", *flags)
    launch[3:3] = ["--signals-to-handle", "SIGUSR1,SIGINT,SIGTERM"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        launch, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    if which == signal.SIGINT:
        os.killpg(process.pid, which)  # as a terminal does
    else:
        process.send_signal(which)
    output, _ = process.communicate(timeout=90)
    assert process.returncode != 0
    assert Run.open(tmp_path / "runs/tiny").checkpoint().step == len(lines(metrics)) > 0, output
