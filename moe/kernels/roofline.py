"""The least time that each grouped-GEMM kernel can take on a GPU, from its arithmetic, its bytes and its tiles.

Nothing here is measured: `python -m benchmarks.kernels --model` prints these bounds. Bytes are what must pass
once between memory and chip; what the caches miss comes on top. Loads are taken to be hidden by the tile's stages but
for their volume: every tile's blocks come through its multiprocessor's port to the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe.kernels.triton.tiles import Tile


@dataclass(frozen=True)
class GPU:
    """A GPU's limits.

    Attributes:
        flops: dense bf16 peak, FLOP/s.
        bandwidth: of its memory, bytes/s.
        processors: multiprocessors.
        port: of one multiprocessor to the second-level cache, bytes/s.
    """

    flops: float
    bandwidth: float
    processors: int
    port: float


# Data sheet of the NVIDIA H200 SXM: 989 TFLOP/s dense bf16, 4.8 TB/s, 132 multiprocessors. Each does 4096 FLOP a cycle,
# hence 1.83 GHz, at which its port of 64 bytes a cycle carries 117 GB/s.
H200 = GPU(989e12, 4.8e12, 132, 64 * 989e12 / (132 * 4096))


@dataclass(frozen=True)
class Shape:
    """One layer's call.

    Attributes:
        tokens: T.
        width: D.
        expert_width: F.
        rows_E: rows of each expert.
        bytes_per_value: of activations and weights.
    """

    tokens: int
    width: int
    expert_width: int
    rows_E: tuple[int, ...]
    bytes_per_value: int = 2

    @classmethod
    def balanced(cls, tokens: int, width: int, expert_width: int, experts: int, per_token: float) -> Shape:
        """Every expert takes the same number of tokens."""
        return cls(tokens, width, expert_width, (round(tokens * per_token / experts),) * experts)


@dataclass(frozen=True)
class Bound:
    """A kernel's least time.

    Attributes:
        kernel: its name.
        flops: of the model; what padding adds is not counted.
        bytes: that must be moved.
        seconds: the largest of arithmetic and of tiles' loads, with whole tiles in whole waves, and bytes at full
            bandwidth.
        limit: "arithmetic", "loads" or "memory", whichever that is.
    """

    kernel: str
    flops: float
    bytes: float
    seconds: float
    limit: str


def bounds(shape: Shape, tiles: dict[str, Tile], gpu: GPU = H200) -> list[Bound]:
    """Every kernel's bound, forward first.

    Args:
        shape: of the call.
        tiles: of the six products, by kernel.
        gpu: its limits.
    """
    t, d, f = shape.tokens, shape.width, shape.expert_width
    m, e, b = sum(shape.rows_E), len(shape.rows_E), shape.bytes_per_value
    # (columns of the output, inner dimension, values read and written)
    rows: dict[str, tuple[int, int, int]] = {
        "up_fwd": (2 * f, d, t * d + 2 * e * f * d + 3 * m * f),
        "down_fwd": (d, f, m * f + e * f * d + m * d),
        "down_dgrad": (f, d, t * d + e * f * d + 5 * m * f),
        "up_dgrad": (d, 2 * f, 2 * m * f + 2 * e * f * d + m * d),
    }
    weights = {"dw2": (d, f, t * d + m * f + e * f * d), "dw13": (2 * f, d, 2 * m * f + t * d + 2 * e * f * d)}
    found = {}
    for kernel, (columns, inner, values) in rows.items():
        tile = tiles[kernel]
        width = tile.block_n * (2 if kernel == "up_fwd" else 1)  # one tile of up_fwd is gate and up
        pieces = sum(math.ceil(n / tile.block_m) for n in shape.rows_E) * math.ceil(columns / width)
        waves, depth = math.ceil(pieces / gpu.processors), _whole(inner, tile.block_k)
        arithmetic = waves * 2 * tile.block_m * width * depth / (gpu.flops / gpu.processors)
        loads = waves * (tile.block_m + width) * depth * b / gpu.port
        found[kernel] = _bound(kernel, 2 * m * columns * inner, values * b, arithmetic, loads, gpu)
    for kernel, (x, y, values) in weights.items():
        tile = tiles[kernel]
        each = math.ceil(x / tile.block_m) * math.ceil(y / tile.block_n)
        depth_E = [_whole(n, tile.block_k) for n in shape.rows_E]
        # Experts differ in work here: at best it is spread evenly, but no tile is cut.
        deepest = max(each * sum(depth_E) / gpu.processors, max(depth_E, default=0))
        arithmetic = deepest * 2 * tile.block_m * tile.block_n / (gpu.flops / gpu.processors)
        loads = deepest * (tile.block_m + tile.block_n) * b / gpu.port
        found[kernel] = _bound(kernel, 2 * m * x * y, values * b, arithmetic, loads, gpu)
    sums = _bound("combine", 0, (m * d + t * d) * b, 0.0, 0.0, gpu)
    order = [found["up_fwd"], found["down_fwd"], sums]
    return order + [found[k] for k in ("down_dgrad", "dw2", "up_dgrad", "dw13")] + [sums]


def passes(found: Sequence[Bound]) -> tuple[Bound, Bound]:
    """Forward and backward as a whole: kernels follow one another."""

    def add_up(name: str, part: Sequence[Bound]) -> Bound:
        seconds = sum(bound.seconds for bound in part)
        return Bound(name, sum(b.flops for b in part), sum(b.bytes for b in part), seconds, "")

    return add_up("forward", found[:3]), add_up("backward", found[3:])


def _whole(size: int, block: int) -> int:
    return math.ceil(size / block) * block


def _bound(kernel: str, flops: float, size: float, arithmetic: float, loads: float, gpu: GPU) -> Bound:
    seconds = {"arithmetic": arithmetic, "loads": loads, "memory": size / gpu.bandwidth}
    limit = max(seconds, key=lambda name: seconds[name])
    return Bound(kernel, flops, size, seconds[limit], limit)
