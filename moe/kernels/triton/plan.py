"""Which rows a program works on: tiles of rows that never reach over an expert's end.

Equal groups need no plan, a tile's rows follow from its number. For groups of any size the plan is made on the device
and read back from memory there: the host never learns the sizes, and no kernel searches for its tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Plan:
    """Tiles of `block` rows.

    Attributes:
        block: rows of a tile.
        offsets_E: int32 end of each expert's rows.
        capacity: rows of every expert, where all have the same; else 0, and the rest is set.
        expert_M, row_M: int32 expert and first row of each tile; -1 behind the last one.
        tiles: how many there are at most.
    """

    block: int
    offsets_E: Tensor
    capacity: int
    expert_M: Tensor
    row_M: Tensor
    tiles: int

    @classmethod
    def of(cls, offsets_E: Tensor, capacity: int | None, rows: int, block: int) -> Plan:
        """Make the plan; nothing waits for the device.

        Args:
            offsets_E: int32 end of each expert's rows.
            capacity: rows of every expert, or None where they differ.
            rows: A, at least as many as the experts have together.
            block: rows of a tile.
        """
        experts = offsets_E.shape[0]
        if capacity is not None:
            unused = offsets_E  # kernels want a pointer, and do not read it
            return cls(block, offsets_E, capacity, unused, unused, experts * triton.cdiv(capacity, block))
        # Each expert leaves at most one tile unfilled, and only as many as there are rows have one at all.
        tiles = triton.cdiv(rows, block) + min(experts, rows)
        expert_M, row_M = offsets_E.new_empty(2, max(1, tiles)).unbind(0)
        padded = triton.next_power_of_2(experts + 1)
        plan_tiles[(experts + 1,)](offsets_E, expert_M, row_M, experts, tiles, BLOCK=block, EXPERTS=padded)
        return cls(block, offsets_E, 0, expert_M, row_M, tiles)


@triton.jit(do_not_specialize=["experts", "tiles"])
def plan_tiles(offsets_E, expert_M, row_M, experts, tiles, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Program e writes the tiles of expert e; one more fills what is left with -1."""
    e = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    ends = tl.load(offsets_E + index, mask=index < experts, other=0)
    starts = tl.load(offsets_E + index - 1, mask=(index > 0) & (index < experts), other=0)
    counts = tl.where(index < experts, (ends - starts + BLOCK - 1) // BLOCK, 0)
    first = tl.sum(tl.where(index < e, counts, 0))
    if e < experts:
        start = tl.sum(tl.where(index == e, starts, 0))
        count = tl.sum(tl.where(index == e, counts, 0))
        for tile in range(0, count):
            tl.store(expert_M + first + tile, e)
            tl.store(row_M + first + tile, start + tile * BLOCK)
    else:
        for tile in range(first, tiles):
            tl.store(expert_M + tile, -1)
            tl.store(row_M + tile, 0)


@triton.jit
def rows_of_tile(tile, offsets_E, expert_M, row_M, capacity, EQUAL: tl.constexpr, BLOCK: tl.constexpr):
    """(expert or -1, first row, end of the expert's rows) of a tile."""
    if EQUAL:
        per_expert = tl.cdiv(capacity, BLOCK)
        expert = tile // per_expert
        row = expert * capacity + (tile % per_expert) * BLOCK
        end = (expert + 1) * capacity
    else:
        expert = tl.load(expert_M + tile)
        row = tl.load(row_M + tile)
        end = tl.load(offsets_E + tl.maximum(expert, 0))
    return expert, row, end


@triton.jit
def offset(index, stride: tl.constexpr):
    """Elements before a row or a matrix, in 64 bits: stacks of experts and long batches pass 2^31 of them."""
    return tl.cast(index, tl.int64) * stride


@triton.jit
def weight_block(
    w, expert, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(R, C) of one expert's (ROWS, COLUMNS) matrix, zeros outside it: through a descriptor, or by pointers."""
    if TMA:
        block = tl.reshape(w.load([expert, row, column]), (R, C))
    else:
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, C)
        mask = (r[:, None] < ROWS) & (c[None, :] < COLUMNS)
        base = w + offset(expert, ROWS * COLUMNS)
        block = tl.load(base + (r[:, None] * COLUMNS + c[None, :]), mask=mask, other=0.0)
    return block


def blocks_of(tensor: Tensor, tma: bool, *block: int) -> object:
    """What a kernel loads blocks from: a TMA descriptor of blocks of this size, or the tensor itself."""
    return TensorDescriptor.from_tensor(tensor, list(block)) if tma else tensor


def suits_tma(*tensors: Tensor) -> bool:
    """TMA wants a base and rows that are multiples of 16 bytes."""
    return all(t.shape[-1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in tensors)


def programs(device: torch.device, tiles: int) -> int:
    """Of a persistent kernel: one for each multiprocessor; a few in the interpreter."""
    if device.type != "cuda":
        return max(1, min(4, tiles))
    return max(1, min(torch.cuda.get_device_properties(device).multi_processor_count, tiles))
