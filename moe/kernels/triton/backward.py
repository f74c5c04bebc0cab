"""Backward kernels: `down_dgrad` with dSwiGLU behind it, `up_dgrad`, and the weight gradients `dw2` and `dw13`.

Of the forward pass only the inputs and the pre-activation are kept. <dout, y> = <dout W2, a>, so a combine weight's
gradient comes out of `down_dgrad` without the outputs. Nothing is added up by atomics.
"""

# Triton reads annotations as types of its own, so kernels have none but `tl.constexpr`.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from moe.kernels.triton.forward import load_rows, load_weight, row_arguments, row_grid, rows_times, weight_operand
from moe.kernels.triton.launch import Target, describable, launch, precision
from moe.kernels.triton.plan import Plan, part_of, row_index, row_tile
from moe.kernels.triton.tiles import Tile


@triton.jit(do_not_specialize=["row_tiles", "capacity"])
def down_dgrad_kernel(
    dout_ptr,
    w2,
    token_ptr,
    weight_ptr,
    hidden_ptr,
    dhidden_ptr,
    act_ptr,
    partial_ptr,
    tiles_ptr,
    count_ptr,
    offsets_ptr,
    row_tiles,
    capacity,
    D: tl.constexpr,
    F: tl.constexpr,
    GATHER: tl.constexpr,
    UNIFORM: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """dout (T, D), w2 (E, D, F), hidden (A, 2F) -> dhidden (A, 2F), act (A, F), partial (A, column tiles)."""
    COLUMN_TILES: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    if not UNIFORM:
        row_tiles = tl.load(count_ptr)
    for tile in tl.range(tl.program_id(0), row_tiles * COLUMN_TILES, tl.num_programs(0)):
        expert, first, left, column = row_tile(
            tile, row_tiles, tiles_ptr, offsets_ptr, capacity, COLUMN_TILES, BLOCK_M, UNIFORM
        )
        row_M, exists_M = row_index(token_ptr, first, left, BLOCK_M, GATHER)
        dout_M1 = dout_ptr + row_M[:, None] * D
        n = column * BLOCK_N
        dact_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            dout_MK = load_rows(dout_M1, exists_M, k, D, BLOCK_K)
            w2_KN = load_weight(w2, expert, k, n, D, F, BLOCK_K, BLOCK_N, DESCRIPTOR)
            dact_MN = tl.dot(dout_MK, w2_KN, dact_MN, input_precision=PRECISION)
        base = first.to(tl.int64)
        lane_M = tl.arange(0, BLOCK_M)
        hidden = hidden_ptr + base * (2 * F)
        dhidden = dhidden_ptr + base * (2 * F)
        if weight_ptr is not None:
            weight_M = tl.load(weight_ptr + base + lane_M, mask=exists_M, other=0.0).to(tl.float32)
            dweight_M = tl.zeros((BLOCK_M,), tl.float32)
        for part in tl.static_range(PARTS):
            column_N = n + part * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)
            mask = exists_M[:, None] & (column_N < F)[None, :]
            place = lane_M[:, None] * (2 * F) + column_N[None, :]
            gate = tl.load(hidden + place, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(hidden + F + place, mask=mask, other=0.0).to(tl.float32)
            dact = part_of(dact_MN, part, PARTS)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            act = silu * up
            if weight_ptr is not None:
                dweight_M += tl.sum(dact * act, 1)  # beyond F both are 0
                act *= weight_M[:, None]
                dact *= weight_M[:, None]
            place_act = lane_M[:, None] * F + column_N[None, :]
            tl.store(act_ptr + base * F + place_act, act.to(act_ptr.dtype.element_ty), mask=mask)
            dgate = dact * up * (sigmoid + silu * (1 - sigmoid))
            tl.store(dhidden + place, dgate.to(dhidden_ptr.dtype.element_ty), mask=mask)
            tl.store(dhidden + F + place, (dact * silu).to(dhidden_ptr.dtype.element_ty), mask=mask)
        if weight_ptr is not None:
            tl.store(partial_ptr + (base + lane_M) * COLUMN_TILES + column, dweight_M, mask=exists_M)


@triton.jit(do_not_specialize=["num_experts"])
def outer_kernel(
    gathered_ptr,
    rows,
    token_ptr,
    offsets_ptr,
    out_ptr,
    num_experts,
    G: tl.constexpr,
    R: tl.constexpr,
    GATHER: tl.constexpr,
    ROWS_LEFT: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sum over each expert's run of left^T right -> out (E, left width, right width), zeros for an empty run.

    One side is `gathered` (T, G) by token, the other `rows` (A, R) in expert order: the left one if `ROWS_LEFT`.
    """
    M: tl.constexpr = R if ROWS_LEFT else G
    N: tl.constexpr = G if ROWS_LEFT else R
    ROW_TILES: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    BLOCK_G: tl.constexpr = BLOCK_N if ROWS_LEFT else BLOCK_M
    BLOCK_R: tl.constexpr = BLOCK_M if ROWS_LEFT else BLOCK_N
    for tile in tl.range(tl.program_id(0), num_experts * (ROW_TILES * COLUMN_TILES), tl.num_programs(0)):
        expert = tile // (ROW_TILES * COLUMN_TILES)
        m = tile % ROW_TILES * BLOCK_M
        n = tile // ROW_TILES % COLUMN_TILES * BLOCK_N
        start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
        count = tl.load(offsets_ptr + expert) - start
        if ROWS_LEFT:
            r = m
            g = n
        else:
            r = n
            g = m
        acc_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, count, BLOCK_K):
            row_K, exists_K = row_index(token_ptr, start + k, count - k, BLOCK_K, GATHER)
            gathered_KG = load_rows(gathered_ptr + row_K[:, None] * G, exists_K, g, G, BLOCK_G)
            if DESCRIPTOR:
                rows_KR = load_ragged(rows, start, count, [k, r])
            else:
                base = rows + (start + k).to(tl.int64) * R
                rows_KR = load_rows(base + tl.arange(0, BLOCK_K)[:, None] * R, exists_K, r, R, BLOCK_R)
            if ROWS_LEFT:
                acc_MN = tl.dot(rows_KR.T, gathered_KG, acc_MN, input_precision=PRECISION)
            else:
                acc_MN = tl.dot(gathered_KG.T, rows_KR, acc_MN, input_precision=PRECISION)
        row_M = m + tl.arange(0, BLOCK_M)
        out = out_ptr + expert.to(tl.int64) * (M * N)
        for part in tl.static_range(PARTS):
            column_N = n + part * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)
            value = part_of(acc_MN, part, PARTS).to(out_ptr.dtype.element_ty)
            mask = (row_M < M)[:, None] & (column_N < N)[None, :]
            tl.store(out + (row_M[:, None] * N + column_N[None, :]), value, mask=mask)


def down_dgrad(
    dout_TD: Tensor,
    w2_EDF: Tensor,
    hidden_AH: Tensor,
    weight_A: Tensor | None,
    token_A: Tensor | None,
    plan: Plan,
    tile: Tile,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Back through the down projection and SwiGLU.

    Args:
        dout_TD: (T, D) gradient of the combined output; row a reads `token_A[a]`.
        w2_EDF: (E, D, F).
        hidden_AH: what `up_fwd` kept.
        weight_A: combine weights; None means that all are 1.
        token_A: int64, or None when rows are in expert order.
        plan: the row tiles.
        tile: the kernel's shape.
        target: where it runs.

    Returns:
        (dhidden_AH, act_AF: weight * activation, for `dw2`; dweight_A in fp32, None without weights).
    """
    _, width, hidden = w2_EDF.shape
    rows = hidden_AH.shape[0]
    dhidden_AH, act_AF = torch.empty_like(hidden_AH), hidden_AH.new_empty(rows, hidden)
    columns = triton.cdiv(hidden, tile.block_n)
    partial = None if weight_A is None else hidden_AH.new_empty(rows, columns, dtype=torch.float32)
    described = target.descriptors and describable(w2_EDF)
    launch(
        "down_dgrad",
        down_dgrad_kernel,
        row_grid(plan, hidden, tile, target),
        tile.warps,
        tile.stages,
        dout_ptr=dout_TD,
        w2=weight_operand(w2_EDF, (tile.block_k, tile.block_n), described),
        token_ptr=token_A,
        weight_ptr=weight_A,
        hidden_ptr=hidden_AH,
        dhidden_ptr=dhidden_AH,
        act_ptr=act_AF,
        partial_ptr=partial,
        D=width,
        F=hidden,
        GATHER=token_A is not None,
        DESCRIPTOR=described,
        PRECISION=precision(dout_TD.dtype),
        **row_arguments(plan, tile),
    )
    return dhidden_AH, act_AF, None if partial is None else partial.sum(1)


def up_dgrad(dhidden_AH: Tensor, w13_E2FD: Tensor, plan: Plan, tile: Tile, target: Target) -> Tensor:
    """Back through the gate and up projections: (A, 2F), (E, 2, F, D) -> (A, D), not yet summed by token."""
    return rows_times("up_dgrad", dhidden_AH, w13_E2FD.flatten(1, 2), False, plan, tile, target)


def dw2(dout_TD: Tensor, act_AF: Tensor, token_A: Tensor | None, plan: Plan, tile: Tile, target: Target) -> Tensor:
    """(E, D, F) gradient of the down projections: sum over each run of dout^T (weight * activation)."""
    return _outer("dw2", dout_TD, act_AF, False, token_A, plan, tile, target)


def dw13(dhidden_AH: Tensor, x_TD: Tensor, token_A: Tensor | None, plan: Plan, tile: Tile, target: Target) -> Tensor:
    """(E, 2F, D) gradient of the gate and up projections: sum over each run of dhidden^T x."""
    return _outer("dw13", x_TD, dhidden_AH, True, token_A, plan, tile, target)


def _outer(
    name: str,
    gathered_TG: Tensor,
    rows_AR: Tensor,
    rows_left: bool,
    token_A: Tensor | None,
    plan: Plan,
    tile: Tile,
    target: Target,
) -> Tensor:
    num_experts, wide, narrow = plan.offsets_E.shape[0], gathered_TG.shape[1], rows_AR.shape[1]
    height, width = (narrow, wide) if rows_left else (wide, narrow)
    out_EMN = rows_AR.new_empty(num_experts, height, width)
    described = target.descriptors and describable(rows_AR)
    block = [tile.block_k, tile.block_m if rows_left else tile.block_n]
    launch(
        name,
        outer_kernel,
        (min(target.processors, num_experts * triton.cdiv(height, tile.block_m) * triton.cdiv(width, tile.block_n)),),
        tile.warps,
        tile.stages,
        gathered_ptr=gathered_TG,
        # A block at the end of a run reads zeros, not the next run's rows.
        rows=create_ragged_descriptor(rows_AR, block) if described else rows_AR,
        token_ptr=token_A,
        offsets_ptr=plan.offsets_E,
        out_ptr=out_EMN,
        num_experts=num_experts,
        G=wide,
        R=narrow,
        GATHER=token_A is not None,
        ROWS_LEFT=rows_left,
        DESCRIPTOR=described,
        PRECISION=precision(rows_AR.dtype),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PARTS=tile.parts,
    )
    return out_EMN
