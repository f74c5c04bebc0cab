"""The experts' arithmetic behind one function, `grouped_mlp`, with interchangeable backends."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

from moe.config import ConfigError
from moe.kernels.operands import check_operands
from moe.kernels.reference import grouped_mlp_reference
from moe.kernels.torch_backend import grouped_mlp_torch
from moe.routing import Routing

GroupedMLP = Callable[[Tensor, Tensor, Tensor, Routing], Tensor]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def _triton(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing) -> Tensor:
    from moe.kernels.triton.backend import grouped_mlp_triton  # not imported where it is not used

    return grouped_mlp_triton(x_TD, w13_E2FD, w2_EDF, routing)


def _megablocks(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing) -> Tensor:
    from moe.kernels.megablocks_backend import grouped_mlp_megablocks

    return grouped_mlp_megablocks(x_TD, w13_E2FD, w2_EDF, routing)


BACKENDS: dict[str, GroupedMLP] = {
    "reference": grouped_mlp_reference,
    "torch": grouped_mlp_torch,
    "triton": _triton,
    "megablocks": _megablocks,
}


def grouped_mlp(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing, backend: str = "auto") -> Tensor:
    """SwiGLU experts over routed tokens: y_t = sum over (t, e) of weight * W2_e (silu(W1_e x_t) * W3_e x_t).

    With `routing.token_A` None the rows of `x_TD` are in expert order already, and the result keeps that order.
    Gradients are taken once: a second derivative is refused.

    Args:
        x_TD: (T, D) inputs.
        w13_E2FD: (E, 2, F, D): gate (index 0) and up (index 1) projections, in the dtype of `x_TD`.
        w2_EDF: (E, D, F): down projection.
        routing: who goes where.
        backend: "auto" (see `choose_backend`), or one of `BACKENDS`.

    Returns:
        (T, D) in the dtype of `x_TD`; zeros for a token that no expert took.

    Raises:
        ConfigError: for a backend that does not exist, or that this device does not have; names one that works.
        ValueError: for operands that do not fit together, or that the backend cannot take.
    """
    chosen = choose_backend(backend, x_TD.device.type)
    if not torch.compiler.is_compiling():  # sizes may have no values there
        check_operands(x_TD, w13_E2FD, w2_EDF, routing)
    return BACKENDS[chosen](x_TD, w13_E2FD, w2_EDF, routing)


def choose_backend(backend: str, device_type: str) -> str:
    """The backend that computes on a kind of device: as named, or for "auto" triton on GPUs and torch elsewhere.

    Raises:
        ConfigError: if there is none of that name, or it cannot work there; names one that can.
    """
    if backend == "auto":
        return "triton" if device_type == "cuda" and HAS_TRITON else "torch"
    if backend not in BACKENDS:
        names = ", ".join(f'"{name}"' for name in ("auto", *BACKENDS))
        raise ConfigError(f'moe.backend = "{backend}": must be one of {names}')
    if backend == "triton":
        if not HAS_TRITON:
            raise ConfigError('moe.backend = "triton": no package named triton here; install it, or use "torch"')
        if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(
                f'moe.backend = "triton" needs a GPU, and this is {device_type}: use "torch" (or TRITON_INTERPRET=1 '
                "in the environment, to follow the kernels slowly in Triton's interpreter)"
            )
    if backend == "megablocks":
        from moe.kernels.megablocks_backend import require_device

        require_device([device_type])
    return backend


__all__ = ["BACKENDS", "choose_backend", "grouped_mlp"]
