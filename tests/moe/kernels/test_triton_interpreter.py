"""The Triton kernels against a plain loop in fp64, run by Triton's interpreter in a process of its own.

The interpreter is chosen when Triton is imported, and the rest of the tests want the compiler.
"""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import triton

from moe.kernels.triton import backend, backward, forward, plan
from moe.routing import Routing
from tests.moe.kernels.interpreter_jobs import Case, dot_errors, errors, offsets, refusal, start, variants

LIMIT = {"float32": 1e-5, "float16": 2e-3}
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Run]:
    """Runs a function where kernels are interpreted."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=start) as pool:
        pool.submit(start).result(timeout=60)  # the process exists, and has the switch
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
        yield lambda function, *args: pool.submit(function, *args).result(timeout=90)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "case",
    [
        Case((7, 0, 129, 1, 127)),
        Case((128, 0, 0, 1), tokens=70),
        Case((7, 0, 33, 1), weighted=False),
        Case((0, 65, 0, 1, 0), tokens=0),
        Case((5, 0, 31), tokens=0, weighted=False),
        Case((33, 33, 33), equal=True),
        Case((16, 16), equal=True, tokens=60),  # most tokens are taken by nobody
        Case((1,), tokens=3),
        Case((11,), tokens=0, equal=True),
        Case((12, 0, 5), width=37, expert_width=21),  # no descriptor has such rows
        Case((12, 0, 5), width=48, expert_width=66),
        Case((40, 40), width=100, expert_width=33, equal=True, tokens=0),
    ],
    ids=lambda case: f"{case.sizes}, {case.width}x{case.expert_width}{', equal' * case.equal}",
)
def test_output_and_gradients_are_the_loops(interpreter, case: Case, dtype: str) -> None:
    """Memory is poisoned, and a second run must give the same bits."""
    found = interpreter(errors, Case(**{**vars(case), "dtype": dtype}))
    assert set(found) >= {"out", "dx", "dw13", "dw2"}
    assert all(error <= LIMIT[dtype] for error in found.values()), found


@pytest.mark.parametrize("where", ["all in the first", "all in the last", "nowhere", "nowhere, in order", "in few"])
def test_empty_experts_have_gradients_of_zero(interpreter, where: str) -> None:
    """Known failure E02."""
    case = {
        "all in the first": Case((11, 0, 0, 0, 0, 0), 16, 32),
        "all in the last": Case((0, 0, 0, 0, 0, 11), 16, 32),
        "nowhere": Case((0, 0, 0, 0, 0, 0), 16, 32),
        "nowhere, in order": Case((0, 0, 0), 16, 32, tokens=0),
        "in few": Case((3, 0, 5, 1, 0, 2), 16, 32),
    }[where]
    found = interpreter(errors, case)
    assert all(error <= LIMIT["float32"] for error in found.values()), found  # against 0: absolute


@pytest.mark.parametrize("equal", [False, True])
def test_rows_behind_the_last_expert_may_hold_anything(interpreter, equal: bool) -> None:
    """Known failure E01: 6 used rows of 8, NaN in the others, in the gradient too; zeros come out there."""
    found = interpreter(errors, Case((2, 2, 2) if equal else (1, 0, 5), tokens=0, spare=2, equal=equal, weighted=False))
    assert all(error <= LIMIT["float32"] for error in found.values()), found


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_any_number_of_rows(interpreter, rows: int) -> None:
    """Known failure E08; the tiles here are of 32."""
    found = interpreter(errors, Case((rows, 3), 8, 24, tokens=rows + 5, seed=rows))
    assert all(error <= LIMIT["float32"] for error in found.values()), found


@pytest.mark.parametrize(("width", "expert_width"), [(8, 130), (100, 24), (128, 96), (136, 24)])
def test_any_width(interpreter, width: int, expert_width: int) -> None:
    """Known failure E08."""
    found = interpreter(errors, Case((9, 0, 4), width, expert_width))
    assert all(error <= LIMIT["float32"] for error in found.values()), found


def test_the_interpreters_bf16_products_are_wrong_and_this_suite_would_see_it(interpreter) -> None:
    """Known failure E04: why bf16 is left to the compiler's tests. Once Triton has mended it, test bf16 here too."""
    found = interpreter(dot_errors)
    assert found["float32"] == found["float16"] == 0
    assert found["bfloat16"] > 1, f"triton {triton.__version__} multiplies bf16 in its interpreter: add it to LIMIT"


def test_a_new_token_count_compiles_nothing_new(interpreter) -> None:
    """Known failure E05: 50 counts, ragged and equal groups; counts are no constants and are not specialised."""
    found = interpreter(variants, list(range(1, 51)))
    assert set(found) == {"up_fwd", "rows_times", "combine", "down_dgrad", "outer", "plan_tiles"}
    assert max(found.values()) <= 4, found
    assert interpreter(variants, [3, 17, 50]) == found
    for kernel in (forward.up_fwd, forward.rows_times, forward.combine, backward.down_dgrad, backward.outer,
                   plan.plan_tiles):  # fmt: skip
        counts = [p for p in kernel.params if p.name in ("capacity", "tiles", "tokens", "assignments", "experts")]
        assert counts and all(p.do_not_specialize for p in counts)


def test_offsets_are_64_bit_numbers(interpreter) -> None:
    """Known failure E03, its numbers: expert 8 of 16384 x 16384, and row 1079839 of 2048, pass 2^31."""
    cases = [(8, 16384 * 16384), (1079839, 2048), (0, 5)]
    assert interpreter(offsets, cases) == [2147483648, 2211510272, 0]


@pytest.mark.parametrize("module", [forward, backward, plan], ids=lambda m: m.__name__.rpartition(".")[2])
def test_what_counts_rows_or_experts_is_multiplied_by_a_stride_in_64_bits(module) -> None:
    """Known failure E03 in the source: outside `offset`, a stride meets only what counts within a tile."""
    strides = {"D", "F", "X", "Y", "ROWS", "COLUMNS"}
    within_a_tile = {"r", "c", "d", "k"}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            names = [{n.id for n in ast.walk(side) if isinstance(n, ast.Name)} for side in (node.left, node.right)]
            if any(strides & side for side in names):
                others = (names[0] | names[1]) - strides
                assert others <= within_a_tile, ast.unparse(node)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("fp64", r'fp16, bf16 or fp32, not torch.float64: moe.backend = "torch" takes it'),
        ("mixed", r"w13 is torch.float16 and x torch.float32: all must have one dtype"),
        ("strided", r'x has strides .* wants it contiguous; moe.backend = "torch" takes it'),
        ("huge", r'2147549184 elements .* at most 2147483647; moe.backend = "torch" takes it'),
    ],
)
def test_bad_inputs_are_refused_before_a_kernel_starts(interpreter, what: str, message: str) -> None:
    assert re.search(message, interpreter(refusal, what))


def test_without_a_gpu_and_the_interpreter_the_backend_says_so() -> None:
    assert not backend.is_interpreted()
    x, w13, w2 = torch.zeros(2, 8), torch.zeros(1, 2, 8, 8), torch.zeros(1, 8, 8)
    routing = Routing(None, torch.tensor([2], dtype=torch.int32), None, 2)
    with pytest.raises(ValueError, match=r'needs a GPU, x is on cpu: set moe.backend = "torch"'):
        backend.grouped_mlp_triton(x, w13, w2, routing)
