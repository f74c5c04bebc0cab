"""Rows to assignments and back: gathers and weighted sums whose order is fixed, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Combine:
    """Sums of rows by token in a fixed order: each token's assignments, lowest expert first.

    Attributes:
        order_A: assignments sorted by token.
        start_T: where each token's assignments start in that order.
    """

    def __init__(self, order_A: Tensor, start_T: Tensor) -> None:
        self.order_A, self.start_T = order_A, start_T

    @classmethod
    def by_token(cls, token_A: Tensor, num_tokens: int) -> Combine:
        """Sort the assignments."""
        order_A = token_A.argsort(stable=True)
        token_T = torch.arange(num_tokens, device=token_A.device, dtype=token_A.dtype)
        return cls(order_A, torch.searchsorted(token_A[order_A], token_T))

    def __call__(self, rows_AD: Tensor, weight_A: Tensor | None = None) -> Tensor:
        """(A, D) -> (T, D): the (weighted) sum of each token's rows, zeros where it has none."""
        weight_A = None if weight_A is None else weight_A.index_select(0, self.order_A).to(rows_AD.dtype)
        return F.embedding_bag(self.order_A, rows_AD, self.start_T, mode="sum", per_sample_weights=weight_A)


def gather_rows(x_TD: Tensor, token_A: Tensor, combine: Combine) -> Tensor:
    """(T, D) -> (A, D): each assignment's token. Backward adds up a token's rows in the order of `combine`."""
    return _Gather.apply(x_TD, token_A, combine.order_A, combine.start_T)


def combine_rows(rows_AD: Tensor, weight_A: Tensor, token_A: Tensor, combine: Combine) -> Tensor:
    """(A, D) -> (T, D): the weighted sum of each token's rows, differentiable in both."""
    return _Combine.apply(rows_AD, weight_A, token_A, combine.order_A, combine.start_T)


def permute_rows(rows_AD: Tensor, order_A: Tensor) -> Tensor:
    """Row `order_A[i]` becomes row i. Backward is a gather too, where indexing's own would add up."""
    return _Permute.apply(rows_AD, order_A)


def inverse_order(order_A: Tensor) -> Tensor:
    """The permutation that undoes `order_A`."""
    index_A = torch.arange(order_A.shape[0], device=order_A.device)
    return torch.empty_like(order_A).scatter_(0, order_A, index_A)


def clear_behind(offsets_E: Tensor, capacity: int | None, *rows: Tensor | None) -> None:
    """Put zeros into the rows behind the last expert's.

    A dispatcher may hand over more rows than it used. Products neither read nor write those, and in memory that was
    used before there may be NaN. The device compares; nothing waits for a number.

    Args:
        offsets_E: int32 end of each expert's rows.
        capacity: rows of every expert, where all have the same: then there are none behind.
        *rows: (A, ...) each, changed in place.
    """
    if capacity is not None:
        return
    given = [tensor for tensor in rows if tensor is not None]
    if not given:
        return
    behind_A = torch.arange(given[0].shape[0], device=offsets_E.device) >= offsets_E[-1]
    for tensor in given:
        tensor.masked_fill_(behind_A.view(-1, *[1] * (tensor.dim() - 1)), 0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_A: Tensor, order_A: Tensor, start_T: Tensor) -> Tensor:
        ctx.save_for_backward(order_A, start_T)
        return x_TD.index_select(0, token_A)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Combine(*ctx.saved_tensors)(grads[0].contiguous()), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_AD: Tensor, weight_A: Tensor, token_A: Tensor, order_A: Tensor, start_T: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_AD, weight_A, token_A)
        return Combine(order_A, start_T)(rows_AD, weight_A)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_AD, weight_A, token_A = ctx.saved_tensors
        dout_AD = grads[0].index_select(0, token_A)
        dweight_A = (dout_AD * rows_AD).sum(1, dtype=torch.promote_types(rows_AD.dtype, torch.float32))
        drows_AD = dout_AD.mul_(weight_A.to(dout_AD.dtype)[:, None])
        return drows_AD, dweight_A.to(weight_A.dtype), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_AD: Tensor, order_A: Tensor) -> Tensor:
        ctx.save_for_backward(order_A)
        return rows_AD.index_select(0, order_A)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order_A,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse_order(order_A)), None
