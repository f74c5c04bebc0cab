# Triton reads annotations as types of its own, so kernels have none but `tl.constexpr`.
# mypy: allow-untyped-defs

"""Routing decisions as kernels: softmax with top-k, and expert choice's selection. Ties go to the lowest index.

They decide exactly what `moe/routers/selection.py` decides on the same scores, in one launch each and without 64-bit
keys, sorts or copies. No router calls them yet: a decision that is not the same on a CPU and on a GPU would be worse
than a slow one, and that needs a GPU to show.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.triton.launch import launch

MOST_EXPERTS = 512
BLOCK_N = 1024  # tokens of one step of the selection


@triton.jit(do_not_specialize=["num_tokens"])
def softmax_top_k_kernel(
    logits_ptr,
    scores_ptr,
    mask_ptr,
    num_tokens,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """logits (T, E) -> scores (T, E) in fp32, and int8 mask (T, E) of each token's k largest scores."""
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert_E = tl.arange(0, BLOCK_E)
    mask = (token_T < num_tokens)[:, None] & (expert_E < E)[None, :]
    place = token_T.to(tl.int64)[:, None] * E + expert_E[None, :]
    logits_TE = tl.load(logits_ptr + place, mask=mask, other=-float("inf")).to(tl.float32)
    # A token past the end has no logits at all, and the difference of two infinities is no number.
    largest_T = tl.where(token_T < num_tokens, tl.max(logits_TE, 1), 0.0)
    exp_TE = tl.exp(logits_TE - largest_T[:, None])
    scores_TE = exp_TE / tl.where(token_T < num_tokens, tl.sum(exp_TE, 1), 1.0)[:, None]
    tl.store(scores_ptr + place, scores_TE, mask=mask)
    # Scores are in [0, 1]. As in `top_k_mask` NaN is the largest; what is taken, or does not exist, falls below all.
    rest_TE = tl.where(scores_TE == scores_TE, scores_TE, 2.0)
    rest_TE = tl.where((expert_E < E)[None, :], rest_TE, -1.0)
    for _ in tl.static_range(TOP_K):
        best_T = tl.argmax(rest_TE, 1, tie_break_left=True)
        rest_TE = tl.where(expert_E[None, :] == best_T[:, None], -1.0, rest_TE)
    tl.store(mask_ptr + place, (rest_TE < 0).to(tl.int8), mask=mask)


@triton.jit
def ordered_bits(value):
    """uint32 that rises as fp32 values do; the two zeros are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats fall as their bits rise
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit(do_not_specialize=["size", "count"])
def largest_per_row_kernel(values_ptr, index_ptr, kth_ptr, size, count, BLOCK: tl.constexpr):
    """values (X, N) -> index (X, C) of each row's C largest in rising order, and kth (X,), the smallest of them."""
    row = tl.program_id(0).to(tl.int64)
    values = values_ptr + row * size
    lane = tl.arange(0, BLOCK)
    # The largest number that at least `count` values reach, bit by bit: that is the bits of the count-th largest.
    cutoff = tl.full((), 0, tl.uint32)
    for bit in tl.range(0, 32):
        tried = cutoff | (tl.full((), 0x80000000, tl.uint32) >> bit)
        reached = tl.full((), 0, tl.int32)
        for start in tl.range(0, size, BLOCK):
            exists = start + lane < size
            bits = ordered_bits(tl.load(values + start + lane, mask=exists, other=0.0))
            reached += tl.sum((exists & (bits >= tried)).to(tl.int32), 0)
        cutoff = tl.where(reached >= count, tried, cutoff)
    above = tl.full((), 0, tl.int32)
    for start in tl.range(0, size, BLOCK):
        exists = start + lane < size
        bits = ordered_bits(tl.load(values + start + lane, mask=exists, other=0.0))
        above += tl.sum((exists & (bits > cutoff)).to(tl.int32), 0)
    # All above the cutoff, and of those at it the first ones.
    wanted = count - above
    placed = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    smallest = tl.full((), float("inf"), tl.float32)
    for start in tl.range(0, size, BLOCK):
        exists = start + lane < size
        value = tl.load(values + start + lane, mask=exists, other=0.0)
        bits = ordered_bits(value)
        tied = (exists & (bits == cutoff)).to(tl.int32)
        kept = exists & ((bits > cutoff) | ((tied > 0) & (equal + tl.cumsum(tied, 0) <= wanted)))
        place = placed + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(index_ptr + row * count + place, (start + lane).to(tl.int64), mask=kept)
        placed += tl.sum(kept.to(tl.int32), 0)
        equal += tl.sum(tied, 0)
        smallest = tl.minimum(smallest, tl.min(tl.where(kept, value, float("inf")), 0))
    tl.store(kth_ptr + row, smallest)


def softmax_top_k(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Softmax over experts and each token's k best, in one pass.

    Args:
        logits_TE: fp32, contiguous, at most 512 experts.
        k: experts of a token.

    Returns:
        (scores_TE: fp32, differentiable; chosen_TE: bool, of equal scores the lowest expert, NaN the largest).

    Raises:
        ValueError: too many experts, or not that many to choose; another type or layout.
    """
    _require_plain("logits", logits_TE)
    num_experts = logits_TE.shape[1]
    if num_experts > MOST_EXPERTS or not 0 < k <= num_experts:
        raise ValueError(
            f"softmax_top_k takes up to {MOST_EXPERTS} experts and k from 1 to their number, not {num_experts} and "
            f"k = {k}: use logits.softmax(-1) and moe.routers.selection.top_k_mask"
        )
    return _SoftmaxTopK.apply(logits_TE, k)


def largest_per_row(values_XN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same as `moe.routers.selection.largest_per_row`.

    Args:
        values_XN: fp32, contiguous, finite or -inf, any leading shape X.
        count: how many, from 1 to N.

    Returns:
        (index_XC int64 in rising order, kth_X: the smallest value kept).

    Raises:
        ValueError: not that many to keep; another type or layout.
    """
    _require_plain("values", values_XN)
    *leading, size = values_XN.shape
    if not 0 < count <= size:
        raise ValueError(f"count = {count} of {size} values: must be from 1 to their number")
    index_XC = values_XN.new_empty(*leading, count, dtype=torch.int64)
    kth_X = values_XN.new_empty(leading)
    launch(
        "largest_per_row",
        largest_per_row_kernel,
        (kth_X.numel(),),
        4,
        1,
        values_ptr=values_XN,
        index_ptr=index_XC,
        kth_ptr=kth_X,
        size=size,
        count=count,
        BLOCK=min(BLOCK_N, triton.next_power_of_2(size)),
    )
    return index_XC, kth_X


def _require_plain(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous float32 for this kernel, and are {tensor.dtype} with strides "
            f"{tensor.stride()}: use .float().contiguous()"
        )


class _SoftmaxTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        num_tokens, num_experts = logits_TE.shape
        scores_TE, mask_TE = torch.empty_like(logits_TE), torch.empty_like(logits_TE, dtype=torch.int8)
        block_e = triton.next_power_of_2(num_experts)
        block_t = max(1, 2048 // block_e)
        launch(
            "softmax_top_k",
            softmax_top_k_kernel,
            (triton.cdiv(num_tokens, block_t),),
            4,
            1,
            logits_ptr=logits_TE,
            scores_ptr=scores_TE,
            mask_ptr=mask_TE,
            num_tokens=num_tokens,
            E=num_experts,
            TOP_K=k,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
        )
        chosen_TE = mask_TE.view(torch.bool)
        ctx.mark_non_differentiable(chosen_TE)
        ctx.save_for_backward(scores_TE)
        return scores_TE, chosen_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (scores_TE,) = ctx.saved_tensors
        return torch._softmax_backward_data(grads[0], scores_TE, 1, scores_TE.dtype), None
