"""The Triton kernels compiled for GPUs that are not there: no spills, the right instructions, within their budget.

`budgets.json` says what every kernel needs; `python -m tests.moe.kernels.budgets` writes it anew.
"""

from __future__ import annotations

import pytest
import triton

from moe.kernels.tile import tiles_for
from moe.kernels.triton.ahead_of_time import EVERY_KERNEL, Resources, compile_kernel, measure, problems
from tests.moe.kernels.budgets import TARGETS, budgets


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_a_kernel_is_without_spills_on_its_units_and_within_its_budget(kernel: str, target: str) -> None:
    """Worse numbers fail; better ones too, so that the table is brought up to date and they are not lost again."""
    assert problems(compile_kernel(kernel, target), target, kernel) == []
    if not (table := budgets()):
        pytest.skip(f"no spills and the right instructions; the budgets are not those of triton {triton.__version__}")
    found, allowed = measure(kernel, target), table[target][kernel]
    assert found["registers"] <= allowed["registers"] and found["shared_bytes"] <= allowed["shared_bytes"], found
    assert found.get("blocks", 0) >= allowed.get("blocks", 0), found
    assert found == allowed, f"better than the table: run python -m tests.moe.kernels.budgets ({found})"


@pytest.mark.parametrize("kernel", ["up_fwd", "down_fwd", "up_dgrad"])
def test_tiles_for_few_rows_are_as_clean(kernel: str) -> None:
    assert tiles_for("sm_90", 64)[kernel] != tiles_for("sm_90", 4096)[kernel]
    assert problems(compile_kernel(kernel, "sm_90", rows=64), "sm_90", kernel) == []


@pytest.mark.parametrize("dims", [(4096, 14336), (2880, 2880), (512, 256)], ids=str)
@pytest.mark.parametrize("kernel", ["up_fwd", "down_fwd", "down_dgrad", "up_dgrad", "dw2", "dw13"])
@pytest.mark.slow
def test_other_models_widths_are_as_clean(kernel: str, dims: tuple[int, int]) -> None:
    """Mixtral 8x7B, gpt-oss (no multiple of the tiles), and a small one; widths are compile-time constants."""
    assert problems(compile_kernel(kernel, "sm_90", *dims), "sm_90", kernel) == []


@pytest.mark.parametrize(
    ("kernel", "changes", "found"),
    [
        ("down_fwd", {"warps": 4}, "spills"),  # 128 x 256 sums in the registers of four warps
        ("up_fwd", {"BM": 32, "warps": 4}, "no HGMMA"),  # wgmma wants 64 rows
        ("down_dgrad", {"BN": 128, "subtiles": 1}, "spills"),  # the whole epilogue at once
        ("down_fwd", {"stages": 6}, "shared memory"),
    ],
)
def test_a_worse_tile_is_noticed(kernel: str, changes: dict[str, int], found: str) -> None:
    said = problems(compile_kernel(kernel, "sm_90", **changes), "sm_90", kernel)
    assert any(found in line for line in said), said


def test_each_kind_of_problem_is_named() -> None:
    good = Resources(100, 0, 1000, 8, {"HGMMA": 4, "UTMALDG": 2})
    assert problems(good, "sm_90", "up_fwd") == []
    assert problems(Resources(100, 8, 1000, 8, good.instructions), "sm_90", "up_fwd") == ["spills 8 bytes"]
    assert problems(Resources(100, 0, 1000, 8, {"HGMMA": 4}), "sm_90", "up_fwd") == ["no UTMALDG"]
    serialized = Resources(100, 0, 1000, 8, good.instructions, ("ptxas: wgmma serialized",))
    assert problems(serialized, "sm_90", "up_fwd") == ["ptxas: wgmma serialized"]


def test_occupancy_follows_from_registers_shared_memory_and_threads() -> None:
    """Hand calculation: 65536 / (168 x 32 x 8 = 43008) = 1; 64 registers and 100 KB: 2; nothing: 2048 / 256 = 8."""
    assert Resources(168, 0, 0, 8, {}).blocks("sm_90") == 1
    assert Resources(64, 0, 100_000, 8, {}).blocks("sm_90") == 2
    assert Resources(16, 0, 0, 8, {}).blocks("sm_90") == 8
