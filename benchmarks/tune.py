"""Measure tile shapes of the Triton kernels on this GPU, and write the best: `python -m benchmarks.tune --out FILE`.

Every candidate is compiled first; one that spills or has no room is not run. The others take turns on one layer's
call. The file has the form of `moe/kernels/triton/tiles.json`, with rules for this GPU before its others: look at it,
then copy it.
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

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import Layer, inputs
from eval.command import run_command
from moe.kernels.triton.tiles import KERNELS, ROW_KERNELS, TABLE, Tile, Tiles, find_tiles

# Few and many rows an expert, and what a rule of the table says of them.
LAYERS = {
    Layer("few rows", 256, 2048, 768, 64, 8): {"up_to_tokens": 64},
    Layer("many rows", 16384, 2048, 768, 64, 8): {},
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--out", required=True, help="file to write the table to")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each candidate")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise ValueError("tiles are measured on a GPU, and there is none here")
    from moe.kernels.triton.launch import target_of

    target = target_of(torch.device("cuda"))
    console = Console() if sys.stdout.isatty() else Console(width=120)
    shown = Table("kernel", "rows an expert", "tile", "ms", "before, ms", title=f"best on {target.name}")
    rules = []
    for layer, condition in LAYERS.items():
        rows = layer.rows / layer.experts
        best = dict(find_tiles(target, torch.bfloat16, layer.width, layer.expert_width, rows).by_kernel)
        for kernel in options.kernels:
            times = {tile: measure(best | {kernel: tile}, layer, options.repeats) for tile in candidates(kernel, best)}
            before, best[kernel] = best[kernel], min(times, key=lambda tile: times[tile])
            row = (str(dataclasses.astuple(best[kernel])), f"{times[best[kernel]]:.3f}", f"{times[before]:.3f}")
            shown.add_row(kernel, f"{rows:.0f}", *row)
        tiles = {kernel: list(dataclasses.astuple(tile)) for kernel, tile in best.items()}
        rules.append({"bytes": 2, **condition, "tiles": tiles})
        table = json.loads(TABLE.read_text(encoding="utf-8"))
        table[target.name] = rules + table[target.name]
        Path(options.out).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    console.print(shown)


def candidates(kernel: str, present: dict[str, Tile]) -> list[Tile]:
    """The present tile first, then all shapes worth a try. The row kernels share their rows, so those stay."""
    rows = (present[kernel].block_m,) if kernel in ROW_KERNELS else (64, 128)
    shapes = itertools.product(rows, (64, 128, 256), (32, 64), (4, 8), (3, 4), (1, 2))
    return list(dict.fromkeys([present[kernel], *(Tile(*shape) for shape in shapes)]))


def measure(tiles: dict[str, Tile], layer: Layer, repeats: int) -> float:
    """Median milliseconds of a whole call with these tiles; infinite where one is not to be run."""
    from moe.kernels.triton import ahead_of_time
    from moe.kernels.triton.backend import grouped_mlp_on
    from moe.kernels.triton.launch import target_of

    device = torch.device("cuda")
    target, chosen = target_of(device), Tiles.of(tiles)
    launches = ahead_of_time.launches(
        target.name,
        chosen,
        layer.width,
        layer.expert_width,
        tokens=layer.tokens,
        experts=layer.experts,
        per_token=layer.per_token,
    )
    for name, launch in launches.items():
        if ahead_of_time.faults(name, ahead_of_time.measure(launch, target.name), target.name):
            return float("inf")
    leaves, routing, grad_TD = inputs(layer, device, torch.bfloat16)
    taken = []
    for number in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        out = grouped_mlp_on(leaves[0], leaves[1], leaves[2], routing, chosen, target)
        torch.autograd.grad(out, leaves, grad_TD)
        torch.cuda.synchronize()
        if number >= 2:
            taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken)


if __name__ == "__main__":
    run_command(main)
