"""The Triton kernels' numbers, in Triton's interpreter: every kernel beside a plain float64 loop.

The interpreter runs a kernel's source on NumPy arrays, in exactly the types of the kernel. It shows wrong arithmetic,
masks and indices; it shows nothing about a compiled kernel's speed, its registers or races between its threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe.kernels.triton.launch import TARGETS
from tests.moe.kernels import interpreter_jobs as jobs
from tests.moe.kernels.interpreter_jobs import Case

Interpreter = Callable[..., Any]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
KERNEL_OUTPUTS = {"hidden", "act", "y", "out", "dhidden", "scaled_act", "dweight", "dw2", "dw13", "drows", "dx"}

# Blocks are 32 rows by 32 or 64 columns here. With rows of a multiple of 16 bytes tiles are loaded by descriptors,
# else through pointers: both paths are below, in both types.
CASES = {
    "tiles just full, and one row more or less": Case((0, 1, 7, 127, 128, 129)),
    "first and last expert empty": Case((0, 129, 0, 0, 7, 0), hidden=40),
    "one expert has all tokens": Case((0, 0, 96, 0), tokens=96),
    "one row": Case((0, 1, 0), tokens=3),
    "wider than a block, no multiple of one": Case((7, 0, 33, 1), width=104, hidden=88),
    "odd widths": Case((33, 1, 0, 7), width=37, hidden=19),
    "odd and wider than a block": Case((40, 1, 0, 7), width=67, hidden=71),
    "narrower than a block": Case((5, 0, 8), width=8, hidden=8),
    "expert choice, most tokens taken by nobody": Case((33,) * 4, tokens=200, uniform=True),
    "expert choice, full tiles": Case((32,) * 3, tokens=32, width=72, hidden=40, uniform=True),
    "weights all 1": Case((0, 1, 7, 40), weighted=False),
    "rows in expert order": Case((5, 0, 33, 1), ordered=True),
    "rows in expert order, weights all 1": Case((5, 0, 33, 1), width=37, hidden=19, ordered=True, weighted=False),
    "rows in expert order, equal runs": Case((33,) * 3, ordered=True, uniform=True),
}


DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(case, dtype=dtype), id=f"{name}, {short}")
        for name, case in CASES.items()
        for short, dtype in DTYPES.items()
    ],
)
def test_every_kernel_is_the_loop(interpreter: Interpreter, case: Case) -> None:
    """Every tensor that a kernel writes, forward and backward, into memory that was NaN."""
    errors = interpreter(jobs.errors_of_kernels, case)
    missing = KERNEL_OUTPUTS - errors.keys()
    assert missing == ({"out", "dx"} if case.ordered else set()) | (set() if case.weighted else {"dweight"})
    assert all(error < TOLERANCE[case.dtype] for error in errors.values()), errors


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(counts, dtype=DTYPES[short], width=72, hidden=264 if short == "fp16" else 72, target=target),
            id=f"{target}, {load}, {short}",
            marks=pytest.mark.slow if slow else (),
        )
        for target in TARGETS
        for load, counts, short, slow in (
            ("many tokens", (129, 0, 127), "fp32", False),
            ("few tokens", (7, 0, 40), "fp16", False),
            ("many tokens", (129, 0, 127), "fp16", True),
            ("few tokens", (7, 0, 40), "fp32", True),
        )
    ],
)
def test_the_tiles_of_every_target_are_the_loop(interpreter: Interpreter, case: Case) -> None:
    """What would run on a GPU, in its own tile shapes, with weights by descriptors where it has them."""
    errors = interpreter(jobs.errors_of_kernels, case)
    assert errors.keys() == KERNEL_OUTPUTS
    assert all(error < TOLERANCE[case.dtype] for error in errors.values()), errors


@pytest.mark.parametrize("name", ["wider than a block, no multiple of one", "rows in expert order", "weights all 1"])
def test_the_backend_is_the_loop(interpreter: Interpreter, name: str) -> None:
    """`grouped_mlp(..., "triton")`: the output and the gradients of x, w13, w2 and of the weights if there are any."""
    case = CASES[name]
    errors = interpreter(jobs.errors_of_backend, case)
    assert errors.keys() == {"out", "dx", "dw13", "dw2"} | ({"dweight"} if case.weighted else set())
    assert all(error < 1e-5 for error in errors.values()), errors


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", [Case((0, 0, 0)), Case((0, 0), uniform=True), Case((0, 0, 0), ordered=True)])
def test_empty_experts_give_zeros(interpreter: Interpreter, case: Case, weighted: bool) -> None:
    """Known failure E02. Nobody is routed anywhere: the output is 0 and so is every gradient; none is missing."""
    values = interpreter(jobs.sizes_of_values, replace(case, weighted=weighted))
    assert set(values.values()) == {0.0} and values.keys() >= {"out", "dx", "dw13", "dw2"}


@pytest.mark.parametrize("router", ["token_choice", "expert_choice"])
def test_a_layer_is_the_same_with_the_backend_torch(interpreter: Interpreter, router: str) -> None:
    """`MoEConfig(backend="triton")`, from the tokens to the gradient of the router's weights."""
    errors = interpreter(jobs.errors_of_a_layer, router)
    assert len(errors) >= 5 and all(error < 1e-5 for error in errors.values()), errors


@pytest.mark.parametrize("case", [Case((40, 1, 0, 33)), Case((33,) * 3, tokens=60, width=37, hidden=19, uniform=True)])
def test_repeats_are_bit_equal_whatever_the_number_of_programs(interpreter: Interpreter, case: Case) -> None:
    """Nothing is added up in the order in which programs happen to finish."""
    assert interpreter(jobs.changed_by_programs_and_repeats, case) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    "case",
    [
        Case((9, 33, 35), tokens=90, width=40, hidden=24),
        Case((9, 33, 35), tokens=90, width=37, hidden=19),
        Case((33,) * 3, tokens=100, width=72, hidden=40, uniform=True),
    ],
    ids=["descriptors", "pointers", "expert choice"],
)
def test_an_expert_sees_nothing_of_its_neighbours(interpreter: Interpreter, case: Case, dtype: torch.dtype) -> None:
    """Tiles reach past an expert's rows and past its matrix. With NaN there, the others' results keep every bit."""
    changed, poisoned = interpreter(jobs.changed_by_poison, replace(case, dtype=dtype), 1)
    assert poisoned > 20 and changed == []


def test_more_than_2_to_the_31_elements(interpreter: Interpreter) -> None:
    """Known failure E03. Rows and experts are found by 64-bit addresses: 32 bits would wrap around."""
    errors = interpreter(jobs.errors_far_from_the_start)
    assert errors.keys() == KERNEL_OUTPUTS - {"dx"}
    assert all(error < 1e-5 for error in errors.values()), errors


def test_the_interpreter_is_wrong_about_bfloat16_and_this_file_would_show_it(interpreter: Interpreter) -> None:
    """Known failure E04. Its `tl.dot` multiplies bit patterns as whole numbers (triton-lang/triton#11584): refused.

    If this fails Triton has learned bfloat16: add it to the types above and let the backend take it.
    """
    errors = interpreter(jobs.errors_of_kernels, Case((7, 0, 33, 1), dtype=torch.bfloat16))
    assert all(errors[name] > 1 or errors[name] != errors[name] for name in ("hidden", "y", "dw2", "dw13")), errors
    message = interpreter(jobs.message_of_bf16)
    assert "bfloat16" in message and "float16 or float32" in message and '"torch"' in message


@pytest.mark.parametrize("ordered", [False, True])
def test_a_summed_output_is_backpropagated_like_any_other(interpreter: Interpreter, ordered: bool) -> None:
    """Its gradient is one number seen many times, with strides 0."""
    assert interpreter(jobs.changed_by_an_expanded_gradient, Case((5, 0, 33, 1), ordered=ordered)) == []


def test_a_token_adds_up_its_experts_lowest_first_and_in_fp32(interpreter: Interpreter) -> None:
    """1 + 1e8 - 1e8 is 0 in this order and 1 in the other; 2048 + 1 is 2048 in fp16. Nobody's row is 0."""
    rows_AD = torch.tensor([1.0, 1e8, -1e8]).repeat(70, 1).T.contiguous()
    assert interpreter(jobs.sums_of_rows, rows_AD).tolist() == [[0.0] * 70] * 2
    halves_AD = torch.tensor([2048.0, 1, 1, 1, 1]).half().repeat(70, 1).T.contiguous()
    assert interpreter(jobs.sums_of_rows, halves_AD).tolist() == [[2052.0] * 70, [0.0] * 70]


@pytest.mark.parametrize("spare", [1, 40])
def test_rows_behind_the_last_expert_may_hold_anything(interpreter: Interpreter, spare: int) -> None:
    """Known failure E01: NaN there, in the gradient too, comes out as 0 and reaches nobody."""
    found = interpreter(jobs.sizes_behind_the_last_expert, spare)
    assert found.pop("behind") == 0
    assert found.keys() == {"out", "dx", "dw13", "dw2", "dweight"}
    assert all(error < 1e-5 for error in found.values()), found


@pytest.mark.parametrize(("rows", "width", "hidden"), [(r, 8, 24) for r in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65)]
                         + [(13, 8, 130), (13, 100, 24), (13, 128, 96), (13, 136, 24)])  # fmt: skip
def test_any_size(interpreter: Interpreter, rows: int, width: int, hidden: int) -> None:
    """Known failure E08; blocks are of 32 here."""
    errors = interpreter(jobs.errors_of_backend, Case((rows, 0, 3), width=width, hidden=hidden))
    assert all(error < 1e-5 for error in errors.values()), errors
