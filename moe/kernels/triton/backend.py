"""The Triton backend of `grouped_mlp`: one autograd function around the kernels.

Only x, the pre-activation and whole numbers are kept for backward; the activation and gathered rows never are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.permute import Combine, clear_behind
from moe.kernels.triton.backward import down_dgrad, dw2, dw13, up_dgrad
from moe.kernels.triton.combine import combine
from moe.kernels.triton.forward import down_fwd, up_fwd
from moe.kernels.triton.launch import INTERPRETER, Target, target_of
from moe.kernels.triton.plan import Plan, make_plan
from moe.kernels.triton.tiles import Tiles, find_tiles
from moe.routing import Routing

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INT32 = 2**31


def grouped_mlp_triton(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing) -> Tensor:
    """See `moe.kernels.grouped_mlp`. Bit for bit the same from run to run.

    Raises:
        ValueError: no GPU (and no interpreter), a type that the kernels do not take, a layout other than contiguous,
            or more rows or elements than 32-bit numbers count.
    """
    target = target_of(x_TD.device)
    check(x_TD, w13_E2FD, w2_EDF, routing, target)
    rows = x_TD.shape[0] if routing.token_A is None else routing.token_A.shape[0]
    num_experts, _, hidden, width = w13_E2FD.shape
    tiles = find_tiles(target, x_TD.dtype, width, hidden, rows / num_experts)
    return grouped_mlp_on(x_TD, w13_E2FD, w2_EDF, routing, tiles, target)


def grouped_mlp_on(
    x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing, tiles: Tiles, target: Target
) -> Tensor:
    """`grouped_mlp_triton` of checked operands, with given tiles, as on a given target."""
    return _GroupedMLP.apply(
        x_TD, w13_E2FD, w2_EDF, routing.weight_A, routing.token_A, routing.offsets_E, routing.capacity, tiles, target
    )


def check(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing, target: Target) -> None:
    """Refuse, of operands that fit together, what these kernels would compute wrongly or not at all.

    Raises:
        ValueError: see `grouped_mlp_triton`.
    """
    otherwise = 'or choose backend = "torch"'
    if x_TD.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"the triton backend computes in {names}, not in {x_TD.dtype}: cast, {otherwise}")
    if target == INTERPRETER and x_TD.dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter multiplies the bit patterns of bfloat16 as if they were numbers: use float16 or "
            f"float32 there, {otherwise}"
        )
    operands = {"x": x_TD, "w13": w13_E2FD, "w2": w2_EDF, "weight_A": routing.weight_A, "token_A": routing.token_A}
    for name, operand in operands.items():
        if operand is not None and not operand.is_contiguous():
            raise ValueError(
                f"the triton backend wants {name} contiguous; its shape is {tuple(operand.shape)} with strides "
                f"{operand.stride()}: call .contiguous() on it, {otherwise}"
            )
    rows = x_TD.shape[0] if routing.token_A is None else routing.token_A.shape[0]
    # Rows and experts start at 64-bit addresses; what lies between two such starts is counted in 32 bits.
    if (most := max(rows, x_TD.shape[0])) >= _INT32:
        raise ValueError(f"the triton backend counts rows in 32 bits, and there are {most}: use fewer, {otherwise}")
    if w13_E2FD[:1].numel() >= _INT32:
        raise ValueError(
            f"the triton backend counts the elements of one expert's matrix in 32 bits, and w13 of shape "
            f"{tuple(w13_E2FD.shape)} has {w13_E2FD[:1].numel()} an expert: use narrower experts, {otherwise}"
        )


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
        tiles: Tiles,
        target: Target,
    ) -> Tensor:
        rows = x_TD.shape[0] if token_A is None else token_A.shape[0]
        if rows == 0:  # all experts are empty: nothing to launch
            ctx.save_for_backward(x_TD, w13_E2FD, w2_EDF, weight_A)
            return torch.zeros_like(x_TD)
        plan = make_plan(offsets_E, capacity, rows, tiles.block_m)
        hidden_AH, act_AF = up_fwd(x_TD, w13_E2FD, token_A, rows, plan, tiles.by_kernel["up_fwd"], target)
        out_AD = down_fwd(act_AF, w2_EDF, plan, tiles.by_kernel["down_fwd"], target)
        order = None if token_A is None else Combine.by_token(token_A, x_TD.shape[0])
        by_token = (None, None) if order is None else (order.order_A, order.start_T)
        # Every tensor goes through save_for_backward, so that recompute and offload hooks see one consistent set.
        ctx.save_for_backward(
            x_TD, w13_E2FD, w2_EDF, weight_A, token_A, offsets_E, plan.tiles_N2, plan.count_1, *by_token, hidden_AH
        )
        ctx.bound, ctx.capacity, ctx.tiles, ctx.target = plan.bound, plan.capacity, tiles, target
        if order is not None:
            return combine(out_AD, weight_A, order.order_A, order.start_T)
        if weight_A is not None:
            out_AD.mul_(weight_A.to(out_AD.dtype)[:, None])
        clear_behind(offsets_E, capacity, out_AD)
        return out_AD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if len(ctx.saved_tensors) == 4:
            zeros = (None if tensor is None else torch.zeros_like(tensor) for tensor in ctx.saved_tensors)
            return *zeros, None, None, None, None, None
        x_TD, w13_E2FD, w2_EDF, weight_A, token_A, offsets_E, tiles_N2, count_1, order_A, start_T, hidden_AH = (
            ctx.saved_tensors
        )
        plan = Plan(offsets_E, ctx.capacity, ctx.tiles.block_m, ctx.bound, tiles_N2, count_1)
        tile, target = ctx.tiles.by_kernel, ctx.target
        dout_TD = grads[0].contiguous()  # that of a plain sum is expanded
        dhidden_AH, act_AF, dweight_A = down_dgrad(
            dout_TD, w2_EDF, hidden_AH, weight_A, token_A, plan, tile["down_dgrad"], target
        )
        wants_x, wants_w13, wants_w2, _ = ctx.needs_input_grad[:4]
        dx_TD = dw13_E2FD = dw2_EDF = None
        if wants_w2:
            dw2_EDF = dw2(dout_TD, act_AF, token_A, plan, tile["dw2"], target)
        if wants_w13:
            dw13_E2FD = dw13(dhidden_AH, x_TD, token_A, plan, tile["dw13"], target).view_as(w13_E2FD)
        if wants_x:
            dx_TD = up_dgrad(dhidden_AH, w13_E2FD, plan, tile["up_dgrad"], target)
        if order_A is not None:
            dx_TD = None if dx_TD is None else combine(dx_TD, None, order_A, start_T)
        else:
            clear_behind(offsets_E, plan.capacity or None, dx_TD, dweight_A)
        if weight_A is not None and dweight_A is not None:
            dweight_A = dweight_A.to(weight_A.dtype)
        return dx_TD, dw13_E2FD, dw2_EDF, dweight_A, None, None, None, None, None
