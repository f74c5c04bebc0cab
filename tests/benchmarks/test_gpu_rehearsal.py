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
from moe.kernels.triton.tiles import KERNELS, ROW_KERNELS, Tiles, find_tiles

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


def test_what_would_be_tuned_contains_the_present_tile_and_others_that_fit_beside_the_rest():
    present = dict(find_tiles("sm_90", torch.bfloat16, 2048, 768, 2048).by_kernel)
    for kernel in KERNELS:
        found = candidates(kernel, present)
        assert found[0] == present[kernel] and len(found) > 20
        if kernel in ROW_KERNELS:
            assert all(Tiles.of(present | {kernel: tile}) for tile in found)
