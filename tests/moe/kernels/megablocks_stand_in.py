"""`megablocks.ops` and `grouped_gemm.ops` on a CPU, as far as the backend calls them, written from their contract.

Every call checks what the packages check or silently rely on, and computes by a plain loop. Memory that the packages
leave uninitialised holds NaN here.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

CALLS: list[str] = []
"""Names of the functions called since `install`."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import megablocks.ops` and `import grouped_gemm.ops` find this module's functions, for one test."""
    CALLS.clear()
    for package, functions in (("megablocks", {"gather": gather, "scatter": scatter}), ("grouped_gemm", {"gmm": gmm})):
        parent, ops = ModuleType(package), ModuleType(f"{package}.ops")
        vars(ops).update(functions)
        parent.ops = ops
        monkeypatch.setitem(sys.modules, package, parent)
        monkeypatch.setitem(sys.modules, f"{package}.ops", ops)


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """Each run of a's rows times its own matrix of b."""
    CALLS.append("gmm")
    return _Gmm.apply(a, b, batch_sizes, trans_b)


def gather(*arguments: Any) -> Tensor:
    """(x, indices, bin_ids, bins, top_k), by position: the original is an autograd function's `apply`."""
    CALLS.append("gather")
    return _Gather.apply(*arguments)


def scatter(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """The weighted sum of each token's `top_k` rows."""
    CALLS.append("scatter")
    return _Scatter.apply(x, indices, bin_ids, weights, bins, top_k)


class _Gmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool) -> Tensor:
        ctx.save_for_backward(a, b, batch_sizes)
        ctx.trans_b = trans_b
        return _runs_times(a, b, batch_sizes, trans_b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b, batch_sizes = ctx.saved_tensors
        grad = grads[0].contiguous()
        da = _runs_times(grad, b, batch_sizes, not ctx.trans_b) if ctx.needs_input_grad[0] else None
        left, right = (grad, a) if ctx.trans_b else (a, grad)
        db = _runs_outer(left, right, batch_sizes) if ctx.needs_input_grad[1] else None
        return da, db, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(indices, bin_ids, bins)
        ctx.top_k = top_k
        return _spread(x, indices, bin_ids, None, bins, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        indices, bin_ids, bins = ctx.saved_tensors
        return _collect(grads[0].contiguous(), indices, bin_ids, None, bins, ctx.top_k), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int
    ) -> Tensor:
        ctx.save_for_backward(x, indices, bin_ids, weights, bins)
        ctx.top_k = top_k
        return _collect(x, indices, bin_ids, weights, bins, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, indices, bin_ids, weights, bins = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx = _spread(grad, indices, bin_ids, weights, bins, ctx.top_k)
        if not ctx.needs_input_grad[3]:
            return dx, None, None, None, None, None
        dweights = torch.full(indices.shape, math.nan, dtype=x.dtype)  # in the dtype of the rows, not of the weights
        for row, place in enumerate(indices.tolist()):
            dweights[place] = (x[row].float() * grad[place // ctx.top_k].float()).sum()
        return dx, None, None, dweights, None, None


def _runs_times(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool) -> Tensor:
    _check_gmm(a, b, batch_sizes)
    assert b.ndim == 3 and b.shape[0] == batch_sizes.shape[0]
    b = b.transpose(1, 2) if trans_b else b
    assert a.shape[1] == b.shape[1]
    out = torch.full((a.shape[0], b.shape[2]), math.nan, dtype=a.dtype)
    end = 0
    for expert, size in enumerate(batch_sizes.tolist()):
        start, end = end, end + size
        out[start:end] = a[start:end].float() @ b[expert].float()
    return out


def _runs_outer(left: Tensor, right: Tensor, batch_sizes: Tensor) -> Tensor:
    _check_gmm(left, right, batch_sizes)
    assert right.ndim == 2 and left.shape[0] == right.shape[0]
    out = torch.full((batch_sizes.shape[0], left.shape[1], right.shape[1]), math.nan, dtype=left.dtype)
    end = 0
    for expert, size in enumerate(batch_sizes.tolist()):
        start, end = end, end + size
        out[expert] = left[start:end].float().T @ right[start:end].float()
    return out


def _check_gmm(a: Tensor, b: Tensor, batch_sizes: Tensor) -> None:
    assert a.dtype == b.dtype == torch.bfloat16
    assert a.is_contiguous() and b.is_contiguous()
    assert a.ndim == 2 and a.shape[0] > 0, "the CUTLASS build refuses a product of no rows at all"
    assert a.shape[-1] % 8 == b.shape[-1] % 8 == b.shape[-2] % (8 if b.ndim == 3 else 1) == 0
    assert batch_sizes.dtype == torch.int64 and batch_sizes.ndim == 1 and batch_sizes.device.type == "cpu"
    assert batch_sizes.min() >= 0 and batch_sizes.sum() == a.shape[0]


def _spread(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """(tokens, X) -> (tokens * top_k, X): row i is token `indices[i] // top_k`."""
    assert indices.shape[0] == x.shape[0] * top_k
    _check_copy(x, indices, bin_ids, weights, bins)
    out = torch.full((indices.shape[0], x.shape[1]), math.nan, dtype=x.dtype)
    for row, place in enumerate(indices.tolist()):
        scale = 1 if weights is None else weights[place].float()
        out[_row_of(row, bin_ids, bins)] = x[place // top_k].float() * scale
    return out


def _collect(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """(tokens * top_k, X) -> (tokens, X): row i goes to slot `indices[i]`, and each token's slots are added up."""
    _check_copy(x, indices, bin_ids, weights, bins)
    tokens = indices.shape[0] // top_k
    out = torch.full((tokens, top_k, x.shape[1]), math.nan, dtype=x.dtype)
    for row, place in enumerate(indices.tolist()):
        scale = 1 if weights is None else weights[place].float()
        out.view(tokens * top_k, -1)[place] = x[_row_of(row, bin_ids, bins)].float() * scale
    return out.sum(dim=1) if top_k > 1 else out.view(tokens, x.shape[1])


def _row_of(row: int, bin_ids: Tensor, bins: Tensor) -> int:
    """Where a sorted assignment's row lies: its run's start, and its own place in the run."""
    expert = int(bin_ids[row])
    start = int(bins[expert - 1]) if expert else 0
    assert start <= row < int(bins[expert])
    return start + (row - start)


def _check_copy(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor) -> None:
    assert x.ndim == 2 and x.is_contiguous()
    assert indices.ndim == bin_ids.ndim == bins.ndim == 1 and indices.shape == bin_ids.shape
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (indices, bin_ids, bins))
    if weights is not None:
        assert weights.shape == indices.shape and weights.is_contiguous()
