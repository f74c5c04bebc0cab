"""Measure tile shapes of the Triton kernels on this GPU, and write the best: `python -m benchmarks.tune --out FILE`.

Every candidate is compiled first, by as many processes as there are cores; one that spills or has no room is not run.
Of the others the kernel alone is timed, between two events of the device, within a layer's call. The four row kernels
share their rows: they are tuned for each number of rows, and the one with the smallest sum is taken. The file has the
form of `moe/kernels/triton/tiles.json`, with rules for this GPU and the measured D and F before its others: look at it,
then copy it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.gpu import Layer, inputs
from benchmarks.kernels import check_writable
from data.atomic import write_json
from eval.command import run_command, terminal
from moe.kernels.triton.tiles import KERNELS, ROW_KERNELS, TABLE, Tile, Tiles, find_tiles

ROWS = (64, 128)  # of a tile
# Few and many rows an expert, and what a rule of the table says of them.
LAYERS = {
    Layer("few rows", 256, 2048, 768, 64, 8): {"up_to_tokens": 64},
    Layer("many rows", 16384, 2048, 768, 64, 8): {},
}
Time = Callable[[str, dict[str, Tile]], float]  # of one kernel of a layer with these tiles; infinite: not to be run


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--out", required=True, help="file to write the table to")
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each candidate")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise ValueError("tiles are measured on a GPU, and there is none here")
    if options.repeats < 1:
        raise ValueError(f"--repeats {options.repeats}: must be at least 1")
    check_writable(options.out, "--out")
    from moe.kernels.triton.launch import target_of

    target = target_of(torch.device("cuda"))
    console = terminal()
    shown = Table("kernel", "rows an expert", "tile", "ms", "before, ms", title=f"best on {target.name}")
    rules = []
    for layer, condition in LAYERS.items():
        rows = layer.rows / layer.experts
        before = dict(find_tiles(target, torch.bfloat16, layer.width, layer.expert_width, rows).by_kernel)
        sound = compiled_soundly(layer, target.name, before)

        def time_of(kernel: str, tiles: dict[str, Tile], layer: Layer = layer, sound: set[Any] = sound) -> float:
            return milliseconds(kernel, tiles, layer, options.repeats) if (kernel, tiles[kernel]) in sound else math.inf

        best = best_tiles(before, time_of)
        for kernel in KERNELS:
            times = (f"{time_of(kernel, tiles):.3f}" for tiles in (best, before))
            shown.add_row(kernel, f"{rows:.0f}", str(dataclasses.astuple(best[kernel])), *times)
        rules.append(rule(layer, condition, best))
        table = json.loads(TABLE.read_text(encoding="utf-8"))
        table[target.name] = rules + table[target.name]
        write_json(Path(options.out), table)
    console.print(shown)


def rule(layer: Layer, condition: dict[str, int], best: dict[str, Tile]) -> dict[str, Any]:
    """What was measured, as an entry of the table: for this D and F only."""
    tiles = {kernel: list(dataclasses.astuple(tile)) for kernel, tile in best.items()}
    return {"bytes": 2, "D": layer.width, "F": layer.expert_width, **condition, "tiles": tiles}


def candidates(kernel: str, present: dict[str, Tile], rows: Sequence[int] = ROWS) -> list[Tile]:
    """The present tile first, if it has such rows, then all shapes worth a try."""
    shapes = itertools.product(rows, (64, 128, 256), (64,), (4, 8), (3, 4), (1, 2))
    own = [present[kernel]] if present[kernel].block_m in rows else []
    return list(dict.fromkeys([*own, *(Tile(*shape) for shape in shapes)]))


def with_rows(present: dict[str, Tile], rows: int) -> dict[str, Tile]:
    """The row kernels at so many rows a tile, the others as they are."""
    return present | {kernel: dataclasses.replace(present[kernel], block_m=rows) for kernel in ROW_KERNELS}


def best_tiles(present: dict[str, Tile], time_of: Time) -> dict[str, Tile]:
    """The fastest tile of each kernel, with one number of rows for all row kernels.

    Args:
        present: tiles to begin with.
        time_of: milliseconds of one kernel.

    Raises:
        ValueError: a kernel has no tile that can be run.
    """
    found: list[tuple[float, dict[str, Tile]]] = []
    for rows in ROWS:
        base = with_rows(present, rows)
        times = {
            kernel: {tile: time_of(kernel, base | {kernel: tile}) for tile in candidates(kernel, present, (rows,))}
            for kernel in ROW_KERNELS
        }
        best = {kernel: min(by_tile, key=lambda tile: by_tile[tile]) for kernel, by_tile in times.items()}
        found.append((math.fsum(min(by_tile.values()) for by_tile in times.values()), best))
    least, row_tiles = min(found, key=lambda each: each[0])
    if math.isinf(least):
        raise ValueError(f"no number of rows of {ROWS} has a tile for each of {', '.join(ROW_KERNELS)} that can be run")
    chosen = present | row_tiles
    for kernel in KERNELS:
        if kernel not in ROW_KERNELS:
            tried = {tile: time_of(kernel, chosen | {kernel: tile}) for tile in candidates(kernel, present)}
            chosen |= {kernel: min(tried, key=lambda tile: tried[tile])}
            if math.isinf(tried[chosen[kernel]]):
                raise ValueError(f"{kernel} has no tile that can be run")
    return chosen


def compiled_soundly(layer: Layer, target: str, present: dict[str, Tile]) -> set[tuple[str, Tile]]:
    """The kernels and tiles whose machine code has no fault."""
    jobs = [
        (layer, target, kernel, with_rows(present, tile.block_m) | {kernel: tile})
        for kernel in KERNELS
        for tile in candidates(kernel, present)
    ]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        sound = pool.map(is_sound, *zip(*jobs, strict=True))
        return {(kernel, tiles[kernel]) for (_, _, kernel, tiles), good in zip(jobs, sound, strict=True) if good}


def is_sound(layer: Layer, target: str, kernel: str, tiles: dict[str, Tile]) -> bool:
    """Whether one kernel compiles without a spill and within its target's memory; nothing runs."""
    from moe.kernels.triton import ahead_of_time

    launches = ahead_of_time.launches(
        target,
        Tiles.of(tiles),
        layer.width,
        layer.expert_width,
        tokens=layer.tokens,
        experts=layer.experts,
        per_token=layer.per_token,
    )
    return not ahead_of_time.faults(kernel, ahead_of_time.measure(launches[kernel], target), target)


def milliseconds(kernel: str, tiles: dict[str, Tile], layer: Layer, repeats: int) -> float:
    """Median time of one kernel on the device, within a layer's call."""
    from moe.kernels.triton.backend import grouped_mlp_on
    from moe.kernels.triton.launch import target_of, watched

    device = torch.device("cuda")
    target, chosen = target_of(device), Tiles.of(tiles)
    leaves, routing, grad_TD = inputs(layer, device, torch.bfloat16)

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    with watched(kernel, event) as events:
        for _ in range(repeats + 2):
            out = grouped_mlp_on(leaves[0], leaves[1], leaves[2], routing, chosen, target)
            torch.autograd.grad(out, leaves, grad_TD)
    torch.cuda.synchronize()
    return statistics.median(began.elapsed_time(ended) for began, ended in events[2:])


if __name__ == "__main__":
    run_command(main)
