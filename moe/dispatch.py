"""The seam between one process and many: how tokens reach the experts, and how results come back."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from moe.routing import Routing


class Dispatcher(Protocol):
    """Takes tokens to the experts and back. The layer calls nothing else, so nothing else differs between layouts.

    Sending and receiving are apart, so that other work can be done while tokens travel.
    """

    def send(self, x_TD: Tensor, routing: Routing) -> Any:
        """Start this process' tokens on their way; what is under way is for `receive` and `combine`."""
        ...

    def receive(self, sent: Any) -> tuple[Tensor, Routing]:
        """Rows that the experts of this process work on, and how those are routed among them."""
        ...

    def combine(self, rows: Tensor, sent: Any) -> Tensor:
        """(T, D) outputs of this process' own tokens, from what the experts returned."""
        ...


class LocalDispatcher:
    """All experts are here: `grouped_mlp` gathers its inputs and combines its outputs itself."""

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """Nothing to move."""
        return x_TD, routing

    def receive(self, sent: tuple[Tensor, Routing]) -> tuple[Tensor, Routing]:
        """Already here."""
        return sent

    def combine(self, rows: Tensor, sent: tuple[Tensor, Routing]) -> Tensor:
        """Nothing to move back."""
        return rows
