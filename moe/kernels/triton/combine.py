"""From rows of assignments back to tokens: a gather and a sum, so that nothing depends on which program was first."""

# Triton reads annotations as types of its own, so kernels have none but `tl.constexpr`.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.triton.launch import launch

WARPS = 4
BLOCK_D = 2048  # widest piece of a row: 16 values of each thread


@triton.jit(do_not_specialize=["num_tokens", "rows"])
def combine_kernel(
    rows_ptr, weight_ptr, order_ptr, start_ptr, out_ptr, num_tokens, rows, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """out (T, D): for each token, the sum of its rows in stored order; zeros where it has none."""
    token = tl.program_id(0)
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = column_D < D
    first = tl.load(start_ptr + token)
    last = tl.load(start_ptr + token + 1, mask=token + 1 < num_tokens, other=rows)
    acc_D = tl.zeros((BLOCK_D,), tl.float32)
    for place in tl.range(first, last):
        row = tl.load(order_ptr + place).to(tl.int64)
        value_D = tl.load(rows_ptr + row * D + column_D, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            value_D *= tl.load(weight_ptr + row).to(tl.float32)
        acc_D += value_D
    tl.store(out_ptr + token.to(tl.int64) * D + column_D, acc_D.to(out_ptr.dtype.element_ty), mask=mask)


def combine(rows_AD: Tensor, weight_A: Tensor | None, order_A: Tensor, start_T: Tensor) -> Tensor:
    """The (weighted) sum of each token's rows.

    Args:
        rows_AD: (A, D), a row of each assignment.
        weight_A: None means that all are 1.
        order_A: int64 assignments sorted by token, and within a token in the order of the sum.
        start_T: int64, where each token's assignments start in that order.

    Returns:
        (T, D); zeros for a token without assignments.
    """
    (rows, width), num_tokens = rows_AD.shape, start_T.shape[0]
    out_TD = rows_AD.new_empty(num_tokens, width)
    block = min(BLOCK_D, triton.next_power_of_2(width))
    launch(
        "combine",
        combine_kernel,
        (num_tokens, triton.cdiv(width, block)),
        WARPS,
        1,
        rows_ptr=rows_AD,
        weight_ptr=weight_A,
        order_ptr=order_A,
        start_ptr=start_T,
        out_ptr=out_TD,
        num_tokens=num_tokens,
        rows=rows,
        D=width,
        BLOCK_D=block,
    )
    return out_TD
