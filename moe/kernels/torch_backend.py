"""Experts from PyTorch's own grouped and batched products: the CPU path, and the fallback elsewhere.

One autograd function does gather, both projections and combine, so that only the inputs and the pre-activation are
kept for backward; the activation and the gathered rows are made again there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.permute import Combine, clear_behind
from moe.routing import Routing

CACHE_BYTES = 1 << 19  # of pre-activations: with what is made of them, a second-level cache or two


def grouped_mlp_torch(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing) -> Tensor:
    """See `moe.kernels.grouped_mlp`."""
    return _GroupedMLP.apply(
        x_TD, w13_E2FD, w2_EDF, routing.weight_A, routing.token_A, routing.offsets_E, routing.capacity
    )


class Groups:
    """Products of rows that come in one run per expert.

    Equal runs take `bmm`, uneven ones `grouped_mm`. That one wants rows of a multiple of 16 bytes and has no fp64;
    other shapes take a loop.
    """

    def __init__(self, offsets_E: Tensor, capacity: int | None) -> None:
        self.offsets_E, self.capacity = offsets_E, capacity
        self.num_experts = offsets_E.shape[0]

    def rows_times(self, rows_AX: Tensor, weight_EXY: Tensor) -> Tensor:
        """Each run times its expert's matrix: (A, X), (E, X, Y) -> (A, Y)."""
        if self.capacity is None:
            if _suits_grouped_mm(rows_AX, weight_EXY):
                return F.grouped_mm(rows_AX, weight_EXY, offs=self.offsets_E)
            lengths = self._run_lengths()
            used = sum(lengths)
            runs = rows_AX[:used].split(lengths)
            # unbind, not w[e]: one view each, and no search through the experts.
            products = torch.cat([run @ weight for run, weight in zip(runs, weight_EXY.unbind(0), strict=True)])
            return F.pad(products, (0, 0, 0, rows_AX.shape[0] - used))
        shape = (self.num_experts, self.capacity)
        out_AY = rows_AX.new_empty(rows_AX.shape[0], weight_EXY.shape[2])
        # Into place: what leaves the experts' module must not be a view, or FSDP2 cannot hook its backward safely.
        torch.bmm(rows_AX.view(*shape, rows_AX.shape[1]), weight_EXY, out=out_AY.view(*shape, out_AY.shape[1]))
        return out_AY

    def outer(self, left_AX: Tensor, right_AY: Tensor) -> Tensor:
        """Sum over each run of left times right: (A, X), (A, Y) -> (E, X, Y); zeros for an empty run."""
        if self.capacity is None:
            if _suits_grouped_mm(left_AX, right_AY):
                return F.grouped_mm(left_AX.T, right_AY, offs=self.offsets_E)
            lengths = self._run_lengths()
            used = sum(lengths)
            pairs = zip(left_AX[:used].split(lengths), right_AY[:used].split(lengths), strict=True)
            return torch.stack([left.T @ right for left, right in pairs])
        shape = (self.num_experts, self.capacity)
        left_EXC = left_AX.view(*shape, left_AX.shape[1]).transpose(1, 2)
        return torch.bmm(left_EXC, right_AY.view(*shape, right_AY.shape[1]))

    def _run_lengths(self) -> list[int]:
        return self.offsets_E.diff(prepend=self.offsets_E.new_zeros(1)).tolist()


def swiglu(hidden_AH: Tensor) -> Tensor:
    """silu(gate) * up: (A, 2F) -> (A, F)."""
    act_AF = hidden_AH.new_empty(hidden_AH.shape[0], hidden_AH.shape[1] // 2)
    for block in _blocks(hidden_AH):
        gate, up = hidden_AH[block].chunk(2, dim=1)
        act_AF[block].copy_(F.silu(gate).mul_(up))
    return act_AF


def swiglu_backward(
    hidden_AH: Tensor, dact_AF: Tensor, weight_A: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Back through the activation, which is made again.

    Args:
        hidden_AH: (A, 2F) gate and up.
        dact_AF: gradient of the activation, before the combine weight; overwritten.
        weight_A: combine weights.

    Returns:
        (weighted activations, gradient of `hidden_AH`, gradient of the weights).
    """
    act_AF, dhidden_AH = torch.empty_like(dact_AF), torch.empty_like(hidden_AH)
    dweight_A = None
    if weight_A is not None:
        dweight_A = weight_A.new_empty(weight_A.shape, dtype=torch.promote_types(dact_AF.dtype, torch.float32))
    for block in _blocks(hidden_AH):
        gate, up = hidden_AH[block].chunk(2, dim=1)
        dact, act = dact_AF[block], act_AF[block]
        silu = F.silu(gate)
        act.copy_(silu * up)
        if weight_A is not None and dweight_A is not None:
            dweight_A[block] = (dact * act).sum(1, dtype=dweight_A.dtype)
            scale = weight_A[block].to(act.dtype)[:, None]
            act *= scale
            dact *= scale
        dgate, dup = dhidden_AH[block].chunk(2, dim=1)
        dup.copy_(dact * silu)
        dgate.copy_(torch.ops.aten.silu_backward(dact.mul_(up), gate))
    return act_AF, dhidden_AH, None if weight_A is None or dweight_A is None else dweight_A.to(weight_A.dtype)


def _blocks(hidden_AH: Tensor) -> list[slice]:
    """Rows that stay in a CPU's cache from one elementwise pass to the next; elsewhere, and compiled, all at once."""
    if hidden_AH.device.type != "cpu" or torch.compiler.is_compiling():
        return [slice(None)]
    rows, width = hidden_AH.shape
    size = max(16, CACHE_BYTES // (width * hidden_AH.element_size()))
    return [slice(start, start + size) for start in range(0, rows, size)]


def _suits_grouped_mm(*operands: Tensor) -> bool:
    return all(
        operand.dtype != torch.float64
        # Compiled, torch 2.13 knows the shapes of bf16 products only; the loop then leaves the graph.
        and (operand.dtype == torch.bfloat16 or not torch.compiler.is_compiling())
        and min(operand.shape[-2:]) > 1  # the stride of a dimension of size 1 says nothing
        and all(stride * operand.element_size() % 16 == 0 for stride in operand.stride() if stride > 1)
        for operand in operands
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
    ) -> Tensor:
        groups = Groups(offsets_E, capacity)
        combine = None if token_A is None else Combine.by_token(token_A, x_TD.shape[0])
        rows_AD = x_TD.contiguous() if token_A is None else x_TD.index_select(0, token_A)
        hidden_AH = groups.rows_times(rows_AD, w13_E2FD.flatten(1, 2).transpose(1, 2))
        out_AD = groups.rows_times(swiglu(hidden_AH), w2_EDF.transpose(1, 2))
        # Every tensor goes through save_for_backward, so that recompute and offload hooks see one consistent set.
        order = (None, None) if combine is None else (combine.order_A, combine.start_T)
        ctx.save_for_backward(x_TD, w13_E2FD, w2_EDF, weight_A, token_A, offsets_E, *order, hidden_AH)
        ctx.capacity = capacity
        if combine is not None:
            return combine(out_AD, weight_A)
        out_AD = out_AD if weight_A is None else out_AD * weight_A.to(out_AD.dtype)[:, None]
        clear_behind(offsets_E, capacity, out_AD)
        return out_AD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, w13_E2FD, w2_EDF, weight_A, token_A, offsets_E, order_A, start_T, hidden_AH = ctx.saved_tensors
        groups = Groups(offsets_E, ctx.capacity)
        combine = None if order_A is None else Combine(order_A, start_T)
        (dy_TD,) = grads
        wants_x, wants_w13, wants_w2, wants_weight = ctx.needs_input_grad[:4]
        # grouped_mm refuses expanded gradients, as those of a plain sum are.
        dout_AD = dy_TD.contiguous() if token_A is None else dy_TD.index_select(0, token_A)
        # <dout, out> = <dout W2, act>: the weight's gradient needs no second look at the outputs.
        dact_AF = groups.rows_times(dout_AD, w2_EDF)
        act_AF, dhidden_AH, dweight_A = swiglu_backward(hidden_AH, dact_AF, weight_A)
        dx_TD = dw13_E2FD = dw2_EDF = None
        if wants_w2:
            dw2_EDF = groups.outer(dout_AD, act_AF)
        if wants_w13:
            rows_AD = x_TD.contiguous() if token_A is None else x_TD.index_select(0, token_A)
            dw13_E2FD = groups.outer(dhidden_AH, rows_AD).view_as(w13_E2FD)
        if wants_x:
            drows_AD = groups.rows_times(dhidden_AH, w13_E2FD.flatten(1, 2))
            dx_TD = drows_AD if combine is None else combine(drows_AD)
        if combine is None:
            clear_behind(offsets_E, ctx.capacity, dx_TD, dweight_A)
        return dx_TD, dw13_E2FD, dw2_EDF, dweight_A if wants_weight else None, None, None, None
