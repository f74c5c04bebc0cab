"""Which tile covers which rows, decided on the device: nothing here waits for a number from it.

With equal runs (expert choice) a tile's expert follows from its number. Uneven runs need a table, made once a layer
and read by all of its kernels; searching the runs' ends again in every tile would cost more than a load.
"""

# Triton reads annotations as types of its own, so kernels have none but `tl.constexpr`.
# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """The row tiles of a layer.

    Attributes:
        offsets_E: int32 end of each expert's run of rows.
        capacity: rows of every run when all are equal, else 0.
        block_m: rows of a tile.
        bound: no more row tiles than this, known on the host; the exact number when runs are equal.
        tiles_N2: int32 expert and first row of each row tile, -1 beyond the last one; None when runs are equal.
        count_1: int32 number of row tiles; None when runs are equal.
    """

    offsets_E: Tensor
    capacity: int
    block_m: int
    bound: int
    tiles_N2: Tensor | None = None
    count_1: Tensor | None = None


def make_plan(offsets_E: Tensor, capacity: int | None, rows: int, block_m: int) -> Plan:
    """Cut every expert's run into tiles of `block_m` rows, the last one of each run perhaps partly empty.

    Args:
        offsets_E: int32 end of each run.
        capacity: rows of every run if all are equal.
        rows: A, all rows together.
        block_m: rows of a tile.
    """
    num_experts = offsets_E.shape[0]
    if capacity is not None:
        return Plan(offsets_E, capacity, block_m, num_experts * triton.cdiv(capacity, block_m))
    # Each expert that has rows has one tile for its first row, and the other rows fill at best whole tiles.
    bound = min(num_experts, rows) + max(rows - num_experts, 0) // block_m
    lengths_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
    tiles_E = (lengths_E + (block_m - 1)) // block_m
    last_E = tiles_E.cumsum(0, dtype=torch.int32)
    tile_N = torch.arange(bound, device=offsets_E.device, dtype=torch.int32)
    expert_N = torch.searchsorted(last_E, tile_N, right=True, out_int32=True)
    padding_N = expert_N == num_experts
    inside_N = expert_N.clamp_max(num_experts - 1)
    first_N = (offsets_E - lengths_E)[inside_N] + (tile_N - (last_E - tiles_E)[inside_N]) * block_m
    tiles_N2 = torch.stack([expert_N, first_N], 1).masked_fill(padding_N[:, None], -1)
    return Plan(offsets_E, 0, block_m, bound, tiles_N2, last_E[-1:])


@triton.jit
def row_tile(
    tile,
    row_tiles,
    tiles_ptr,
    offsets_ptr,
    capacity,
    COLUMN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """(expert, first row, rows left in the run from there, column tile) of a tile number.

    Tiles go down eight row tiles before they go to the next column, so that programs which run at the same time share
    both rows and weights in the cache.
    """
    GROUP: tl.constexpr = 8
    before = tile // (GROUP * COLUMN_TILES) * GROUP
    height = tl.minimum(row_tiles - before, GROUP)
    inside = tile % (GROUP * COLUMN_TILES)
    row = before + inside % height
    if UNIFORM:
        blocks = (capacity + BLOCK_M - 1) // BLOCK_M
        expert = row // blocks
        start = row % blocks * BLOCK_M
        first = expert * capacity + start
        left = capacity - start
    else:
        expert = tl.load(tiles_ptr + 2 * row)
        first = tl.load(tiles_ptr + 2 * row + 1)
        left = tl.load(offsets_ptr + expert) - first
    return expert, first, left, inside // height


@triton.jit
def row_index(index_ptr, first, left, BLOCK: tl.constexpr, GATHER: tl.constexpr):
    """(int64 row numbers of a tile, which of them exist): looked up when `GATHER`, else consecutive."""
    lane = tl.arange(0, BLOCK)
    exists = lane < left
    # Either way 64 bits: times the width it may pass 2^31.
    row = tl.load(index_ptr + first + lane, mask=exists, other=0).to(tl.int64) if GATHER else first.to(tl.int64) + lane
    return row, exists


@triton.jit
def part_of(tile_MN, part: tl.constexpr, PARTS: tl.constexpr):
    """One of 1 or 2 column parts of a tile."""
    if PARTS == 1:
        out = tile_MN
    else:
        M: tl.constexpr = tile_MN.shape[0]
        N: tl.constexpr = tile_MN.shape[1]
        left, right = tl.split(tl.permute(tl.reshape(tile_MN, (M, 2, N // 2)), (0, 2, 1)))
        out = left if part == 0 else right
    return out
