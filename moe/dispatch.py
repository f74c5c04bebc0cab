"""The seam between one process and many: how tokens reach the experts, and how results come back."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from moe.routing import Routing


class Dispatcher(Protocol):
    """Takes tokens to the experts and back. The layer calls nothing else, so nothing else differs between layouts."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Routing, Any]:
        """Rows that the experts of this process work on, how those are routed among them, and what `combine` needs."""
        ...

    def combine(self, rows: Tensor, routing: Routing, state: Any) -> Tensor:
        """(T, D) outputs of this process' own tokens, from what the experts returned."""
        ...


class LocalDispatcher:
    """All experts are here: `grouped_mlp` gathers its inputs and combines its outputs itself."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Routing, None]:
        """Nothing to move."""
        return x_TD, routing, None

    def combine(self, rows: Tensor, routing: Routing, state: None) -> Tensor:
        """Nothing to move back."""
        return rows
