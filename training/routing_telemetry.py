"""What the routers did in a training step: sums while it runs, and one record of routing/steps.jsonl from them.

Everything is kept as sums over tokens and assignments, whole numbers as int64 and the others in fp64, so that
micro-batches add up, and processes can: no mean of means, and no layout changes a record beyond rounding. Padding
counts nowhere. Nothing waits for the device before the record is made.

Shape suffixes beyond the project's legend: P stretches of the sequence, X fan-out from 0 to E.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.config import is_moe_layer
from moe.model import Transformer
from moe.routers import router_class
from moe.routers.threshold import ThresholdRouter
from moe.routing import Routing
from parallel.engine import Engine
from training import load_metrics as metrics

# Load and drops are told apart by position in so many equal stretches of the sequence.
STRETCHES = 8
# Per-layer values of a record whose mean over layers goes to metrics.jsonl and TensorBoard.
LAYER_MEANS = (
    "max_violation",
    "window_max_violation",
    "load_entropy",
    "zero_expert_fraction",
    "dropped_fraction",
    "experts_per_token",
    "margin",
    "logit_norm",
    "cutoff_drift",
)


class RoutingTelemetry:
    """Watches the routing of every step and describes that of some.

    The window of a record is all steps since the record before it, its own included. For those in between only the
    load is kept, which costs next to nothing.

    Args:
        layers: numbers of the blocks with a router; with none, there is never a record.
        num_experts: E.
        experts_per_token: k, for the margin.
        sequence_length: S.
        device: of the model.
        engine: where several processes share the steps; every one then makes the same calls, and all get all records.
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_experts: int,
        experts_per_token: int,
        sequence_length: int,
        device: torch.device | str = "cpu",
        engine: Engine | None = None,
    ) -> None:
        self.layers = list(layers)
        self._engine = engine
        self.experts_per_token = experts_per_token
        self._place = {layer: place for place, layer in enumerate(self.layers)}
        self._shape = (len(self.layers), min(STRETCHES, sequence_length), num_experts)
        position_S = torch.arange(sequence_length, device=device)
        self._stretch_S = position_S * self._shape[1] // sequence_length
        self._sums: dict[str, Tensor] | None = None
        self._window_LE = torch.zeros(len(self.layers), num_experts, dtype=torch.int64, device=device)
        self._window_steps = 0
        self._cutoff_LE: Tensor | None = None

    @classmethod
    def of(cls, model: Transformer | Engine, sequence_length: int) -> RoutingTelemetry:
        """For all layers of a model, also those that are not here."""
        moe, routed = model.moe_config, model.moe_config.is_moe and model.moe_config.router != "soft"
        layers = [n for n in range(model.config.layers) if routed and is_moe_layer(model.config, n)]
        engine = model if isinstance(model, Engine) else None
        return cls(layers, moe.num_experts, moe.experts_per_token, sequence_length, model.device, engine)

    def start_step(self, detailed: bool) -> None:
        """Forget the last step; `detailed` where this one is to have a record."""
        self._window_steps += 1
        self._sums = self._zeros() if detailed else None

    def observe(self, layer: int, routing: Routing) -> None:
        """Add one micro-batch's routing: `RoutingContext.observe` of training, and of nothing else."""
        place = self._place[layer]
        self._window_LE[place].add_(_load(routing))
        if self._sums is not None:
            self._add({name: sums[place] for name, sums in self._sums.items()}, routing)

    def sums(self) -> dict[str, Tensor]:
        """The sums that `routing_record` takes, over all processes.

        - stretch_tokens_LP, int64: valid tokens by the stretch of the sequence they stand in
        - stretch_counts_LPE, int64: tokens that each expert took
        - stretch_chosen_LP, int64: assignments asked for, those that were then dropped included
        - fan_out_LX, int64: tokens with 0, 1, ..., E experts
        - gate_mass_LE, fp64: combine weights of each expert's tokens
        - margin_L, fp64: gap between a token's k-th and (k+1)-th largest scores; nan where k = E
        - logit_norm_L, fp64: L2 norm of a token's router logits
        - window_LE, int64: tokens that each expert took in the window
        """
        assert self._sums is not None, "only a detailed step has sums"
        return {name: self._over_job(sums) for name, sums in (self._sums | {"window_LE": self._window_LE}).items()}

    def _over_job(self, sums: Tensor) -> Tensor:
        return sums if self._engine is None else self._engine.sum_over_job(sums)

    def end_step(self, model: Transformer | Engine) -> dict[str, Any] | None:
        """The record of a detailed step, after which a new window begins.

        Args:
            model: after the step, for the cutoffs of its routers.

        Returns:
            Plain data: see `routing_record`; also "layers" (block numbers), "window_steps", and per layer
            "cutoff_drift", the mean over experts of |cutoff - cutoff at the record before| (None in the first record,
            and for routers without cutoffs). None where the step was not detailed or nothing is routed.
        """
        if self._sums is None or not self.layers:
            return None
        record = {"layers": self.layers, "window_steps": self._window_steps} | routing_record(self.sums())
        before_LE, self._cutoff_LE = self._cutoff_LE, self._cutoffs(model)
        drift_L: list[float | None] = [None] * len(self.layers)
        if before_LE is not None and self._cutoff_LE is not None:
            drift_L = (self._cutoff_LE - before_LE).abs().mean(1).tolist()
        self._sums, self._window_steps = None, 0
        self._window_LE.zero_()
        return record | {"cutoff_drift": drift_L}

    def state(self) -> dict[str, Any]:
        """The unfinished window, as JSON values, so that a run that is continued writes the same records."""
        return {
            "window_steps": self._window_steps,
            "window": self._over_job(self._window_LE).tolist(),
            "cutoffs": None if self._cutoff_LE is None else self._cutoff_LE.tolist(),
        }

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Go on with the window of `state`; None, of a checkpoint that has none, starts one ("window_steps" tells)."""
        if state is None:
            return
        self._window_steps = state["window_steps"]
        if self._engine is None or self._engine.is_main:  # one has it all, and the others add nothing
            self._window_LE.copy_(torch.tensor(state["window"], dtype=torch.int64).view_as(self._window_LE))
        cutoffs = state["cutoffs"]
        self._cutoff_LE = None if cutoffs is None else torch.tensor(cutoffs, dtype=torch.float64)

    def _cutoffs(self, model: Transformer | Engine) -> Tensor | None:
        """fp64 (L, E) cutoffs of all layers, on the CPU; None where routers track none."""
        models = model.models if isinstance(model, Engine) else [model]
        routers = {layer.index: layer.router for part in models for layer in part.moe_layers()}
        if not issubclass(router_class(model.moe_config.router), ThresholdRouter):
            return None
        cutoff_LE = self._window_LE.new_zeros(self._window_LE.shape, dtype=torch.float64)
        if self._engine is None or self._engine.mesh.data == 0:  # the others' are the same
            for index, router in routers.items():
                assert isinstance(router, ThresholdRouter)
                cutoff_LE[self._place[index]] = router.cutoff_E
        return self._over_job(cutoff_LE).cpu()

    def _zeros(self) -> dict[str, Tensor]:
        layers, stretches, experts = self._shape
        whole = self._window_LE.new_zeros
        real = self._window_LE.double().new_zeros
        return {
            "stretch_tokens_LP": whole(layers, stretches),
            "stretch_counts_LPE": whole(layers, stretches, experts),
            "stretch_chosen_LP": whole(layers, stretches),
            "fan_out_LX": whole(layers, experts + 1),
            "gate_mass_LE": real(layers, experts),
            "margin_L": real(layers),
            "logit_norm_L": real(layers),
        }

    @torch.no_grad()
    def _add(self, sums: dict[str, Tensor], routing: Routing) -> None:
        """Add a routing to one layer's sums. Shapes are static and no value is read, so nothing waits."""
        token_A, expert_A, tokens = routing.token_A, routing.expert_A(), routing.num_tokens
        assert token_A is not None
        one_T = token_A.new_ones(tokens) if routing.valid_T is None else routing.valid_T.long()
        one_A = one_T[token_A]
        stretch_T = self._stretch_S.repeat(tokens // self._stretch_S.shape[0])
        sums["stretch_tokens_LP"].index_add_(0, stretch_T, one_T)
        place_A = stretch_T[token_A] * routing.num_experts + expert_A
        sums["stretch_counts_LPE"].view(-1).index_add_(0, place_A, one_A)
        fan_out_T = torch.zeros_like(one_T).index_add_(0, token_A, one_A)
        sums["fan_out_LX"].index_add_(0, fan_out_T, one_T)
        chosen_T = fan_out_T if routing.chosen_TE is None else routing.chosen_TE.sum(1) * one_T
        sums["stretch_chosen_LP"].index_add_(0, stretch_T, chosen_T)
        # Differences of a running sum: atomic additions in floating point would differ from run to run on a GPU.
        weight_A = one_A.double() if routing.weight_A is None else routing.weight_A.double()
        running_A = F.pad(weight_A.cumsum(0), (1, 0))
        sums["gate_mass_LE"] += running_A[_run_edges(routing)].diff()
        sums["margin_L"] += _sum_valid(margins(routing.scores(), self.experts_per_token), routing)
        sums["logit_norm_L"] += _sum_valid(torch.linalg.vector_norm(routing.logits(), dim=1), routing)


def margins(scores_TE: Tensor, experts_per_token: int) -> Tensor:
    """(T,) how far each token's k-th largest score is above its (k+1)-th; nan where k = E.

    Of a router that ranks by more than its scores (a balancing bias, noise) these are the scores alone.
    """
    k, experts = experts_per_token, scores_TE.shape[1]
    if k == experts:
        return torch.full_like(scores_TE[:, 0], torch.nan)
    if scores_TE.device.type == "cpu":  # numpy sorts with vector instructions: several times as fast as topk
        rising_TE = torch.from_numpy(np.sort(scores_TE.detach().numpy(), axis=1))
    else:
        rising_TE = scores_TE.detach().topk(k + 1, dim=1).values.flip(1)
    return rising_TE[:, -k] - rising_TE[:, -k - 1]


def routing_record(sums: dict[str, Tensor]) -> dict[str, Any]:
    """Describe the routing of a step.

    Args:
        sums: of all tokens of the step, from `RoutingTelemetry.sums`.

    Returns:
        Plain data, with L layers in order:

        - "tokens": valid tokens of the step
        - "counts" (L, E): tokens that each expert took; "gate_mass" (L, E): their combine weights, summed
        - "fan_out" (L, E + 1): tokens with 0, 1, ..., E experts
        - "stretch_tokens" (P), "stretch_counts" (L, P, E) and "stretch_dropped" (L, P): valid tokens, the load of each
          expert, and dropped assignments, in each of P equal stretches of the sequence
        - per layer: "max_violation" of this step's batch and "window_max_violation" of the window's summed counts,
          "coefficient_of_variation", "load_entropy", "experts_per_token" and "zero_expert_fraction" as defined in
          `training/load_metrics.py`; "dropped_fraction" of the assignments that were asked for; "margin" (see
          `margins`) and "logit_norm" (L2), means over tokens

        A value that is not defined (a ratio of nothing, the margin where k = E) is None.
    """
    arrays = {name: value.cpu().numpy() for name, value in sums.items()}
    stretch_tokens_LP, stretch_counts_LPE = arrays["stretch_tokens_LP"], arrays["stretch_counts_LPE"]
    counts_LE, chosen_LP, fan_out_LX = stretch_counts_LPE.sum(1), arrays["stretch_chosen_LP"], arrays["fan_out_LX"]
    dropped_LP = chosen_LP - stretch_counts_LPE.sum(2)
    tokens_L = stretch_tokens_LP.sum(1)
    per_layer = {
        "max_violation": map(metrics.max_violation, counts_LE),
        "window_max_violation": map(metrics.max_violation, arrays["window_LE"]),
        "coefficient_of_variation": map(metrics.coefficient_of_variation, counts_LE),
        "load_entropy": map(metrics.load_entropy, counts_LE),
        "experts_per_token": map(metrics.fan_out_mean, fan_out_LX),
        "zero_expert_fraction": map(metrics.zero_expert_fraction, fan_out_LX),
        "dropped_fraction": map(_ratio, dropped_LP.sum(1), chosen_LP.sum(1)),
        "margin": map(_ratio, arrays["margin_L"], tokens_L),
        "logit_norm": map(_ratio, arrays["logit_norm_L"], tokens_L),
    }
    return {
        "tokens": int(tokens_L.max()),
        "counts": counts_LE.tolist(),
        "gate_mass": arrays["gate_mass_LE"].tolist(),
        "fan_out": fan_out_LX.tolist(),
        "stretch_tokens": stretch_tokens_LP.max(0).tolist(),
        "stretch_counts": stretch_counts_LPE.tolist(),
        "stretch_dropped": dropped_LP.tolist(),
        **{name: [None if math.isnan(value) else value for value in values] for name, values in per_layer.items()},
    }


def layer_means(record: dict[str, Any]) -> dict[str, float]:
    """Means over the layers that have a value, of `LAYER_MEANS`; what no layer has is left out."""
    known = {name: [value for value in record[name] if value is not None] for name in LAYER_MEANS}
    return {name: math.fsum(values) / len(values) for name, values in known.items() if values}


def _load(routing: Routing) -> Tensor:
    """int64 (E,): valid tokens that each expert takes."""
    # Without padding every slot counts, and the runs' lengths say it all.
    return routing.counts_E() if routing.valid_T is not None else _run_edges(routing).diff()


def _run_edges(routing: Routing) -> Tensor:
    """(E + 1,): 0 and the end of each expert's run."""
    return F.pad(routing.offsets_E, (1, 0))


def _sum_valid(value_T: Tensor, routing: Routing) -> Tensor:
    """Sum over valid tokens, in fp64."""
    if routing.valid_T is not None:  # replaced, not multiplied by 0: padding may hold anything
        value_T = torch.where(routing.valid_T, value_T, 0.0)
    return value_T.sum(dtype=torch.float64)


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan
