"""Every command of the README is run, on a small corpus and for a few steps; its links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# What is added to a command so that it takes seconds. The first entry whose words all occur in the command applies.
SHORTENED = {
    "data.prepare --input": [],
    "data.prepare": ["--max-megabytes-per-domain", "0.4"],
    "train.py": [
        "--training.steps",
        "4",
        "--training.warmup-steps",
        "1",
        "--eval.final-tokens",
        "512",
        "--eval.every",
        "0",
    ],
    "eval.report": ["--tokens", "512"],
    "eval.bits_per_byte": ["--tokens", "512"],
    "eval.score": ["--questions", "4", "--limit", "8"],
    "eval.compare": ["--tokens", "512"],
    "eval.audit": ["--prompts", "2"],
    "eval.export": [],
    "ablations.run": ["--quick", "--seeds", "1"],
    "eval.generate": ["--new-tokens", "4"],
    "eval.parity": ["--rows", "1"],
    "eval.causality runs/": ["--canary-steps", "20", "--pairs", "2"],
    "eval.causality configs/": [],
    "eval.routers": ["--tokens", "512", "--rows", "1", "--predictor-steps", "5"],
    "moe.routers": [],
    "ablations.planted": ["--routers", "token_choice", "--kinds", "id", "--seeds", "1", "--steps", "3"],
    "benchmarks.routing": ["--repeats", "1", "--tokens", "64", "--width", "16"],
    "benchmarks.telemetry": ["--repeats", "1"],
    "benchmarks.kernels": ["--repeats", "1", "--shapes", "4x16x16x32"],
    "benchmarks.train_step --peer": ["--repeats", "1", "--model.layers", "1", "--model.width", "64"],
    "benchmarks.train_step": ["--repeats", "1", "--model.layers", "1", "--model.width", "64"],
}
# What stands for machines that a test has not.
ONE_MACHINE = {"--nnodes 4 --nproc-per-node 8": "--nnodes 1 --nproc-per-node 2", "head-node:29500": "localhost:0"}
FEWER_ARMS = {"ablations/shared.toml": "ablations/zloss.toml"}
# Set-up, which the Makefile and these lines share; compared with it instead of being run again.
SETUP = ("make train", "make test", "python3 -m venv", ". .venv/bin/activate", "pip install", "git clone", "cd choir")


def readme_commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def test_the_set_up_lines_are_those_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    commands = readme_commands()
    for target in ("train", "test"):
        assert f"make {target}" in commands
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    for command in commands:
        if command.startswith("pip install"):
            plain = makefile.replace("--quiet --disable-pip-version-check ", "")
            assert re.sub(r"'\.\[.*\]'", "", command).strip() in plain


@pytest.mark.timeout(900)
def test_every_command_runs(tmp_path):
    rooms = ("configs", "moe", "parallel", "data", "training", "eval", "ablations", "benchmarks")
    for entry in ("train.py", "constraints.txt", *rooms):
        (tmp_path / entry).symlink_to(ROOT / entry)
    (tmp_path / "notes").mkdir()
    for number in range(6):
        words = " ".join(f"word{number}x{i * i % 97}" for i in range(2500))
        (tmp_path / "notes" / f"{number}.txt").write_text(words)
    binaries = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "2"}
    ran = 0
    for command in readme_commands():
        if command.startswith(SETUP):
            continue
        try:
            flags = next(v for key, v in SHORTENED.items() if all(word in command for word in key.split()))
        except StopIteration:
            pytest.fail(f"no rule for running {command!r}")
        if "--peer" in command:
            pytest.importorskip("transformers", reason="the peer is an optional extra")
        # A shell expands the file patterns, as it does for the reader.
        line = " ".join([command, *map(shlex.quote, flags)])
        for there, here in (ONE_MACHINE | FEWER_ARMS).items():
            line = line.replace(there, here)
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        ran += 1
    assert ran >= 6
    for script in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{script}\n{done.stderr}"
        assert "'To'" in done.stdout


def test_every_link_to_a_file_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        if not link.startswith("http"):
            assert (ROOT / link).exists(), link


def test_every_path_in_the_list_of_places_exists():
    places = README.split("## Where things live")[1].split("A run's folder")[0]
    for path in re.findall(r"`([\w/.-]+(?:/|\.py|\.toml))`", places):
        assert (ROOT / path).exists(), path
