"""`Routing`, the one currency of this codebase, and the context a forward pass carries.

Every router turns `x_TD` into a `Routing`; dispatch, experts, telemetry and analysis read only that.

Shape suffixes, for the whole project: B batch, S sequence, T tokens (B*S), D model width, E experts, F expert
width, C capacity, K experts per token, A assignments, V vocabulary, H heads, L layers, G routing groups,
N tokens of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor


@dataclass
class Routing:
    """Which token goes to which expert, and with what weight.

    Assignments are sorted by expert, then by token, so that their order is deterministic.

    Attributes:
        token_A: int64 token of each assignment; None when the rows are in expert order already.
        offsets_E: int32 end of each expert's run of assignments.
        weight_A: fp32 combine weight, differentiable; exactly 0 for a slot that holds no valid token. None: all 1.
        num_tokens: T.
        capacity: assignments of every expert when all take the same number, so that shapes are static; else None.
        scores_TE: fp32 scores in [0, 1], differentiable.
        logits_TE: fp32 router logits, differentiable.
        chosen_TE: bool, what the router asked for before any token was dropped; None where nothing can be dropped.
        valid_T: bool, False at padding; None means that all tokens are valid.
    """

    token_A: Tensor | None
    offsets_E: Tensor
    weight_A: Tensor | None
    num_tokens: int
    capacity: int | None = None
    scores_TE: Tensor | None = None
    logits_TE: Tensor | None = None
    chosen_TE: Tensor | None = None
    valid_T: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.offsets_E.shape[0]

    def expert_A(self) -> Tensor:
        """int64 expert of each assignment, shape (A,)."""
        assert self.token_A is not None
        position_A = torch.arange(self.token_A.shape[0], device=self.offsets_E.device, dtype=torch.int32)
        return torch.searchsorted(self.offsets_E, position_A, right=True)

    def assigned_TE(self) -> Tensor:
        """bool (T, E): token t holds a slot of expert e. Slots without a valid token do not count."""
        assert self.token_A is not None
        mask_TE = torch.zeros(self.num_tokens, self.num_experts, dtype=torch.bool, device=self.offsets_E.device)
        mask_TE[self.token_A, self.expert_A()] = True
        return mask_TE if self.valid_T is None else mask_TE & self.valid_T[:, None]

    def counts_E(self) -> Tensor:
        """int64 number of valid tokens that each expert takes."""
        return self.assigned_TE().sum(0)

    def dropped(self) -> Tensor:
        """int64 scalar: assignments that the router asked for and that did not fit."""
        if self.chosen_TE is None:
            return torch.zeros((), dtype=torch.int64, device=self.offsets_E.device)
        return self.chosen_TE.sum() - self.assigned_TE().sum()


def routing_from_mask(
    mask_TE: Tensor,
    scores_TE: Tensor,
    logits_TE: Tensor,
    *,
    weights_TE: Tensor | None = None,
    chosen_TE: Tensor | None = None,
    valid_T: Tensor | None = None,
) -> Routing:
    """A ragged `Routing` that holds exactly the pairs where `mask_TE` is true.

    Args:
        mask_TE: bool selection; padding must already be excluded.
        scores_TE: fp32 scores.
        logits_TE: fp32 logits.
        weights_TE: combine weights; the scores where None.
        chosen_TE: see `Routing`.
        valid_T: see `Routing`.
    """
    expert_A, token_A = mask_TE.T.nonzero(as_tuple=True)
    weights_TE = scores_TE if weights_TE is None else weights_TE
    # index_select on the flat view: its backward is one index_add, several times quicker than index_put's.
    weight_A = weights_TE.reshape(-1).index_select(0, token_A * mask_TE.shape[1] + expert_A)
    offsets_E = mask_TE.sum(0).cumsum(0).to(torch.int32)
    return Routing(
        token_A, offsets_E, weight_A, mask_TE.shape[0], None, scores_TE, logits_TE, chosen_TE=chosen_TE, valid_T=valid_T
    )


@dataclass
class RoutingContext:
    """What a forward pass tells the mixture layers. One object serves the whole model.

    Attributes:
        batch: B, sequences of this forward pass.
        sequence_length: S.
        valid_BS: bool, False at padding; None means that all tokens are valid.
        mode: "train" routes as the configuration says and keeps balance state; "causal" is how every model is
            evaluated and served: thresholds in place of expert choice, and no token dropped; "train_router" is the
            training router without keeping state, for measuring how far its losses are from honest ones.
        threshold_phase: an expert-choice run has reached its last, threshold-routed part.
        step_tokens: valid tokens of the whole optimizer step, over micro-batches and ranks: the z-loss divides by it.
        step_groups: routing groups of the whole optimizer step: the balance loss divides by it.
        observe: called with (layer, routing) once for every mixture layer.
        auxiliary: filled by the layers with detached loss values, already normalised for the step:
            {"balance": value, "z": value} summed over layers.
    """

    batch: int
    sequence_length: int
    valid_BS: Tensor | None = None
    mode: Literal["train", "causal", "train_router"] = "causal"
    threshold_phase: bool = False
    step_tokens: int | None = None
    step_groups: int | None = None
    observe: Callable[[int, Routing], None] | None = None
    auxiliary: dict[str, Tensor] = field(default_factory=dict)

    @property
    def valid_T(self) -> Tensor | None:
        """`valid_BS` flattened."""
        return None if self.valid_BS is None else self.valid_BS.reshape(-1)


def to_groups(values_TX: Tensor, kind: str, sequences: int, sequence_length: int, chunk_length: int) -> Tensor:
    """Reorder per-token rows into routing groups: (T, X) to (G, N, X).

    Args:
        values_TX: rows in (batch, sequence) order.
        kind: "position", "flat" or "chunk".
        sequences: sequences of a group.
        sequence_length: S.
        chunk_length: tokens of a stretch, for `chunk`.
    """
    if kind == "flat":
        return rearrange(values_TX, "(g n) x -> g n x", n=sequences * sequence_length)
    if kind == "chunk":
        return rearrange(values_TX, "(g n) x -> g n x", n=chunk_length)
    return rearrange(values_TX, "(g b s) x -> (g s) b x", b=sequences, s=sequence_length)


def from_groups(values_GNX: Tensor, kind: str, sequence_length: int) -> Tensor:
    """The inverse of `to_groups`: (G, N, X) to (T, X)."""
    if kind == "position":
        return rearrange(values_GNX, "(g s) b x -> (g b s) x", s=sequence_length)
    return rearrange(values_GNX, "g n x -> (g n) x")
