"""Which of the tokens' choices an expert with a limited capacity keeps.

Every rule here is a queue in front of each expert: it orders the choices of that expert, and the first C are kept.
They differ in the order only.

| order | an expert serves | from |
|---|---|---|
| position | its tokens in token order | Switch (Fedus et al. 2022) |
| choice | all first choices in token order, then all second choices, ... | GShard (Lepikhin et al. 2021) |
| score | its highest scores | Megatron-LM's drop policy "probs" |
| priority | as "choice", but tokens are visited by falling largest score | V-MoE (Riquelme et al. 2021) |

Only "position" is causal for every k ("choice" is the same rule where a token has one choice): in the others a later
token can take the place of an earlier one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

DropOrder = Literal["position", "choice", "score", "priority"]


def token_choice_capacity(capacity_factor: float, tokens_G11: Tensor, experts_per_token: int, experts: int) -> Tensor:
    """Places of every expert of a group, C = ceil(factor * N * k / E) (Fedus et al. 2022, eq. 3, with k choices).

    Args:
        capacity_factor: 1 gives every expert its fair share.
        tokens_G11: N, valid tokens of each group.
        experts_per_token: k.
        experts: E.

    Returns:
        fp64 (G, 1, 1), whole numbers.
    """
    slots_G11 = capacity_factor * tokens_G11.double() * experts_per_token / experts
    # 1.1 * 200 / 4 is 55, and a hair more in floating point: shave the hair off before rounding up.
    return torch.ceil(slots_G11 * (1 - 1e-12))


def within_capacity(
    chosen_GNE: Tensor,
    scores_GNE: Tensor,
    capacity_G11: Tensor,
    order: DropOrder,
    valid_GN: Tensor | None = None,
) -> Tensor:
    """The choices that fit, by the rules at the top of this file.

    Of equal scores the lowest token index is served first and the lowest expert index is the earlier choice. NaN
    counts as the highest score. No loop, no host synchronisation, static shapes.

    Args:
        chosen_GNE: bool, what each token asks for; any number of experts a token.
        scores_GNE: what ranks a token's choices, and the tokens of an expert; only the values of choices matter.
        capacity_G11: places of every expert in each group.
        order: who is served first.
        valid_GN: bool, False at padding, which takes no place.

    Returns:
        bool (G, N, E), a part of `chosen_GNE`.
    """
    if valid_GN is not None:
        chosen_GNE = chosen_GNE & valid_GN[..., None]
    if order == "position":
        place_GNE = chosen_GNE.cumsum(1)
    elif order == "score":
        place_GNE = _place(chosen_GNE, _falling(scores_GNE, 1), 1)
    else:
        # 1 for a token's first choice, 2 for its second, ...
        choice_GNE = _place(chosen_GNE, _falling(scores_GNE, -1), -1)
        if order == "priority":
            visit_GN = _falling(scores_GNE.where(chosen_GNE, -torch.inf).amax(-1), 1)
        else:
            visit_GN = torch.arange(choice_GNE.shape[1], device=choice_GNE.device).expand(choice_GNE.shape[:2])
        visit_GNE = visit_GN[..., None].expand_as(choice_GNE)
        # Stable: within the first choices (and so on) the order of the visit stays.
        queue_GNE = choice_GNE.gather(1, visit_GNE).sort(dim=1, stable=True).indices
        place_GNE = _place(chosen_GNE, visit_GNE.gather(1, queue_GNE), 1)
    return chosen_GNE & (place_GNE <= capacity_G11)


def _falling(values: Tensor, dim: int) -> Tensor:
    """Indices that sort from the largest to the smallest; of equals the lowest index first."""
    return values.sort(dim=dim, descending=True, stable=True).indices


def _place(chosen_GNE: Tensor, queue_GNE: Tensor, dim: int) -> Tensor:
    """Each choice's place, from 1, among the choices along `dim`, which are visited in the order `queue_GNE`."""
    place_GNE = chosen_GNE.gather(dim, queue_GNE).cumsum(dim)
    return torch.empty_like(place_GNE).scatter_(dim, queue_GNE, place_GNE)
