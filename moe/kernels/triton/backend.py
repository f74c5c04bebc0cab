"""The Triton kernels behind `grouped_mlp`: six products, each with what surrounds it fused in, and sums by token.

Kept for backward are the inputs, the pre-activation and the order of assignments. No kernel adds with atomics, so
results are the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from moe.kernels.permute import Combine
from moe.kernels.tile import Tile, target_of, tiles_for, uses_tma
from moe.kernels.triton import backward, forward
from moe.kernels.triton.plan import Plan, blocks_of, programs, suits_tma
from moe.routing import Routing

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST = 2**31 - 1  # rows, and elements of one expert's matrix: what is indexed with 32 bits
COMBINE_BLOCK = 1024


def grouped_mlp_triton(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing) -> Tensor:
    """See `moe.kernels.grouped_mlp`.

    Raises:
        ValueError: for inputs that the kernels cannot take; names a backend that can.
    """
    check(x_TD, w13_E2FD, w2_EDF, routing)
    return _GroupedMLP.apply(
        x_TD, w13_E2FD, w2_EDF, routing.weight_A, routing.token_A, routing.offsets_E, routing.capacity
    )


def check(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing) -> None:
    """Refuse what the kernels cannot take, before one is started."""
    tensors = {"x": x_TD, "w13": w13_E2FD, "w2": w2_EDF}
    other = 'moe.backend = "torch" takes it'
    if x_TD.dtype not in DTYPES:
        raise ValueError(f"the triton backend computes in fp16, bf16 or fp32, not {x_TD.dtype}: {other}")
    for name, tensor in tensors.items():
        if tensor.dtype != x_TD.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and x {x_TD.dtype}: all must have one dtype")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: the triton backend wants it contiguous; {other}")
        if tensor.device != x_TD.device:
            raise ValueError(f"{name} is on {tensor.device} and x on {x_TD.device}")
    if x_TD.device.type != "cuda" and not is_interpreted():
        raise ValueError(
            f'the triton backend needs a GPU, x is on {x_TD.device}: set moe.backend = "torch" (or TRITON_INTERPRET=1 '
            "in the environment, to follow the kernels slowly in the interpreter)"
        )
    require_countable("rows", x_TD.shape[0] if routing.token_A is None else routing.token_A.shape[0])
    require_countable("elements of an expert's w13", w13_E2FD[0].numel())


def require_countable(what: str, size: int) -> None:
    """Refuse more than 32 bits can count, where the kernels count in 32 bits."""
    if size > LARGEST:
        raise ValueError(
            f"{size} {what}: the triton backend counts them in 32 bits, at most {LARGEST}; "
            'moe.backend = "torch" takes it'
        )


def is_interpreted() -> bool:
    """Whether these kernels run in Triton's interpreter; it was decided when they were imported."""
    return not isinstance(forward.up_fwd, triton.JITFunction)


class Groups:
    """How rows lie in one call: what every kernel is told, and its plan of tiles."""

    def __init__(self, x_TD: Tensor, token_A: Tensor | None, offsets_E: Tensor, capacity: int | None) -> None:
        self.token_A, self.offsets_E, self.capacity = token_A, offsets_E, capacity
        self.rows = x_TD.shape[0] if token_A is None else token_A.shape[0]
        self.experts, self.device = offsets_E.shape[0], x_TD.device
        self.target = target_of(x_TD.device)
        self.tiles = tiles_for(self.target, self.rows // self.experts)
        self._plans: dict[int, Plan] = {}

    def plan(self, tile: Tile) -> Plan:
        """Tiles of so many rows; made once."""
        if tile.BM not in self._plans:
            self._plans[tile.BM] = Plan.of(self.offsets_E, self.capacity, self.rows, tile.BM)
        return self._plans[tile.BM]

    def launch(self, kernel: Any, tile: Tile, columns: int, before: tuple[object, ...], **constants: object) -> None:
        """Start a kernel over tiles of rows; its arguments are `before`, and the plan's."""
        plan = self.plan(tile)
        if not plan.tiles:
            return
        grid = programs(self.device, plan.tiles * triton.cdiv(columns, tile.BN))
        kernel[(grid,)](
            *before, self.offsets_E, plan.expert_M, plan.row_M, plan.capacity, plan.tiles,
            EQUAL=self.capacity is not None, **constants,
        )  # fmt: skip

    def rows_times(self, name: str, rows_AX: Tensor, w_EXY: Tensor, transposed: bool) -> Tensor:
        """(A, X) -> (A, Y): each row times its expert's matrix. Zeros in rows behind the last expert's."""
        tile, tma = self.tiles[name], self.tma(w_EXY, rows_AX)
        x, y = w_EXY.shape[1:] if not transposed else (w_EXY.shape[2], w_EXY.shape[1])
        block = (tile.BN, tile.BK) if transposed else (tile.BK, tile.BN)
        out_AY = self.new_rows(rows_AX, y)
        if not self.rows:
            return out_AY
        rows = blocks_of(rows_AX, tma, tile.BM, tile.BK)
        self.launch(
            forward.rows_times, tile, y, (rows, blocks_of(w_EXY, tma, 1, *block), out_AY),
            X=x, Y=y, TRANSPOSED=transposed, TMA=tma, **tile.options(subtiles=True),
        )  # fmt: skip
        return out_AY

    def outer(self, name: str, left: Tensor, right: Tensor, gather: str) -> Tensor:
        """Sum over each expert's rows of left times right, (E, X, Y); the side named by `gather` is by token."""
        tile, x, y = self.tiles[name], left.shape[1], right.shape[1]
        out_EXY = left.new_empty(self.experts, x, y)
        gathers = self.token_A is not None
        token_A = self.token_A if gathers else self.offsets_E
        count = self.experts * triton.cdiv(x, tile.BM) * triton.cdiv(y, tile.BN)
        backward.outer[(programs(self.device, count),)](
            left, right, token_A, self.offsets_E, out_EXY, self.experts,
            X=x, Y=y, GATHER_LEFT=gathers and gather == "left", GATHER_RIGHT=gathers and gather == "right",
            **tile.options(),
        )  # fmt: skip
        return out_EXY

    def new_rows(self, like: Tensor, width: int) -> Tensor:
        """(A, width), with zeros where rows are handed over that may belong to no expert."""
        make = like.new_zeros if self.token_A is None else like.new_empty
        return make(self.rows, width)

    def tma(self, *tensors: Tensor) -> bool:
        """Whether these are loaded through descriptors."""
        return uses_tma(self.target) and suits_tma(*tensors)


def _combine(rows_AD: Tensor, weight_A: Tensor | None, order: Combine, tokens: int) -> Tensor:
    width = rows_AD.shape[1]
    out_TD = rows_AD.new_empty(tokens, width)
    block = min(COMBINE_BLOCK, triton.next_power_of_2(width))
    if tokens:
        forward.combine[(tokens, triton.cdiv(width, block))](
            rows_AD, rows_AD if weight_A is None else weight_A, order.order_A, order.start_T, out_TD,
            tokens, rows_AD.shape[0], D=width, WEIGHTED=weight_A is not None, BLOCK=block,
        )  # fmt: skip
    return out_TD


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        w13_E2FD: Tensor,
        w2_EDF: Tensor,
        weight_A: Tensor | None,
        token_A: Tensor | None,
        offsets_E: Tensor,
        capacity: int | None,
    ) -> Tensor:
        groups = Groups(x_TD, token_A, offsets_E, capacity)
        tile, width, expert_width = groups.tiles["up_fwd"], x_TD.shape[1], w2_EDF.shape[2]
        w13_EHD = w13_E2FD.flatten(1, 2)
        hidden_AH = x_TD.new_empty(groups.rows, 2 * expert_width)
        act_AF = x_TD.new_empty(groups.rows, expert_width)
        tma = groups.tma(w13_EHD)
        groups.launch(
            forward.up_fwd, tile, expert_width,
            (x_TD, offsets_E if token_A is None else token_A, blocks_of(w13_EHD, tma, 1, tile.BN, tile.BK),
             hidden_AH, act_AF),
            D=width, F=expert_width, GATHER=token_A is not None, TMA=tma, **tile.options(),
        )  # fmt: skip
        out_AD = groups.rows_times("down_fwd", act_AF, w2_EDF, transposed=True)
        combine = None if token_A is None else Combine.by_token(token_A, x_TD.shape[0])
        order = (None, None) if combine is None else (combine.order_A, combine.start_T)
        # Every tensor goes through save_for_backward, so that recompute and offload hooks see one consistent set.
        ctx.save_for_backward(x_TD, w13_E2FD, w2_EDF, weight_A, token_A, offsets_E, *order, hidden_AH)
        ctx.capacity = capacity
        if combine is not None:
            return _combine(out_AD, weight_A, combine, x_TD.shape[0])
        return out_AD if weight_A is None else out_AD * weight_A.to(out_AD.dtype)[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, w13_E2FD, w2_EDF, weight_A, token_A, offsets_E, order_A, start_T, hidden_AH = ctx.saved_tensors
        dout_TD = grads[0].contiguous()  # a plain sum's gradient is one element, expanded
        groups = Groups(x_TD, token_A, offsets_E, ctx.capacity)
        tile, width, expert_width = groups.tiles["down_dgrad"], x_TD.shape[1], w2_EDF.shape[2]
        parts = triton.cdiv(expert_width, tile.BN)
        dhidden_AH = torch.empty_like(hidden_AH)
        scaled_AF = hidden_AH.new_empty(groups.rows, expert_width)
        dweight_AN = None
        if weight_A is not None:
            dweight_AN = torch.zeros(groups.rows, parts, dtype=torch.float32, device=x_TD.device)
        tma = groups.tma(w2_EDF)
        unused = offsets_E
        groups.launch(
            backward.down_dgrad, tile, expert_width,
            (dout_TD, unused if token_A is None else token_A, blocks_of(w2_EDF, tma, 1, tile.BK, tile.BN), hidden_AH,
             unused if weight_A is None else weight_A, dhidden_AH, scaled_AF,
             unused if dweight_AN is None else dweight_AN),
            D=width, F=expert_width, GATHER=token_A is not None, WEIGHTED=weight_A is not None, TMA=tma,
            **tile.options(subtiles=True),
        )  # fmt: skip
        dweight_A = None
        if dweight_AN is not None and weight_A is not None:
            dweight_A = dweight_AN.sum(1).to(weight_A.dtype)
        dw2_EDF = groups.outer("dw2", dout_TD, scaled_AF, gather="left")
        dw13_EHD = groups.outer("dw13", dhidden_AH, x_TD, gather="right")
        drows_AD = groups.rows_times("up_dgrad", dhidden_AH, w13_E2FD.flatten(1, 2), transposed=False)
        dx_TD = drows_AD if order_A is None else _combine(drows_AD, None, Combine(order_A, start_T), x_TD.shape[0])
        return dx_TD, dw13_EHD.view_as(w13_E2FD), dw2_EDF, dweight_A, None, None, None
