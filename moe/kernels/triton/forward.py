"""Forward kernels: gate, up and SwiGLU in one; the down projection; the sum over each token's experts."""

from __future__ import annotations

import triton
import triton.language as tl

from moe.kernels.triton.plan import offset, rows_of_tile, weight_block


@triton.jit(do_not_specialize=["capacity", "tiles"])
def up_fwd(
    x, token_A, w13, h_AH, a_AF, offsets_E, expert_M, row_M, capacity, tiles,
    D: tl.constexpr, F: tl.constexpr, EQUAL: tl.constexpr, GATHER: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """h = x W13^T of the rows' experts and a = silu(gate) * up, rows gathered by token while loading."""
    row_tiles: tl.constexpr = (F + BN - 1) // BN
    for index in tl.range(tl.program_id(0), tiles * row_tiles, tl.num_programs(0)):
        expert, row, end = rows_of_tile(index // row_tiles, offsets_E, expert_M, row_M, capacity, EQUAL, BM)
        if expert >= 0:
            column = (index % row_tiles) * BN
            r = tl.arange(0, BM)
            k = tl.arange(0, BK)
            here = r < end - row
            source = tl.load(token_A + row + r, mask=here, other=0) if GATHER else row + r
            pointer = x + offset(source[:, None], D) + k[None, :]
            gate = tl.zeros((BM, BN), tl.float32)
            up = tl.zeros((BM, BN), tl.float32)
            for start in range(0, D, BK):
                block = tl.load(pointer + start, mask=here[:, None] & (start + k[None, :] < D), other=0.0)
                gate_w = weight_block(w13, expert, column, start, 2 * F, D, TMA, BN, BK)
                gate = tl.dot(block, gate_w.T, gate, input_precision="ieee")
                up_w = weight_block(w13, expert, F + column, start, 2 * F, D, TMA, BN, BK)
                up = tl.dot(block, up_w.T, up, input_precision="ieee")
            c = column + tl.arange(0, BN)
            mask = here[:, None] & (c[None, :] < F)
            place = r[:, None] * (2 * F) + c[None, :]
            h = h_AH + offset(row, 2 * F)
            tl.store(h + place, gate.to(h_AH.dtype.element_ty), mask=mask)
            tl.store(h + F + place, up.to(h_AH.dtype.element_ty), mask=mask)
            act = gate * tl.sigmoid(gate) * up
            a = a_AF + offset(row, F)
            tl.store(a + (r[:, None] * F + c[None, :]), act.to(a_AF.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["capacity", "tiles"])
def rows_times(
    rows_AX, w, out_AY, offsets_E, expert_M, row_M, capacity, tiles,
    X: tl.constexpr, Y: tl.constexpr, TRANSPOSED: tl.constexpr, EQUAL: tl.constexpr, TMA: tl.constexpr,
    SUBTILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Each row times its expert's (X, Y) matrix, or (Y, X) TRANSPOSED: down_fwd, and up_dgrad."""
    row_tiles: tl.constexpr = (Y + BN - 1) // BN
    for index in tl.range(tl.program_id(0), tiles * row_tiles, tl.num_programs(0)):
        expert, row, end = rows_of_tile(index // row_tiles, offsets_E, expert_M, row_M, capacity, EQUAL, BM)
        if expert >= 0:
            column = (index % row_tiles) * BN
            r = tl.arange(0, BM)
            k = tl.arange(0, BK)
            here = r < end - row
            if not TMA:
                pointer = rows_AX + offset(row, X) + (r[:, None] * X + k[None, :])
            acc = tl.zeros((BM, BN), tl.float32)
            for start in range(0, X, BK):
                if TMA:  # rows of the next expert come along, and are not stored
                    block = rows_AX.load([row, start])
                else:
                    block = tl.load(pointer + start, mask=here[:, None] & (start + k[None, :] < X), other=0.0)
                if TRANSPOSED:
                    weight = weight_block(w, expert, column, start, Y, X, TMA, BN, BK).T
                else:
                    weight = weight_block(w, expert, start, column, X, Y, TMA, BK, BN)
                acc = tl.dot(block, weight, acc, input_precision="ieee")
            out = out_AY + offset(row, Y)
            # Halves of the tile one after the other need half the registers for what they become.
            if SUBTILES == 1:
                store_rows(out, acc, r, column + tl.arange(0, BN), here, Y)
            else:
                left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
                store_rows(out, left, r, column + tl.arange(0, BN // 2), here, Y)
                store_rows(out, right, r, column + BN // 2 + tl.arange(0, BN // 2), here, Y)


@triton.jit
def store_rows(out, values, r, c, here, Y: tl.constexpr):
    """Store a tile, but for rows of other experts and columns that do not exist."""
    mask = here[:, None] & (c[None, :] < Y)
    tl.store(out + (r[:, None] * Y + c[None, :]), values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "assignments"])
def combine(
    rows_AD, weight_A, order_A, start_T, out_TD, tokens, assignments,
    D: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of each token's (weighted) rows in the order of `order_A`, zeros where it has none; no atomics."""
    t = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(start_T + t)
    last = tl.load(start_T + t + 1, mask=t + 1 < tokens, other=assignments)
    acc = tl.zeros((BLOCK,), tl.float32)
    for index in range(first, last):
        a = tl.load(order_A + index)
        row = tl.load(rows_AD + offset(a, D) + c, mask=c < D, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weight_A + a).to(tl.float32)
        acc += row
    tl.store(out_TD + offset(t, D) + c, acc.to(out_TD.dtype.element_ty), mask=c < D)
