"""Tile shapes by target, width and load: looked up in `tiles.json`, never searched for at run time.

`tiles.json` holds for each target a list of rules, and the first that fits applies. A rule may ask for a `D`, an `F`, a
number of `bytes` of each value, and a largest mean number of tokens an expert (`up_to_tokens`); what it does not name
it does not ask for. A tile is written [block_m, block_n, block_k, warps, stages, parts]. None has been timed: they are
what fits. `tests/moe/kernels/test_triton_ahead_of_time.py` holds every one to its registers and shared memory.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # the table can be read where there is no Triton
    from moe.kernels.triton.launch import Target

TABLE = Path(__file__).with_name("tiles.json")
ROW_KERNELS = ("up_fwd", "down_fwd", "down_dgrad", "up_dgrad")
KERNELS = (*ROW_KERNELS, "dw2", "dw13")


@dataclass(frozen=True)
class Tile:
    """The shape of one kernel's work.

    Attributes:
        block_m, block_n: rows and columns of an output tile.
        block_k: how much of the summed width is multiplied at a time.
        warps: threads / 32 (64 on AMD).
        stages: how far Triton loads ahead. Sums over tokens look their rows up first, which takes a stage of its own.
        parts: column parts, 1 or 2, that a tile is finished in: fewer registers are alive at once.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    parts: int = 1


@dataclass(frozen=True)
class Tiles:
    """The tile of every product.

    Attributes:
        by_kernel: tiles by the names in `KERNELS`.
        block_m: rows of a tile, the same for all of `ROW_KERNELS`, so that one schedule serves them.
    """

    by_kernel: dict[str, Tile]
    block_m: int

    @classmethod
    def of(cls, by_kernel: dict[str, Tile]) -> Tiles:
        """Check and wrap.

        Raises:
            ValueError: the row kernels do not agree on their rows.
        """
        blocks = {by_kernel[name].block_m for name in ROW_KERNELS}
        if len(blocks) > 1:
            raise ValueError(f"{', '.join(ROW_KERNELS)} share one schedule and so one block_m, not {sorted(blocks)}")
        return cls(by_kernel, blocks.pop())


def find_tiles(target: Target | str, dtype: torch.dtype, width: int, hidden: int, tokens: float) -> Tiles:
    """The tiles of a layer.

    Args:
        target: where it runs, or its name.
        dtype: of the operands.
        width: D.
        hidden: F.
        tokens: mean rows of an expert.
    """
    asked = {"D": width, "F": hidden, "bytes": dtype.itemsize}
    for rule in _table()[target if isinstance(target, str) else target.name]:
        fits = all(rule.get(key, value) == value for key, value in asked.items())
        if fits and tokens <= rule.get("up_to_tokens", tokens):
            return Tiles.of({name: Tile(*rule["tiles"][name]) for name in KERNELS})
    raise ValueError(f"tiles.json has no rule for {target}, {asked} and {tokens:.0f} tokens an expert")


@functools.cache
def _table() -> dict[str, list[dict[str, Any]]]:
    table: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table
