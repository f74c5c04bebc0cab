"""The scripts for a GPU, as far as a machine without one can go through them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.tune import LAYERS, best_tiles, candidates, is_sound, rule, with_rows
from moe.kernels.triton.tiles import KERNELS, ROW_KERNELS, Tile, Tiles, find_tiles

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


def test_a_failure_is_kept_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    """Here: an error that no kernel is below. The speed table is made all the same; the exit status tells."""
    from benchmarks import gpu

    entry = {"layer": "toy", "errors": {"out": 1.0}, "same_bits": True, "passed": False}
    monkeypatch.setattr(gpu, "correctness", lambda *arguments: entry)
    monkeypatch.setattr(gpu, "speed", lambda *arguments: {})
    monkeypatch.setattr(gpu, "print_speed", lambda *arguments: None)
    monkeypatch.setattr(gpu, "os", SimpleNamespace(environ={"TRITON_INTERPRET": "1"}))  # for the script alone
    monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path), "--rehearse"])
    with pytest.raises(SystemExit, match="failed: correctness, toy; correctness, toy; .*gpu.json"):
        gpu.main()
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["failed"] and "speed, toy, equal" in result and "--corpus" in result["training"]


def test_what_would_be_tuned_contains_the_present_tile_and_others_that_fit_beside_the_rest():
    present = dict(find_tiles("sm_90", torch.bfloat16, 2048, 768, 2048).by_kernel)
    for kernel in KERNELS:
        found = candidates(kernel, present)
        assert found[0] == present[kernel] and len(found) > 20
        for tile in found:
            assert Tiles.of(with_rows(present, tile.block_m) | {kernel: tile})


def test_the_row_kernels_get_one_number_of_rows_and_every_kernel_its_fastest_tile():
    """64 rows are best for three row kernels, and so much worse for the fourth that all take 128."""
    present = dict(find_tiles("sm_90", torch.bfloat16, 2048, 768, 2048).by_kernel)

    def time_of(kernel, tiles):
        tile = tiles[kernel]
        slow_rows = {"down_dgrad": 50.0}.get(kernel, -1.0) if tile.block_m == 64 else 0.0
        return (
            10 + slow_rows + abs(tile.block_n - 256) / 64 + (tile.warps != 8) + (tile.stages != 3) + (tile.parts != 2)
        )

    found = best_tiles(present, time_of)
    assert {found[kernel] for kernel in ROW_KERNELS} == {Tile(128, 256, 64, 8, 3, 2)}
    assert {found["dw2"], found["dw13"]} == {Tile(64, 256, 64, 8, 3, 2)}
    assert Tiles.of(found)
    layer, condition = next(iter(LAYERS.items()))
    entry = rule(layer, condition, found)
    assert (entry["D"], entry["F"], entry["up_to_tokens"]) == (2048, 768, 64)
    assert Tile(*entry["tiles"]["up_fwd"]) == found["up_fwd"]


def test_a_tile_that_spills_is_not_sound():
    present = dict(find_tiles("sm_90", torch.bfloat16, 2048, 768, 2048).by_kernel)
    layer = list(LAYERS)[1]
    assert is_sound(layer, "sm_90", "up_fwd", present)
    assert not is_sound(layer, "sm_90", "up_fwd", present | {"up_fwd": replace(present["up_fwd"], warps=4)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--repeats", "0"), "--repeats 0: must be at least 1"),
        (("--json", "nowhere/at/all.json"), "there is no folder nowhere/at"),
        (("--shapes", "4x16x16"), "must be four numbers"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_measured(arguments, message):
    done = run("benchmarks.kernels", *arguments, interpret=False)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr


def test_widths_that_grouped_mm_does_not_take_have_no_figure_for_it():
    done = run("benchmarks.kernels", "--shapes", "4x63x65x128", "--repeats", "1", interpret=False)
    assert done.returncode == 0, done.stderr


def test_the_model_takes_shapes():
    done = run("benchmarks.kernels", "--model", "--shapes", "8x512x1024x4096", interpret=False)
    assert done.returncode == 0, done.stderr
    assert "4,096 tokens, D 512, F 1024, 8 experts, 1 a token" in " ".join(done.stdout.split())
