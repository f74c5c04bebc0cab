"""Tile shapes of the Triton kernels: a table, instead of tuning at run time.

So a new token count never makes anything compile. `tiles.json` holds, for each target and kernel, shapes by rows per
expert: the first entry whose `rows` is at least an expert's average applies. `python -m benchmarks.tune` measures
candidates on a GPU and rewrites it.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).with_name("tiles.json")
KERNELS = ("up_fwd", "down_fwd", "down_dgrad", "up_dgrad", "dw2", "dw13")
# In the interpreter a program is a Python loop, and small shapes meet more edges.
INTERPRETED = {"BM": 32, "BN": 32, "BK": 32, "subtiles": 2}


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work.

    Attributes:
        BM, BN, BK: rows and columns of a tile, and the piece of the inner dimension that is loaded at a time.
        warps, stages: of a program; loads in flight.
        subtiles: pieces of the epilogue, 1 or 2.
    """

    BM: int
    BN: int
    BK: int
    warps: int = 8
    stages: int = 3
    subtiles: int = 1

    def options(self, subtiles: bool = False) -> dict[str, Any]:
        """As keyword arguments of a launch."""
        split = {"SUBTILES": self.subtiles} if subtiles else {}
        return {
            "BM": self.BM,
            "BN": self.BN,
            "BK": self.BK,
            **split,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def target_of(device: torch.device) -> str:
    """Name of the device in the table; "interpreter" for CPU tensors."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def tiles_for(target: str, rows_per_expert: int) -> dict[str, Tile]:
    """Every kernel's tile on a target.

    Args:
        target: see `target_of`; one that is not in the table takes that of the nearest older one.
        rows_per_expert: average over the experts.

    Raises:
        ValueError: if the target is older than all in the table.
    """
    if target == "interpreter":
        return {kernel: Tile(**INTERPRETED) for kernel in KERNELS}
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    name = _nearest(target, sorted(table))
    return {kernel: _pick(table[name][kernel], rows_per_expert) for kernel in KERNELS}


def uses_tma(target: str) -> bool:
    """Whether the target has a tensor memory accelerator; the interpreter has one too, to the letter."""
    return target == "interpreter" or (target.startswith("sm_") and int(target[3:]) >= 90)


def _pick(entries: list[dict[str, Any]], rows_per_expert: int) -> Tile:
    entry = next((e for e in entries if e["rows"] >= rows_per_expert), entries[-1])
    return Tile(**{key: value for key, value in entry.items() if key != "rows"})


def _nearest(target: str, known: list[str]) -> str:
    if target in known:
        return target
    if target.startswith("sm_"):
        older = [name for name in known if name.startswith("sm_") and int(name[3:]) <= int(target[3:])]
        if older:
            return max(older, key=lambda name: int(name[3:]))
    raise ValueError(f'no tiles for {target} (known: {", ".join(known)}): use moe.backend = "torch"')
