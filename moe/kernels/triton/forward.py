"""Forward kernels: `up_fwd`, with the gather before and SwiGLU behind it, and `down_fwd`.

Both are persistent: as many programs as multiprocessors, each looping over tiles. Products accumulate in fp32. Widths
are compile-time constants, and 64-bit arithmetic is kept to where a row or an expert starts, because within a tile it
costs registers.
"""

# Triton reads annotations as types of its own, so kernels have none but `tl.constexpr`.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe.kernels.triton.launch import Target, describable, launch, precision
from moe.kernels.triton.plan import Plan, part_of, row_index, row_tile
from moe.kernels.triton.tiles import Tile


@triton.jit
def load_rows(start_M1, exists_M, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """(M, BLOCK_K) of rows that start at pointers `start_M1`: columns k onwards, 0 beyond the last row or column."""
    column_K = k + tl.arange(0, BLOCK_K)
    mask = exists_M[:, None]
    if K % BLOCK_K:
        mask = mask & (column_K < K)[None, :]
    return tl.load(start_M1 + column_K[None, :], mask=mask, other=0.0)


@triton.jit
def load_weight(
    weight,
    expert,
    row,
    column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """(BLOCK_R, BLOCK_C) of an expert's (ROWS, COLUMNS) matrix, 0 beyond its edges: `weight` describes or points."""
    if DESCRIPTOR:
        block = tl.reshape(weight.load([expert, row, column]), (BLOCK_R, BLOCK_C))
    else:
        row_R = row + tl.arange(0, BLOCK_R)
        column_C = column + tl.arange(0, BLOCK_C)
        start = weight + expert.to(tl.int64) * (ROWS * COLUMNS)
        mask = (row_R < ROWS)[:, None] & (column_C < COLUMNS)[None, :]
        block = tl.load(start + (row_R[:, None] * COLUMNS + column_C[None, :]), mask=mask, other=0.0)
    return block


@triton.jit(do_not_specialize=["row_tiles", "capacity"])
def up_fwd_kernel(
    x_ptr,
    w13,
    token_ptr,
    hidden_ptr,
    act_ptr,
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
    """x (T, D), w13 (E, 2F, D) -> hidden (A, 2F) and act (A, F)."""
    COLUMN_TILES: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    if not UNIFORM:
        row_tiles = tl.load(count_ptr)
    for tile in tl.range(tl.program_id(0), row_tiles * COLUMN_TILES, tl.num_programs(0)):
        expert, first, left, column = row_tile(
            tile, row_tiles, tiles_ptr, offsets_ptr, capacity, COLUMN_TILES, BLOCK_M, UNIFORM
        )
        row_M, exists_M = row_index(token_ptr, first, left, BLOCK_M, GATHER)
        x_M1 = x_ptr + row_M[:, None] * D
        n = column * BLOCK_N
        gate_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            x_MK = load_rows(x_M1, exists_M, k, D, BLOCK_K)
            # Beyond F a gate tile sees the up projection's rows; such columns are never stored.
            gate_NK = load_weight(w13, expert, n, k, 2 * F, D, BLOCK_N, BLOCK_K, DESCRIPTOR)
            up_NK = load_weight(w13, expert, n + F, k, 2 * F, D, BLOCK_N, BLOCK_K, DESCRIPTOR)
            gate_MN = tl.dot(x_MK, gate_NK.T, gate_MN, input_precision=PRECISION)
            up_MN = tl.dot(x_MK, up_NK.T, up_MN, input_precision=PRECISION)
        lane_M1 = tl.arange(0, BLOCK_M)[:, None]
        hidden = hidden_ptr + first.to(tl.int64) * (2 * F)
        act = act_ptr + first.to(tl.int64) * F
        for part in tl.static_range(PARTS):
            column_N = n + part * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)
            mask = exists_M[:, None] & (column_N < F)[None, :]
            gate = part_of(gate_MN, part, PARTS)
            up = part_of(up_MN, part, PARTS)
            place = lane_M1 * (2 * F) + column_N[None, :]
            tl.store(hidden + place, gate.to(hidden_ptr.dtype.element_ty), mask=mask)
            tl.store(hidden + F + place, up.to(hidden_ptr.dtype.element_ty), mask=mask)
            silu = gate * tl.sigmoid(gate) * up
            tl.store(act + (lane_M1 * F + column_N[None, :]), silu.to(act_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["row_tiles", "capacity"])
def rows_times_kernel(
    rows,
    weight,
    out_ptr,
    tiles_ptr,
    count_ptr,
    offsets_ptr,
    row_tiles,
    capacity,
    K: tl.constexpr,
    N: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    UNIFORM: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """rows (A, K) in expert order times weight (E, K, N), or (E, N, K) when `TRANSPOSE` -> out (A, N)."""
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if not UNIFORM:
        row_tiles = tl.load(count_ptr)
    for tile in tl.range(tl.program_id(0), row_tiles * COLUMN_TILES, tl.num_programs(0)):
        expert, first, left, column = row_tile(
            tile, row_tiles, tiles_ptr, offsets_ptr, capacity, COLUMN_TILES, BLOCK_M, UNIFORM
        )
        row_M, exists_M = row_index(rows, first, left, BLOCK_M, False)
        n = column * BLOCK_N
        acc_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            if DESCRIPTOR:  # the next expert's rows come along; they are not stored
                rows_MK = rows.load([first, k])
            else:
                rows_MK = load_rows(rows + row_M[:, None] * K, exists_M, k, K, BLOCK_K)
            if TRANSPOSE:
                weight_KN = load_weight(weight, expert, n, k, N, K, BLOCK_N, BLOCK_K, DESCRIPTOR).T
            else:
                weight_KN = load_weight(weight, expert, k, n, K, N, BLOCK_K, BLOCK_N, DESCRIPTOR)
            acc_MN = tl.dot(rows_MK, weight_KN, acc_MN, input_precision=PRECISION)
        out = out_ptr + first.to(tl.int64) * N
        for part in tl.static_range(PARTS):
            column_N = n + part * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)
            place = tl.arange(0, BLOCK_M)[:, None] * N + column_N[None, :]
            value = part_of(acc_MN, part, PARTS).to(out_ptr.dtype.element_ty)
            tl.store(out + place, value, mask=exists_M[:, None] & (column_N < N)[None, :])


def up_fwd(
    x_TD: Tensor, w13_E2FD: Tensor, token_A: Tensor | None, rows: int, plan: Plan, tile: Tile, target: Target
) -> tuple[Tensor, Tensor]:
    """The gate and up projections of routed rows, and SwiGLU.

    Args:
        x_TD: (T, D) inputs; row a reads `token_A[a]`, or row a itself without `token_A`.
        w13_E2FD: (E, 2, F, D).
        token_A: int64.
        rows: A.
        plan: the row tiles.
        tile: the kernel's shape.
        target: where it runs.

    Returns:
        (hidden_AH: gate and up before the activation, act_AF: silu(gate) * up).
    """
    _, _, hidden, width = w13_E2FD.shape
    hidden_AH, act_AF = x_TD.new_empty(rows, 2 * hidden), x_TD.new_empty(rows, hidden)
    described = target.descriptors and describable(w13_E2FD)
    launch(
        "up_fwd",
        up_fwd_kernel,
        row_grid(plan, hidden, tile, target),
        tile.warps,
        tile.stages,
        x_ptr=x_TD,
        w13=weight_operand(w13_E2FD.flatten(1, 2), (tile.block_n, tile.block_k), described),
        token_ptr=token_A,
        hidden_ptr=hidden_AH,
        act_ptr=act_AF,
        D=width,
        F=hidden,
        GATHER=token_A is not None,
        DESCRIPTOR=described,
        PRECISION=precision(x_TD.dtype),
        **row_arguments(plan, tile),
    )
    return hidden_AH, act_AF


def down_fwd(act_AF: Tensor, w2_EDF: Tensor, plan: Plan, tile: Tile, target: Target) -> Tensor:
    """The down projection of each row: (A, F), (E, D, F) -> (A, D)."""
    return rows_times("down_fwd", act_AF, w2_EDF, True, plan, tile, target)


def rows_times(
    name: str, rows_AK: Tensor, weight: Tensor, transpose: bool, plan: Plan, tile: Tile, target: Target
) -> Tensor:
    """Each run of rows times its expert's matrix: (A, K) -> (A, N).

    Args:
        name: of the launch.
        rows_AK: in expert order.
        weight: (E, K, N), or (E, N, K) with `transpose`.
        transpose: how `weight` lies.
        plan: the row tiles.
        tile: the kernel's shape.
        target: where it runs.
    """
    inner, outer = weight.shape[1:][::-1] if transpose else weight.shape[1:]
    out_AN = rows_AK.new_empty(rows_AK.shape[0], outer)
    described = target.descriptors and describable(rows_AK, weight)
    block = (tile.block_n, tile.block_k) if transpose else (tile.block_k, tile.block_n)
    launch(
        name,
        rows_times_kernel,
        row_grid(plan, outer, tile, target),
        tile.warps,
        tile.stages,
        rows=TensorDescriptor.from_tensor(rows_AK, [tile.block_m, tile.block_k]) if described else rows_AK,
        weight=weight_operand(weight, block, described),
        out_ptr=out_AN,
        K=inner,
        N=outer,
        TRANSPOSE=transpose,
        DESCRIPTOR=described,
        PRECISION=precision(rows_AK.dtype),
        **row_arguments(plan, tile),
    )
    return out_AN


def weight_operand(weight: Tensor, block: tuple[int, int], described: bool) -> Tensor | TensorDescriptor:
    """A stack of matrices as a kernel takes it. Three dimensions, so that a block never reaches the next expert."""
    return TensorDescriptor.from_tensor(weight, [1, *block]) if described else weight


def row_grid(plan: Plan, width: int, tile: Tile, target: Target) -> tuple[int]:
    """Programs for row tiles by column tiles of a `width`."""
    return (min(target.processors, plan.bound * triton.cdiv(width, tile.block_n)),)


def row_arguments(plan: Plan, tile: Tile) -> dict[str, Any]:
    """What every row kernel is told about the tiles."""
    assert tile.block_m == plan.block_m
    return {
        "tiles_ptr": plan.tiles_N2,
        "count_ptr": plan.count_1,
        "offsets_ptr": plan.offsets_E,
        "row_tiles": plan.bound,
        "capacity": plan.capacity,
        "UNIFORM": bool(plan.capacity),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "PARTS": tile.parts,
    }
