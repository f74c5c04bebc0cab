"""Selecting the largest, with ties broken the same way everywhere: the lowest index wins."""

from __future__ import annotations

import torch
from torch import Tensor

_MAXIMA_UP_TO = 8


def largest_per_row(values_XN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices of the `count` largest values along the last dimension, in rising order of index.

    `torch.topk` does not say which of equal values it returns; here the lowest indices are kept. All shapes are
    static and nothing synchronises with the host.

    Args:
        values_XN: finite values or -inf, any leading shape X.
        count: how many, at most N.

    Returns:
        (index_XC int64, kth_X: the smallest value kept).
    """
    kth_X1 = values_XN.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_XN = values_XN > kth_X1
    tied_XN = values_XN == kth_X1
    room_X1 = count - above_XN.sum(-1, keepdim=True)
    kept_XN = above_XN | (tied_XN & (tied_XN.cumsum(-1) <= room_X1))
    # The running count of kept entries is each one's slot; the others go to a spare slot that is cut off.
    slot_XN = torch.where(kept_XN, kept_XN.cumsum(-1) - 1, count)
    index_N = torch.arange(values_XN.shape[-1], device=values_XN.device)
    # Zeros, not empty: NaN compares with nothing, and its row must still hold indices that exist.
    index_XC = slot_XN.new_zeros((*values_XN.shape[:-1], count + 1))
    index_XC.scatter_(-1, slot_XN, index_N.expand_as(slot_XN))
    return index_XC[..., :count], kth_X1.squeeze(-1)


def top_k_mask(values_TE: Tensor, k: int) -> Tensor:
    """bool (T, E): the k largest of each row; of equal values the lowest expert index. NaN counts as the largest."""
    mask_TE = torch.zeros_like(values_TE, dtype=torch.bool)
    if k > _MAXIMA_UP_TO:
        return mask_TE.scatter_(1, values_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k], True)
    # Several times quicker than sorting whole rows. `max` is documented to return the first of equals; what is taken
    # becomes -inf, to which nothing else may be equal.
    rest_TE = values_TE.clamp_min(torch.finfo(values_TE.dtype).min)
    for _ in range(k):
        best_T1 = rest_TE.max(-1, keepdim=True).indices
        mask_TE.scatter_(1, best_T1, True)
        rest_TE.scatter_(1, best_T1, -torch.inf)
    return mask_TE


def top_k_distance(values_TE: Tensor, k: int) -> Tensor:
    """How far each value is from the middle between its row's k-th and (k+1)-th largest: (T, E), inf where k = E."""
    if k == values_TE.shape[1]:
        return torch.full_like(values_TE, torch.inf)
    largest_TK = values_TE.topk(k + 1, dim=1).values
    return (values_TE - largest_TK[:, k - 1 :].mean(1, keepdim=True)).abs()
