"""Collects what the routers of a model do over many forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eval.routing_metrics import sum_by_domain
from moe.layer import MoELayer
from moe.model import Transformer
from moe.routing import Routing

NEAR = 1e-5


@dataclass
class LayerRecord:
    """What one layer's router did.

    Attributes:
        fan_out: int64 (E + 1,), tokens with 0, 1, ..., E experts.
        counts_RE: int64, assignments of each row to each expert; one array a forward pass.
        tokens_R: int64, valid tokens of each row.
        zero_R: int64, of these, tokens without any expert.
        near: (token, expert) decisions within the tolerance of going the other way.
        asked: assignments that tokens asked for.
        dropped: of these, the ones that a capacity left no place for.
    """

    fan_out: np.ndarray
    counts_RE: list[np.ndarray] = field(default_factory=list)
    tokens_R: list[np.ndarray] = field(default_factory=list)
    zero_R: list[np.ndarray] = field(default_factory=list)
    near: int = 0
    asked: int = 0
    dropped: int = 0


class RoutingRecorder:
    """A `RoutingContext.observe` that accumulates.

    Before each forward pass call `start` with the domains of its rows. Counts are kept for each row, so that domains
    can be compared with a null that deals whole rows.

    Attributes:
        domains: names of the domains, in the order of the results.
        layers: records by the number of the transformer block.
    """

    def __init__(self, model: Transformer, domains: Sequence[str], tolerance: float = NEAR) -> None:
        self.domains = list(domains)
        experts = model.moe_config.num_experts
        self.layers: dict[int, LayerRecord] = {
            layer.index: LayerRecord(np.zeros(experts + 1, dtype=np.int64)) for layer in model.moe_layers()
        }
        self._model_layers: dict[int, MoELayer] = {layer.index: layer for layer in model.moe_layers()}
        self._number = {domain: number for number, domain in enumerate(self.domains)}
        self._tolerance = tolerance
        self._domain_R: list[int] = []
        self._rows = 0

    def start(self, row_domains: Sequence[str]) -> None:
        """Name the domain of each row of the forward pass that follows.

        Raises:
            ValueError: a domain is not among those the recorder was made for.
        """
        unknown = sorted(set(row_domains) - set(self._number))
        if unknown:
            raise ValueError(f"unknown domain {unknown[0]!r}; the recorder was made for {', '.join(self.domains)}")
        self._domain_R += [self._number[domain] for domain in row_domains]
        self._rows = len(row_domains)

    @torch.no_grad()
    def __call__(self, layer: int, routing: Routing) -> None:
        """Record one layer's routing.

        Raises:
            ValueError: `start` was not called, or with another number of rows.
        """
        if self._rows == 0 or routing.num_tokens % self._rows:
            raise ValueError(
                f"{routing.num_tokens} tokens were routed but start() named {self._rows} rows: call start() with one "
                "domain for each row before each forward pass"
            )
        record = self.layers[layer]
        assigned_TE = routing.assigned_TE()
        valid_T = torch.ones_like(assigned_TE[:, 0]) if routing.valid_T is None else routing.valid_T
        fan_out_T = assigned_TE.sum(1)
        experts = routing.num_experts
        record.counts_RE.append(_numpy(assigned_TE.view(self._rows, -1, experts).sum(1)))
        record.tokens_R.append(_numpy(valid_T.view(self._rows, -1).sum(1)))
        record.zero_R.append(_numpy(((fan_out_T == 0) & valid_T).view(self._rows, -1).sum(1)))
        record.fan_out = record.fan_out + _numpy(torch.bincount(fan_out_T[valid_T], minlength=experts + 1))
        dropped = int(routing.dropped())
        record.dropped += dropped
        record.asked += int(fan_out_T.sum()) + dropped
        distance_TE = self._model_layers[layer].router.decision_distance(routing)
        record.near += int(((distance_TE <= self._tolerance) & valid_T[:, None]).sum())

    @property
    def dropped_fraction(self) -> float:
        """Share of the assignments asked for, over all layers, that a capacity left no place for."""
        asked = sum(record.asked for record in self.layers.values())
        return sum(record.dropped for record in self.layers.values()) / max(1, asked)

    def rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """(counts_RE, domain_R) of the rows that hold a valid token."""
        record = self.layers[layer]
        used_R = np.concatenate(record.tokens_R) > 0
        return np.concatenate(record.counts_RE)[used_R], np.asarray(self._domain_R)[used_R]

    def counts_by_domain(self, layer: int) -> np.ndarray:
        """(M, E) assignments of each domain's tokens to each expert."""
        counts_RE, domain_R = self.rows(layer)
        return sum_by_domain(counts_RE, domain_R, len(self.domains))

    def tokens_by_domain(self, layer: int) -> np.ndarray:
        """(M,) valid tokens of each domain."""
        return sum_by_domain(np.concatenate(self.layers[layer].tokens_R), self._domain_R, len(self.domains))

    def zero_expert_by_domain(self, layer: int) -> np.ndarray:
        """(M,) tokens of each domain that no expert takes."""
        return sum_by_domain(np.concatenate(self.layers[layer].zero_R), self._domain_R, len(self.domains))


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
