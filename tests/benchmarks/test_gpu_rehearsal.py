"""The scripts for a GPU, as far as a machine without one can go through them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from benchmarks import gpu, tune
from benchmarks.tune import LAYERS, best_tiles, candidates, is_sound, rule, with_rows
from moe.kernels.triton import launch, tiles
from moe.kernels.triton.tiles import KERNELS, ROW_KERNELS, TABLE, Tile, Tiles, find_tiles

ROOT = Path(__file__).parents[2]


def run(*arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_the_whole_gpu_script_runs_in_the_interpreter_at_toy_sizes(tmp_path):
    done = run("benchmarks.gpu", "--out", str(tmp_path), "--rehearse", interpret=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["rehearsal"] and result["failed"] == []
    for name in ("toy", "toy, equal"):
        assert result[f"correctness, {name}"]["same_bits"] and result[f"correctness, {name}"]["passed"]
    for router in ("token_choice", "expert_choice"):
        compiled = result[f"compiled blocks, {router}"]
        assert compiled["passed"] and compiled["graphs"] >= 1, compiled
    assert result["compiled blocks, expert_choice"]["graph_breaks"] == {}
    assert "--corpus" in result["training"]["not run"] and "needs --corpus" in done.stdout
    assert set(result["speed, toy, equal"]) == {"choir, triton", "dense torch.matmul", "gather, bmm, index_add"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("script", ["benchmarks.gpu", "benchmarks.tune"])
def test_without_a_gpu_one_line_says_so(tmp_path, script):
    done = run(script, "--out", str(tmp_path / "out"), interpret=False)
    assert done.returncode != 0 and "GPU" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def rehearse(tmp_path, monkeypatch):
    """Run the script with parts replaced: (how it ended, what it kept)."""

    def call(*flags, **parts):
        whole = {"correctness": {"passed": True}, "compiled_blocks": {"passed": True}, "speed": {}, "print_speed": None}
        for name, value in (whole | parts).items():
            monkeypatch.setattr(gpu, name, value if callable(value) else lambda *arguments, value=value: value)
        monkeypatch.setattr(gpu, "os", SimpleNamespace(environ={"TRITON_INTERPRET": "1"}))  # for the script alone
        monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path), "--rehearse", *flags])
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        return str(ended.value), json.loads((tmp_path / "gpu.json").read_text())

    return call


def broken(*arguments):
    raise RuntimeError("no room [4 GiB]")


def test_a_result_that_is_wrong_is_kept_and_the_rest_goes_on(rehearse):
    ended, result = rehearse(correctness={"errors": {"out": 1.0}, "passed": False})
    assert ended.startswith("failed: correctness, toy; correctness, toy, equal; ") and "gpu.json" in ended
    assert result["failed"] == ["correctness, toy", "correctness, toy, equal"] and "speed, toy, equal" in result


@pytest.mark.parametrize("part", ["correctness", "compiled_blocks", "speed"])
def test_a_part_that_breaks_off_is_kept_and_the_rest_goes_on(rehearse, part):
    _, result = rehearse(**{part: broken})
    name = part.replace("_", " ")
    assert len(result["failed"]) == 2 and all(each.startswith(name) for each in result["failed"])
    assert all(result[each]["error"] == "RuntimeError: no room [4 GiB]" for each in result["failed"])
    assert len(result) == 3 + 2 + 2 + 2 + 1  # versions, rehearsal and failed; three parts twice; training


def test_a_contender_that_breaks_off_leaves_the_times_of_the_others(monkeypatch, capsys):
    x = torch.ones(3, requires_grad=True)
    table = {"broken": (broken, [x]), "dense torch.matmul": (lambda: x * 2, [x])}
    monkeypatch.setattr(gpu, "contenders", lambda *arguments: table)
    times = gpu.speed(gpu.TOY, torch.device("cpu"), torch.float32, repeats=2)
    assert times["broken"] == {"error": "RuntimeError: no room [4 GiB]"}
    assert len(times["dense torch.matmul"]["backward_ms"]) == 2 and "peak_bytes" in times["dense torch.matmul"]
    gpu.print_speed(Console(width=120), gpu.TOY, times)
    assert "failed" in capsys.readouterr().out


def test_losses_without_anything_to_hold_them_against_fail(rehearse):
    """The run on the CPU breaks off: what the others give proves nothing."""

    def training(corpus, device, compiled=False, expected=None):
        return broken() if expected is None else gpu.judged([2.0], expected)

    _, result = rehearse("--corpus", "anywhere", training=training)
    assert result["failed"] == ["training, CPU", "training, eager", "training, compiled"]
    assert "no losses to compare with" in result["training, eager"]["error"]


@pytest.mark.parametrize(
    ("losses", "passed"), [((5.0, 4.03), True), ((5.0, 4.05), False), ((5.0, math.nan), False), ((math.inf, 4), False)]
)
def test_losses_pass_within_a_hundredth_of_the_cpus(losses, passed):
    assert gpu.judged(losses, [5.0, 4.0])["passed"] is passed


def test_every_kernel_that_is_tuned_is_seen_once_in_a_layers_call():
    """What the times of `benchmarks.tune` are taken between."""
    code = """
import torch
from benchmarks.gpu import Layer, inputs
from moe.kernels import grouped_mlp
from moe.kernels.triton.launch import watched
from moe.kernels.triton.tiles import KERNELS
leaves, routing, grad_TD = inputs(Layer("", 8, 16, 16, 2, 1), torch.device("cpu"), torch.float32)
for kernel in KERNELS:
    ticks = iter(range(100))
    with watched(kernel, lambda: next(ticks)) as seen:
        for _ in range(2):
            torch.autograd.grad(grouped_mlp(*leaves[:3], routing, "triton"), leaves, grad_TD)
    assert seen == [(0, 1), (2, 3)], (kernel, seen)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


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


def test_what_is_tuned_holds_for_the_measured_widths_and_loads_only(monkeypatch):
    """The rules go before the target's others, few rows an expert before many."""
    before = find_tiles("sm_90", torch.bfloat16, 2048, 768, 2048)
    found = [with_rows(dict(before.by_kernel), rows) for rows in (64, 128)]
    found[1] |= {"dw2": Tile(64, 64, 64, 4, 3, 1)}
    rules = [rule(layer, condition, best) for (layer, condition), best in zip(LAYERS.items(), found, strict=True)]
    table = json.loads(TABLE.read_text())
    monkeypatch.setattr(tiles, "_table", lambda: table | {"sm_90": rules + table["sm_90"]})
    for rows, best in ((1, found[0]), (64, found[0]), (65, found[1]), (10_000, found[1])):
        assert find_tiles("sm_90", torch.bfloat16, 2048, 768, rows).by_kernel == best
    for width, hidden, dtype in ((2048, 769, torch.bfloat16), (1024, 768, torch.bfloat16), (2048, 768, torch.float32)):
        tuned = find_tiles("sm_90", dtype, width, hidden, 2048)
        monkeypatch.setattr(tiles, "_table", lambda: table)
        assert tuned == find_tiles("sm_90", dtype, width, hidden, 2048)
        monkeypatch.setattr(tiles, "_table", lambda: table | {"sm_90": rules + table["sm_90"]})


@pytest.mark.parametrize("kernel", ["up_dgrad", "dw13"])
def test_a_kernel_without_a_tile_that_can_be_run_stops_the_tuning(kernel):
    present = dict(find_tiles("sm_90", torch.bfloat16, 2048, 768, 2048).by_kernel)
    with pytest.raises(ValueError, match=f"{kernel}.* can be run"):
        best_tiles(present, lambda name, tiles: math.inf if name == kernel else 1.0)


def test_the_tuned_table_is_written_from_the_times_of_sound_tiles(tmp_path, monkeypatch, capsys):
    """The command with a device of the test's: wide tiles are fastest, and those of 256 columns are not sound."""
    timed = []

    def milliseconds(kernel, tiles, layer, repeats):
        timed.append(tiles[kernel])
        return 1 / tiles[kernel].block_n + tiles[kernel].warps / 1e4 + tiles[kernel].parts / 1e5

    def compiled_soundly(layer, target, present):
        return {(k, tile) for k in KERNELS for tile in candidates(k, present) if tile.block_n < 256}

    out = tmp_path / "tiles.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "target_of", lambda device: launch.TARGETS["sm_90"])
    monkeypatch.setattr(tune, "milliseconds", milliseconds)
    monkeypatch.setattr(tune, "compiled_soundly", compiled_soundly)
    monkeypatch.setattr("sys.argv", ["tune", "--out", str(out)])
    tune.main()
    before, after = json.loads(TABLE.read_text()), json.loads(out.read_text())
    assert timed and all(tile.block_n < 256 for tile in timed)
    assert after == before | {"sm_90": after["sm_90"][:2] + before["sm_90"]}
    for entry in after["sm_90"][:2]:
        assert all(tile[1] == 128 and tile[3] == 4 and tile[5] == 1 for tile in entry["tiles"].values())
    assert "best on sm_90" in capsys.readouterr().out
