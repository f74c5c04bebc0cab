"""The roofline model: arithmetic, bytes, tiles and waves by hand."""

from __future__ import annotations

import pytest

from moe.kernels.roofline import GPU, Shape, bounds, passes
from moe.kernels.triton.tiles import Tile

TILES = {kernel: Tile(16, 16, 16, 4, 2) for kernel in ("up_fwd", "down_fwd", "down_dgrad", "up_dgrad", "dw2", "dw13")}


def by_kernel(shape: Shape, gpu: GPU) -> dict[str, object]:
    return {bound.kernel: bound for bound in bounds(shape, TILES, gpu)}


def test_forward_has_six_and_backward_twelve_products_of_tokens_and_widths() -> None:
    """18 M D F in all: 3 matrices, 2 FLOP, forward once and backward twice."""
    forward, backward = passes(bounds(Shape.balanced(100, 32, 48, 4, 2), TILES))
    assert forward.flops == 6 * 200 * 32 * 48
    assert backward.flops == 12 * 200 * 32 * 48


def test_bytes_are_counted_once() -> None:
    """T 10, D 4, F 3, two experts, 15 rows; 2 bytes a value."""
    found = by_kernel(Shape(10, 4, 3, (10, 5)), GPU(1, 1, 1, 1))
    assert found["up_fwd"].bytes == 2 * (10 * 4 + 2 * 2 * 3 * 4 + 3 * 15 * 3)
    assert found["down_fwd"].bytes == 2 * (15 * 3 + 2 * 3 * 4 + 15 * 4)
    assert found["down_dgrad"].bytes == 2 * (10 * 4 + 2 * 3 * 4 + 5 * 15 * 3)
    assert found["dw13"].bytes == 2 * (2 * 15 * 3 + 10 * 4 + 2 * 2 * 3 * 4)
    assert found["combine"].bytes == 2 * (15 * 4 + 10 * 4)


def test_a_tile_is_paid_whole_and_so_is_the_last_wave() -> None:
    """down_fwd: rows 17 and 1 make 3 tiles, D 20 makes 2 columns of them: 6 pieces of 16 x 16 x 16 on 4 processors."""
    gpu = GPU(flops=4.0, bandwidth=1e18, processors=4, port=1e18)
    found = by_kernel(Shape(18, 20, 12, (17, 1)), gpu)
    assert found["down_fwd"].seconds == pytest.approx(2 * (2 * 16**3) / 1.0)  # two waves; a processor has 1 FLOP/s
    assert found["down_fwd"].limit == "arithmetic"


def test_without_arithmetic_memory_is_the_limit() -> None:
    found = by_kernel(Shape(64, 32, 32, (64,)), GPU(flops=1e30, bandwidth=100.0, processors=1, port=1e18))
    assert all(bound.limit == "memory" and bound.seconds == bound.bytes / 100.0 for bound in found.values())


def test_the_busiest_expert_bounds_the_weights_gradients() -> None:
    """One tile of the gradient adds up all rows of an expert, and nobody helps it."""
    gpu = GPU(flops=100.0, bandwidth=1e18, processors=100, port=1e18)
    skewed, even = Shape(64, 16, 16, (64, 0, 0, 0)), Shape(64, 16, 16, (16, 16, 16, 16))
    assert by_kernel(skewed, gpu)["dw2"].seconds == pytest.approx(4 * by_kernel(even, gpu)["dw2"].seconds)


def test_small_tiles_are_limited_by_what_they_load() -> None:
    """down_fwd: one tile of 16 x 16 over 16: (16 + 16) x 16 values of 2 bytes through a port of 1 byte/s."""
    found = by_kernel(Shape(16, 16, 16, (16,)), GPU(flops=1e30, bandwidth=1e30, processors=1, port=1.0))
    assert found["down_fwd"].seconds == 32 * 16 * 2
    assert found["dw2"].seconds == 32 * 16 * 2
    assert found["down_fwd"].limit == "loads"
