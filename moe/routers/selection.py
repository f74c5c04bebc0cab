"""Selecting the largest, with ties broken the same way everywhere: the lowest index wins."""

from __future__ import annotations

import torch
from torch import Tensor

_MAXIMA_UP_TO = 8


def largest_per_row(values_XN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices of the `count` largest values along the last dimension, in rising order of index.

    `torch.topk` does not say which of equal values it returns; here the lowest indices are kept, because no two keys
    are equal: the value's bits, ordered as the values are, above the index from the end. All shapes are static and
    nothing synchronises with the host.

    Args:
        values_XN: fp32, finite or -inf, any leading shape X. Where NaN ranks is not defined.
        count: how many, at most N.

    Returns:
        (index_XC int64, kth_X: the smallest value kept).
    """
    size = values_XN.shape[-1]
    bits_XN = (values_XN + 0.0).view(torch.int32)  # the sum makes one zero of two
    ordered_XN = bits_XN ^ ((bits_XN >> 31) & 0x7FFFFFFF)  # negative floats fall as their bits rise
    from_end_N = torch.arange(size - 1, -1, -1, device=values_XN.device)
    key_XN = (ordered_XN.long() << 32) | from_end_N
    index_XC = key_XN.topk(count, dim=-1, sorted=False).indices.sort(-1).values
    return index_XC, values_XN.gather(-1, index_XC).amin(-1)


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
