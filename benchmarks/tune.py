"""Measure tile shapes of the Triton kernels on this GPU, and write the best: `python -m benchmarks.tune --out FILE`.

Every candidate is compiled first; one that spills or has no room is not run. The others take turns on one layer's
call. The file has the form of `moe/kernels/tiles.json`, with this GPU's entries replaced: look at it, then copy it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import Layer, inputs
from eval.command import run_command
from moe.kernels.tile import KERNELS, TABLE, Tile, target_of, tiles_for

LAYERS = (
    Layer("few rows", 256, 2048, 768, 64, 8),  # 32 rows an expert
    Layer("many rows", 16384, 2048, 768, 64, 8),
)
SPLIT = ("down_fwd", "down_dgrad", "up_dgrad")  # kernels whose epilogue can go in two parts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--out", required=True, help="file to write the table to")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each candidate")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise ValueError("tiles are measured on a GPU, and there is none here")
    target = target_of(torch.device("cuda"))
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    entries: dict[str, list[dict[str, Any]]] = table.setdefault(target, {})
    console = Console() if sys.stdout.isatty() else Console(width=120)
    shown = Table("kernel", "rows an expert", "tile", "ms", "before, ms", title=f"best on {target}")
    for kernel in options.kernels:
        found = []
        for layer in LAYERS:
            rows = layer.rows // layer.experts
            before = tiles_for(target, rows)[kernel]
            times = {tile: measure(kernel, tile, layer, target, options.repeats) for tile in candidates(kernel, before)}
            best = min(times, key=lambda tile: times[tile])
            found.append({"rows": 64 if rows <= 64 else 1 << 20, **dataclasses.asdict(best)})
            shown.add_row(kernel, str(rows), str(best), f"{times[best]:.3f}", f"{times[before]:.3f}")
        entries[kernel] = found
        Path(options.out).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    console.print(shown)


def candidates(kernel: str, before: Tile) -> list[Tile]:
    """The present tile first, then all shapes worth a try."""
    shapes = itertools.product((64, 128), (64, 128, 256), (64,), (4, 8), (3, 4), (1, 2) if kernel in SPLIT else (1,))
    return list(dict.fromkeys([before, *(Tile(*shape) for shape in shapes)]))


def measure(kernel: str, tile: Tile, layer: Layer, target: str, repeats: int) -> float:
    """Median milliseconds of a whole call with this tile; infinite for one that is not to be run."""
    from moe.kernels.triton import backend
    from moe.kernels.triton.ahead_of_time import SHARED_LIMIT, compile_kernel, problems

    if target in SHARED_LIMIT:
        resources = compile_kernel(kernel, target, layer.width, layer.expert_width, **dataclasses.asdict(tile))
        if problems(resources, target, kernel):
            return float("inf")
    leaves, routing, grad_TD = inputs(layer, torch.device("cuda"), torch.bfloat16)
    others = tiles_for(target, layer.rows // layer.experts)
    taken = []
    with mock.patch.object(backend, "tiles_for", lambda *_: others | {kernel: tile}):
        for number in range(repeats + 2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            out = backend.grouped_mlp_triton(leaves[0], leaves[1], leaves[2], routing)
            torch.autograd.grad(out, leaves, grad_TD)
            torch.cuda.synchronize()
            if number >= 2:
                taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken)


if __name__ == "__main__":
    run_command(main)
