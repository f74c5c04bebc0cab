"""The experts' arithmetic behind one function, `grouped_mlp`, with interchangeable backends."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moe.kernels.reference import grouped_mlp_reference
from moe.kernels.torch_backend import grouped_mlp_torch
from moe.routing import Routing

BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Routing], Tensor]] = {
    "reference": grouped_mlp_reference,
    "torch": grouped_mlp_torch,
}


def grouped_mlp(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing, backend: str = "auto") -> Tensor:
    """SwiGLU experts over routed tokens: y_t = sum over (t, e) of weight * W2_e (silu(W1_e x_t) * W3_e x_t).

    With `routing.token_A` None the rows of `x_TD` are in expert order already, and the result keeps that order.

    Args:
        x_TD: (T, D) inputs.
        w13_E2FD: (E, 2, F, D): gate (index 0) and up (index 1) projections, in the dtype of `x_TD`.
        w2_EDF: (E, D, F): down projection.
        routing: who goes where.
        backend: "auto", "torch" or "reference".

    Returns:
        (T, D) in the dtype of `x_TD`; zeros for a token that no expert took.
    """
    return BACKENDS["torch" if backend == "auto" else backend](x_TD, w13_E2FD, w2_EDF, routing)


__all__ = ["BACKENDS", "grouped_mlp"]
