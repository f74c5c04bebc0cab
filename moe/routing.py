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

from moe.groups import RoutingGroup


@dataclass(frozen=True)
class Decision:
    """Which token goes to which expert: whole numbers only, no gradient. Activation recompute replays it.

    Assignments are sorted by expert, then by token, so that their order is deterministic.

    Attributes:
        token_A: int64 token of each assignment.
        offsets_E: int32 end of each expert's run of assignments.
        capacity: assignments of every expert when all take the same number, so that shapes are static; else None.
        chosen_TE: bool, what the router asked for before any token was dropped; None where nothing can be dropped.
    """

    token_A: Tensor
    offsets_E: Tensor
    capacity: int | None = None
    chosen_TE: Tensor | None = None

    @classmethod
    def from_mask(cls, mask_TE: Tensor, chosen_TE: Tensor | None = None) -> Decision:
        """Exactly the pairs where `mask_TE` is true; padding must already be excluded."""
        _, token_A = mask_TE.T.nonzero(as_tuple=True)
        return cls(token_A, mask_TE.sum(0).cumsum(0).to(torch.int32), None, chosen_TE)

    def expert_A(self) -> Tensor:
        """int64 expert of each assignment."""
        return run_of_row(self.offsets_E, self.token_A.shape[0])


@dataclass
class Routing:
    """A decision with its weights: all that dispatch, experts, losses and analysis need.

    Attributes:
        token_A: int64 token of each assignment; None when the rows are in expert order already.
        offsets_E: int32 end of each expert's run of assignments.
        weight_A: fp32 combine weight, differentiable; exactly 0 for a slot that holds no valid token. None: all 1.
        num_tokens: T.
        capacity: see `Decision`.
        scores_TE: fp32 scores, differentiable; in [0, 1] but for ReMoE's.
        logits_TE: fp32 router logits, differentiable.
        chosen_TE: see `Decision`.
        valid_T: bool, False at padding; None means that all tokens are valid.
        distance_TE: how far each pair was from being decided otherwise, where that is not a matter of its score.
        own_losses: losses that only this router has, by name: (coefficient, value already normalised for the step).
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
    distance_TE: Tensor | None = None
    own_losses: dict[str, tuple[float | Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def from_decision(
        cls, decision: Decision, weights_TE: Tensor, scores_TE: Tensor, logits_TE: Tensor, valid_T: Tensor | None
    ) -> Routing:
        """Pick the weights of the decided pairs; this is where the gradient enters."""
        num_tokens, num_experts = weights_TE.shape
        # index_select on the flat view: its backward is one index_add, several times quicker than index_put's.
        weight_A = weights_TE.reshape(-1).index_select(0, decision.token_A * num_experts + decision.expert_A())
        if valid_T is not None:
            weight_A = torch.where(valid_T[decision.token_A], weight_A, 0.0)
        return cls(
            decision.token_A,
            decision.offsets_E,
            weight_A,
            num_tokens,
            decision.capacity,
            scores_TE,
            logits_TE,
            decision.chosen_TE,
            valid_T,
        )

    @property
    def num_experts(self) -> int:
        """E."""
        return self.offsets_E.shape[0]

    def assigned_TE(self) -> Tensor:
        """bool (T, E): token t holds a slot of expert e. Slots without a valid token do not count."""
        assert self.token_A is not None
        mask_TE = torch.zeros(self.num_tokens, self.num_experts, dtype=torch.bool, device=self.offsets_E.device)
        mask_TE[self.token_A, self.expert_A()] = True
        return mask_TE if self.valid_T is None else mask_TE & self.valid_T[:, None]

    def expert_A(self) -> Tensor:
        """int64 expert of each assignment."""
        assert self.token_A is not None
        return run_of_row(self.offsets_E, self.token_A.shape[0])

    def scores(self) -> Tensor:
        """`scores_TE` of a routing that came from a router, where it is always there."""
        assert self.scores_TE is not None
        return self.scores_TE

    def logits(self) -> Tensor:
        """`logits_TE` of a routing that came from a router, where it is always there."""
        assert self.logits_TE is not None
        return self.logits_TE

    def weight_TE(self) -> Tensor:
        """(T, E) combine weights, differentiable; 0 where no expert takes the token."""
        assert self.token_A is not None and self.weight_A is not None
        place_A = self.token_A * self.num_experts + self.expert_A()
        flat = self.weight_A.new_zeros(self.num_tokens * self.num_experts)
        return flat.index_add(0, place_A, self.weight_A).view(self.num_tokens, self.num_experts)

    def counts_E(self) -> Tensor:
        """int64 number of valid tokens that each expert takes."""
        return self.assigned_TE().sum(0)

    def dropped(self) -> Tensor:
        """int64 scalar: assignments that the router asked for and that did not fit."""
        if self.chosen_TE is None:
            return torch.zeros((), dtype=torch.int64, device=self.offsets_E.device)
        return self.chosen_TE.sum() - self.assigned_TE().sum()


def run_of_row(offsets_E: Tensor, rows: int) -> Tensor:
    """int64 (rows,): which run of `offsets_E` each row lies in."""
    row_A = torch.arange(rows, device=offsets_E.device, dtype=torch.int32)
    return torch.searchsorted(offsets_E, row_A, right=True)


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
        step_tokens: valid tokens (not labels) of the whole optimizer step, over micro-batches and ranks: the z-loss
            divides by it.
        step_groups: routing groups of the whole optimizer step: the balance loss divides by it.
        token_BS: int64 ids, which a hash router reads; the model fills it in.
        seed, step, first_token: with the layer and the token's place, what noise is drawn from: the run's seed, the
            optimizer step, and the number within the step's global batch of this pass' first token.
        replicas: processes that route these same tokens, and whose gradients are summed (tensor parallelism): each
            attaches its part of the losses.
        observe: called with (layer, routing) each time a mixture layer routes; not again under activation recompute.
        decisions: by layer, what was decided in this pass. Activation recompute replays it: scores that tie or nearly
            tie could be decided otherwise the second time, and statistics would count twice.
        auxiliary: filled by the layers with detached loss values, already normalised for the step:
            {"balance": value, "z": value} summed over layers.
    """

    batch: int
    sequence_length: int
    valid_BS: Tensor | None = None
    mode: Literal["train", "causal", "train_router"] = "causal"
    threshold_phase: bool = False
    step_tokens: int | Tensor | None = None
    step_groups: int | None = None
    token_BS: Tensor | None = None
    seed: int = 0
    step: int = 0
    first_token: int = 0
    replicas: int = 1
    observe: Callable[[int, Routing], None] | None = None
    auxiliary: dict[str, Tensor] = field(default_factory=dict)
    decisions: dict[int, Decision] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.batch * self.sequence_length

    def per_token(self, value_T: Tensor) -> Tensor:
        """This pass' part of the step's mean over valid tokens, of values that are 0 at padding."""
        valid_tokens = value_T.numel() if self.valid_T is None else self.valid_T.sum().clamp_min(1)
        return value_T.sum() / (valid_tokens if self.step_tokens is None else self.step_tokens)

    def part_of_step(self, device: torch.device) -> Tensor:
        """Which part of the step's valid tokens this pass has."""
        return self.per_token(
            torch.ones(self.num_tokens, device=device) if self.valid_T is None else self.valid_T.float()
        )

    def per_group(self, value_G: Tensor) -> Tensor:
        """This pass' part of the step's mean over routing groups (or over sequences, where G are those)."""
        return value_G.sum() / (self.step_groups or value_G.numel())

    def valid_GN(self, group: RoutingGroup) -> Tensor | None:
        """`valid_BS` by routing group."""
        return None if self.valid_T is None else to_groups(self.valid_T[:, None], group).squeeze(-1)

    @property
    def valid_T(self) -> Tensor | None:
        """`valid_BS` flattened."""
        return None if self.valid_BS is None else self.valid_BS.reshape(-1)


def recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass: activation recompute."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def to_groups(values_TX: Tensor, group: RoutingGroup) -> Tensor:
    """Reorder per-token rows, in (batch, sequence) order, into routing groups: (T, X) to (G, N, X)."""
    if group.kind == "position":
        return rearrange(values_TX, "(g b s) x -> (g s) b x", b=group.sequences, s=group.sequence_length)
    return rearrange(values_TX, "(g n) x -> g n x", n=group.tokens)


def from_groups(values_GNX: Tensor, group: RoutingGroup) -> Tensor:
    """The inverse of `to_groups`: (G, N, X) to (T, X)."""
    if group.kind == "position":
        return rearrange(values_GNX, "(g s) b x -> (g b s) x", s=group.sequence_length)
    return rearrange(values_GNX, "g n x -> (g n) x")
