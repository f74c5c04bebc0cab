"""The scripts for a GPU, as far as a machine without one can go through them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.tune import candidates
from moe.kernels.tile import KERNELS, tiles_for
from moe.kernels.triton.ahead_of_time import compile_kernel, problems

ROOT = Path(__file__).parents[2]


def run(*arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_the_whole_gpu_script_runs_in_the_interpreter_at_toy_sizes(tmp_path):
    done = run("benchmarks.gpu", "--out", str(tmp_path), "--rehearse", interpret=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["rehearsal"] and all(entry["same_bits"] for entry in result["correctness"])
    assert set(result["speed, toy, equal"]) == {"choir, triton", "dense torch.matmul", "gather, bmm, index_add"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("script", ["benchmarks.gpu", "benchmarks.tune"])
def test_without_a_gpu_one_line_says_so(tmp_path, script):
    done = run(script, "--out", str(tmp_path / "out"), interpret=False)
    assert done.returncode != 0 and "GPU" in done.stderr and "Traceback" not in done.stderr


def test_what_would_be_tuned_contains_the_present_tile_and_others_that_compile_cleanly():
    for kernel in KERNELS:
        present = tiles_for("sm_90", 4096)[kernel]
        assert candidates(kernel, present)[0] == present
        assert len(candidates(kernel, present)) > 20
    other = {"BM": 128, "BN": 128, "BK": 64, "warps": 8, "stages": 3, "subtiles": 2}
    assert problems(compile_kernel("down_fwd", "sm_90", **other), "sm_90", "down_fwd") == []
