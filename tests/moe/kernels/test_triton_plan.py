"""What the Triton backend decides before any kernel runs: tiles, and what it refuses. Nothing here is interpreted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.config import ConfigError
from moe.kernels import grouped_mlp
from moe.kernels.triton.backend import check, grouped_mlp_triton
from moe.kernels.triton.launch import INTERPRETER, TARGETS, Target
from moe.kernels.triton.plan import make_plan
from moe.kernels.triton.tiles import KERNELS, Tile, Tiles, find_tiles
from moe.routing import Routing

COUNTS = st.lists(st.sampled_from([0, 1, 7, 127, 128, 129, 300]), min_size=1, max_size=12)


@given(counts=COUNTS, block_m=st.sampled_from([16, 64, 128]))
def test_row_tiles_cover_every_row_once(counts: list[int], block_m: int) -> None:
    """In order, each tile within one expert's run; -1 beyond the last; the host's bound is enough."""
    offsets_E = torch.tensor(counts).cumsum(0).to(torch.int32)
    plan = make_plan(offsets_E, None, sum(counts), block_m)
    assert plan.tiles_N2 is not None and plan.count_1 is not None
    expected = [
        [expert, sum(counts[:expert]) + first]
        for expert, count in enumerate(counts)
        for first in range(0, count, block_m)
    ]
    padding = plan.bound - len(expected)
    assert padding >= 0 and plan.count_1.tolist() == [len(expected)]
    assert plan.tiles_N2.tolist() == expected + [[-1, -1]] * padding
    assert plan.tiles_N2.dtype == plan.count_1.dtype == torch.int32


@pytest.mark.parametrize("counts", [[1, 1, 1], [129, 1, 1, 1], [257], [1, 0, 0, 0]])
def test_the_bound_is_reached(counts: list[int]) -> None:
    """No smaller number would do: one row more than whole tiles, and an expert for each single row."""
    plan = make_plan(torch.tensor(counts).cumsum(0).to(torch.int32), None, sum(counts), 128)
    assert plan.count_1 is not None and plan.count_1.item() == plan.bound


def test_equal_runs_need_no_table() -> None:
    """Expert choice: the tiles follow from the capacity."""
    plan = make_plan(torch.tensor([130, 260], dtype=torch.int32), 130, 260, 128)
    assert plan.bound == 4 and plan.tiles_N2 is None and plan.count_1 is None


def test_a_plan_waits_for_no_number_from_the_device() -> None:
    """On tensors without data: anything that the host read would fail here."""
    plan = make_plan(torch.empty(8, dtype=torch.int32, device="meta"), None, 1000, 128)
    assert plan.tiles_N2 is not None and plan.tiles_N2.is_meta and plan.bound == 8 + 992 // 128


@pytest.mark.parametrize("target", [*TARGETS.values(), INTERPRETER], ids=lambda target: target.name)
@pytest.mark.parametrize("tokens", [1, 64, 65, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_target_has_tiles_for_every_load(target: Target, dtype: torch.dtype, tokens: int) -> None:
    """Blocks are powers of two of at least 16, which a product wants; few tokens an expert have no higher tiles."""
    found = find_tiles(target, dtype, 2048, 768, tokens)
    for name in KERNELS:
        tile = found.by_kernel[name]
        for block in (tile.block_m, tile.block_n // tile.parts, tile.block_k):
            assert block >= 16 and block & (block - 1) == 0
    assert tokens > 64 or found.block_m <= 64


def test_row_kernels_with_different_rows_are_refused() -> None:
    """They share one schedule."""
    tiles = {name: Tile(64 if name == "up_dgrad" else 128, 64, 64, 4, 3) for name in KERNELS}
    with pytest.raises(ValueError, match="share one schedule"):
        Tiles.of(tiles)


def operands(dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> tuple[list[Tensor], Routing]:
    """Something that the backend takes, without data."""
    shapes = [(12, 16), (3, 2, 8, 16), (3, 16, 8)]
    token_A = torch.empty(20, dtype=torch.int64, device=device)
    routing = Routing(token_A, torch.empty(3, dtype=torch.int32, device=device), torch.empty(20, device=device), 12)
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes], routing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_good_operands_are_taken(dtype: torch.dtype) -> None:
    """The refusals below are not about everything."""
    tensors, routing = operands(dtype)
    check(*tensors, routing, TARGETS["sm_90"])


def test_a_cpu_is_refused() -> None:
    """The message says what would work. (TRITON_INTERPRET=1 would, too: see test_triton_interpreter.py.)"""
    tensors, routing = operands(device="cpu")
    with pytest.raises(ValueError, match=r"runs on GPUs.*on 'cpu'.*\"torch\".*TRITON_INTERPRET=1"):
        grouped_mlp_triton(*tensors, routing)
    with pytest.raises(ConfigError, match=r'needs a GPU, and this is cpu: use "torch".*TRITON_INTERPRET=1'):
        grouped_mlp(*tensors, routing, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    """The message has those that are taken."""
    tensors, routing = operands(dtype)
    with pytest.raises(ValueError, match=rf"torch.float16, torch.float32, not in {dtype}.*\"torch\""):
        check(*tensors, routing, TARGETS["sm_90"])


@pytest.mark.parametrize("which", ["x", "w13", "w2", "weight_A", "token_A"])
def test_what_is_not_contiguous_is_refused(which: str) -> None:
    """Kernels compute addresses from shapes. The message names the tensor, its strides and the cure."""
    tensors, routing = operands()
    if which in ("weight_A", "token_A"):
        setattr(routing, which, torch.empty(40, device="meta")[::2])
    else:
        place = ["x", "w13", "w2"].index(which)
        tensors[place] = tensors[place].transpose(-1, -2).contiguous().transpose(-1, -2)
    with pytest.raises(ValueError, match=rf"wants {which} contiguous.*strides.*contiguous\(\).*\"torch\""):
        check(*tensors, routing, TARGETS["sm_90"])


def test_stacks_beyond_32_bits_are_taken_and_single_experts_are_not() -> None:
    """Where an expert starts is counted in 64 bits, what is inside in 32; the same for rows."""
    _, routing = operands()
    x = torch.empty(12, 2**15, dtype=torch.bfloat16, device="meta")
    for experts, hidden, fits in ((2**7, 2**14, True), (2, 2**15, False)):
        w13 = torch.empty(experts, 2, hidden, 2**15, dtype=torch.bfloat16, device="meta")
        w2 = torch.empty(experts, 2**15, hidden, dtype=torch.bfloat16, device="meta")
        assert w13.numel() > 2**31
        if fits:
            check(x, w13, w2, routing, TARGETS["sm_90"])
        else:
            with pytest.raises(ValueError, match=r"one expert's matrix in 32 bits.*2147483648 an expert.*\"torch\""):
                check(x, w13, w2, routing, TARGETS["sm_90"])


def test_more_rows_than_32_bits_are_refused() -> None:
    """Offsets are 32-bit numbers."""
    tensors, routing = operands()
    routing.token_A = torch.empty(2**31, dtype=torch.int64, device="meta")
    routing.weight_A = None
    with pytest.raises(ValueError, match=r"counts rows in 32 bits, and there are 2147483648.*\"torch\""):
        check(*tensors, routing, TARGETS["sm_90"])
    tensors, routing = operands()
    tensors[0] = torch.empty(1, device="meta", dtype=torch.bfloat16).expand(2**31 + 3, 1)[:, :0].contiguous()
    with pytest.raises(ValueError, match="there are 2147483651"):
        check(*tensors, routing, TARGETS["sm_90"])
