"""The Triton kernels' machine code, compiled for four kinds of GPU on none: no spill, no lost instruction.

A kernel that spills, or whose products fall back to an older instruction, computes the right numbers several times
too slowly. `moe/kernels/triton/golden.json` has what each takes; `python -m moe.kernels.triton.ahead_of_time --write`
renews it, for a change that is meant.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from moe.kernels.triton import ahead_of_time as aot
from moe.kernels.triton.launch import TARGETS, Launch
from moe.kernels.triton.tiles import ROW_KERNELS, Tiles, find_tiles

NAMES = ["up_fwd", "down_fwd", "combine", "down_dgrad", "up_dgrad", "dw2", "dw13"]
GOLDEN: dict[str, Any] = json.loads(aot.GOLDEN.read_text())


def mutated(name: str, target: str, **changes: int) -> Launch:
    """A kernel with a tile that the table does not have."""
    tiles = dict(find_tiles(TARGETS[target], torch.bfloat16, aot.D, aot.F, 2048).by_kernel)
    if "block_m" in changes:  # one for all row kernels
        tiles |= {row: replace(tiles[row], block_m=changes["block_m"]) for row in ROW_KERNELS}
    tiles[name] = replace(tiles[name], **changes)
    return aot.launches(target, Tiles.of(tiles))[name]


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str, str], aot.Resources]]:
    """What the tests below ask for, compiled and read by two processes from the start."""
    tests = [item for item in request.session.items if "measured" in getattr(item, "fixturenames", ())]
    wanted = [tuple(item.callspec.params[key] for key in ("target", "load", "name")) for item in tests]
    pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
    jobs = {key: pool.submit(aot.measure_at, *key) for key in wanted}
    yield lambda *key: jobs[key].result()
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("load", aot.LOADS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_spills_or_takes_more_than_it_did(
    measured: Callable[[str, str, str], aot.Resources], target: str, load: str, name: str
) -> None:
    """Tiles of the table at the shape of Qwen3-30B-A3B, in bf16, for every target and load."""
    found = measured(target, load, name)
    assert aot.faults(name, found, target) == []
    worse, better = aot.compare(found, GOLDEN["targets"][target][load][name])
    renew = (
        f"golden.json is of triton {GOLDEN['triton']}, this is {triton.__version__}; the head of this file renews it"
    )
    assert not worse, f"worse: {'; '.join(worse)}. If it is meant: {renew}"
    assert not better, f"better: {'; '.join(better)}. To keep it: {renew}"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "combine"])
def test_widths_that_are_no_multiple_of_a_block_do_not_spill(name: str) -> None:
    """Masks of the last column tile cost registers: GPT-OSS has D = F = 2,880."""
    found = aot.measure(aot.launches("sm_90", width=2880, hidden=2880)[name], "sm_90")
    assert aot.faults(name, found, "sm_90") == []


@pytest.mark.parametrize("uniform", [False, True])
def test_one_token_and_one_expert_compile(uniform: bool) -> None:
    """Triton makes a constant of every whole number that is 1."""
    launches = aot.launches("sm_90", width=64, hidden=64, uniform=uniform, tokens=1, experts=1, per_token=1)
    assert [launch.arguments.get("row_tiles", 1) for launch in launches.values()] == [1] * len(NAMES)
    assert all(aot.compiled(launch, "sm_90").asm["cubin"] for launch in launches.values())


@pytest.mark.parametrize("allowed", ["highest", "high"])
def test_fp32_does_not_spill(allowed: str) -> None:
    """For comparisons, not for speed: exact products have no tensor core to use. TF32 has, where PyTorch may use it."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(allowed)
        for name, launch in aot.launches("sm_90", dtype=torch.float32).items():
            found = aot.measure(launch, "sm_90")
            assert found.spilled == 0 and found.shared < aot.SHARED_LIMIT["sm_90"], name
            assert name == "combine" or bool(found.instructions.keys() & {"HGMMA", "HMMA"}) == (allowed == "high"), name
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("name", "changes", "fault"),
    [
        ("up_fwd", {"warps": 4}, "spills"),
        ("down_fwd", {"warps": 4}, "C7511"),  # ptxas: wgmma instructions are serialised
        ("dw2", {"warps": 4}, "spills"),
        ("down_dgrad", {"parts": 1}, "spills"),
        ("down_fwd", {"block_m": 32}, "no HGMMA"),
        ("up_fwd", {"stages": 6}, "shared memory"),
    ],
)
def test_what_would_be_slow_is_found(name: str, changes: dict[str, int], fault: str) -> None:
    """Each of these computes the same numbers, on sm_90."""
    found = aot.measure(mutated(name, "sm_90", **changes), "sm_90")
    assert any(fault in wrong for wrong in aot.faults(name, found, "sm_90")), found


def test_weights_through_pointers_are_found() -> None:
    """A kernel that has lost its descriptors has lost UTMALDG."""
    launch = aot.launches("sm_90", width=2044)["up_fwd"]  # rows of a multiple of 8 bytes, not of 16
    assert aot.faults("up_fwd", aot.measure(launch, "sm_90"), "sm_90") == ["no UTMALDG"]


def test_a_worse_and_a_better_number_are_told_apart() -> None:
    """More registers or bytes are worse, more blocks at a time are better."""
    golden = {"registers": 100, "shared": 1000, "blocks": 2}
    found = aot.Resources(100, 1000, 0, 2, {}, ())
    assert aot.compare(found, golden) == ([], [])
    assert aot.compare(replace(found, registers=101, blocks=3), golden) == (
        ["registers: 100 -> 101"],
        ["blocks: 2 -> 3"],
    )
    assert aot.compare(replace(found, shared=999, blocks=1), golden) == (["blocks: 2 -> 1"], ["shared: 1000 -> 999"])


def test_a_layer_launches_what_it_is_said_to() -> None:
    """In this order; nothing is computed, and nothing waits for a number of the device."""
    noted = list(aot.launches("sm_90"))
    assert noted == ["up_fwd", "down_fwd", "combine", "down_dgrad", "dw2", "dw13", "up_dgrad"]


@pytest.mark.parametrize("target", TARGETS)
def test_no_more_programs_than_multiprocessors(target: str) -> None:
    """Kernels with products are persistent: each program works through many tiles."""
    for name, launch in aot.launches(target).items():
        assert name == "combine" or launch.grid == (TARGETS[target].processors,)


def test_a_new_token_count_compiles_nothing_new() -> None:
    """Known failure E05: over 50 token counts a kernel has one variant for ragged groups and one for equal ones."""
    variants: dict[str, set[str]] = {}
    for tokens in range(1, 51):
        for uniform in (False, True):
            launches = aot.launches("sm_90", None, 64, 64, uniform, 3 * tokens, 3, 1)
            for name, launch in launches.items():
                compile_time = []
                for parameter in launch.kernel.params:
                    value = launch.arguments[parameter.name]
                    if parameter.is_constexpr or value is None:
                        compile_time.append(value)
                    elif isinstance(value, int) and not parameter.do_not_specialize:
                        compile_time.append((value == 1, value % 16 == 0))
                variants.setdefault(name, set()).add(repr(compile_time))
    assert sorted(variants) == sorted(NAMES)
    assert max(len(found) for found in variants.values()) <= 2


@pytest.mark.parametrize("name", ["up_fwd", "down_dgrad", "dw2"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_launch_finds_what_was_compiled_ahead_of_time(
    monkeypatch: pytest.MonkeyPatch, target: str, name: str
) -> None:
    """The same entry of Triton's cache: what is measured is what runs, and tuning compiles each candidate once."""
    entries: list[str] = []

    def noted(key: str) -> Any:
        entries.append(key)
        return get_cache_manager(key)

    get_cache_manager = triton.compiler.compiler.get_cache_manager
    monkeypatch.setattr(triton.compiler.compiler, "get_cache_manager", noted)
    device = SimpleNamespace(
        get_current_device=lambda: 1000,  # a number that no device of this machine has
        get_current_stream=lambda device: 0,
        get_current_target=lambda: aot.GPU_TARGETS[target],
    )
    launch = aot.launches(target)[name]
    aot.compiled(launch, target)
    monkeypatch.setattr(triton.runtime.driver, "_active", device)
    try:
        launch.kernel.run(
            grid=launch.grid, warmup=True, num_warps=launch.warps, num_stages=launch.stages, **launch.arguments
        )
    finally:
        launch.kernel.device_caches.pop(1000, None)
    assert len(entries) == 2 and entries[0] == entries[1]
