"""Backward kernels: through the down projection and SwiGLU, and the experts' weight gradients.

The gradient of the rows is `rows_times` of `forward.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe.kernels.triton.plan import offset, rows_of_tile, weight_block


@triton.jit(do_not_specialize=["capacity", "tiles"])
def down_dgrad(
    dout, token_A, w2, h_AH, weight_A, dh_AH, sa_AF, dweight_AN, offsets_E, expert_M, row_M, capacity, tiles,
    D: tl.constexpr, F: tl.constexpr, EQUAL: tl.constexpr, GATHER: tl.constexpr, WEIGHTED: tl.constexpr,
    TMA: tl.constexpr, SUBTILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """da = dout W2, and all that follows from it row by row.

    Writes dh, the gradient of gate and up; sa = weight * a, which W2's gradient needs; and for each tile of columns
    its part of <da, a>, the gradient of the weight, to be added up in a fixed order.
    """
    row_tiles: tl.constexpr = (F + BN - 1) // BN
    for index in tl.range(tl.program_id(0), tiles * row_tiles, tl.num_programs(0)):
        expert, row, end = rows_of_tile(index // row_tiles, offsets_E, expert_M, row_M, capacity, EQUAL, BM)
        if expert >= 0:
            tile = index % row_tiles
            r = tl.arange(0, BM)
            k = tl.arange(0, BK)
            here = r < end - row
            source = tl.load(token_A + row + r, mask=here, other=0) if GATHER else row + r
            pointer = dout + offset(source[:, None], D) + k[None, :]
            da = tl.zeros((BM, BN), tl.float32)
            for start in range(0, D, BK):
                block = tl.load(pointer + start, mask=here[:, None] & (start + k[None, :] < D), other=0.0)
                weight = weight_block(w2, expert, start, tile * BN, D, F, TMA, BK, BN)
                da = tl.dot(block, weight, da, input_precision="ieee")
            if WEIGHTED:
                scale = tl.load(weight_A + row + r, mask=here, other=0.0).to(tl.float32)
            else:
                scale = tl.full((BM,), 1.0, tl.float32)
            h, dh, sa = h_AH + offset(row, 2 * F), dh_AH + offset(row, 2 * F), sa_AF + offset(row, F)
            if SUBTILES == 1:
                part = through_swiglu(da, scale, h, dh, sa, r, tile * BN + tl.arange(0, BN), here, F)
            else:
                left, right = tl.split(tl.permute(tl.reshape(da, (BM, 2, BN // 2)), (0, 2, 1)))
                half = tile * BN + tl.arange(0, BN // 2)
                part = through_swiglu(left, scale, h, dh, sa, r, half, here, F)
                part += through_swiglu(right, scale, h, dh, sa, r, half + BN // 2, here, F)
            if WEIGHTED:
                tl.store(dweight_AN + offset(row + r, row_tiles) + tile, part, mask=here)


@triton.jit
def through_swiglu(da, scale, h, dh, sa, r, c, here, F: tl.constexpr):
    """The row-by-row part for some columns; returns their part of <da, a>."""
    mask = here[:, None] & (c[None, :] < F)
    place = r[:, None] * (2 * F) + c[None, :]
    gate = tl.load(h + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h + F + place, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    act = silu * up
    part = tl.sum(da * act, 1)
    tl.store(sa + (r[:, None] * F + c[None, :]), (act * scale[:, None]).to(sa.dtype.element_ty), mask=mask)
    scaled = da * scale[:, None]
    # d silu(g) / dg = sigmoid(g) * (1 + g * (1 - sigmoid(g)))
    dgate = scaled * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(dh + place, dgate.to(dh.dtype.element_ty), mask=mask)
    tl.store(dh + F + place, (scaled * silu).to(dh.dtype.element_ty), mask=mask)
    return part


@triton.jit(do_not_specialize=["experts"])
def outer(
    left, right, token_A, offsets_E, dw_EXY, experts,
    X: tl.constexpr, Y: tl.constexpr, GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sum over each expert's rows of left (X) times right (Y): dw2 and dw13. Zeros for an expert without rows.

    Both sides are masked: what lies behind an expert's rows is another's, or nobody's and never written.
    """
    x_tiles: tl.constexpr = (X + BM - 1) // BM
    y_tiles: tl.constexpr = (Y + BN - 1) // BN
    for index in tl.range(tl.program_id(0), experts * x_tiles * y_tiles, tl.num_programs(0)):
        expert = index // (x_tiles * y_tiles)
        c = (index // y_tiles % x_tiles) * BM + tl.arange(0, BM)
        d = (index % y_tiles) * BN + tl.arange(0, BN)
        first = tl.load(offsets_E + expert - 1, mask=expert > 0, other=0)
        last = tl.load(offsets_E + expert)
        k = tl.arange(0, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        for row in range(first, last, BK):
            here = k < last - row
            base = tl.cast(row, tl.int64) + k
            if GATHER_LEFT or GATHER_RIGHT:
                token = tl.load(token_A + base, mask=here, other=0).to(tl.int64)
                left_row = token if GATHER_LEFT else base
                right_row = token if GATHER_RIGHT else base
            else:
                left_row = base
                right_row = base
            l_mask = here[:, None] & (c[None, :] < X)
            l_block = tl.load(left + offset(left_row[:, None], X) + c[None, :], mask=l_mask, other=0.0)
            r_mask = here[:, None] & (d[None, :] < Y)
            r_block = tl.load(right + offset(right_row[:, None], Y) + d[None, :], mask=r_mask, other=0.0)
            acc = tl.dot(l_block.T, r_block, acc, input_precision="ieee")
        out = dw_EXY + offset(expert, X * Y)
        mask = (c[:, None] < X) & (d[None, :] < Y)
        tl.store(out + (c[:, None] * Y + d[None, :]), acc.to(dw_EXY.dtype.element_ty), mask=mask)
