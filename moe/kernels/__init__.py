"""The experts' arithmetic behind one function, `grouped_mlp`, with interchangeable backends."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

from moe.config import ConfigError
from moe.routing import Routing

GroupedMLP = Callable[[Tensor, Tensor, Tensor, Routing], Tensor]
# Module and function of each backend; a module is imported when its backend is first used.
BACKENDS = {
    "reference": ("moe.kernels.reference", "grouped_mlp_reference"),
    "torch": ("moe.kernels.torch_backend", "grouped_mlp_torch"),
    "triton": ("moe.kernels.triton.backend", "grouped_mlp_triton"),
}


def grouped_mlp(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing, backend: str = "auto") -> Tensor:
    """SwiGLU experts over routed tokens: y_t = sum over (t, e) of weight * W2_e (silu(W1_e x_t) * W3_e x_t).

    With `routing.token_A` None the rows of `x_TD` are in expert order already, and the result keeps that order.

    Args:
        x_TD: (T, D) inputs.
        w13_E2FD: (E, 2, F, D): gate (index 0) and up (index 1) projections, in the dtype of `x_TD`.
        w2_EDF: (E, D, F): down projection.
        routing: who goes where.
        backend: "auto" (see `choose_backend`), or one of `BACKENDS`.

    Returns:
        (T, D) in the dtype of `x_TD`; zeros for a token that no expert took.

    Raises:
        ConfigError: for a backend that this device does not have; names one that works.
        ValueError: for inputs that the backend cannot take; likewise.
    """
    return _load(choose_backend(backend, x_TD.device.type))(x_TD, w13_E2FD, w2_EDF, routing)


@functools.cache
def choose_backend(backend: str, device_type: str) -> str:
    """The backend that computes on a kind of device: as named, or for "auto" triton on GPUs and torch elsewhere.

    Raises:
        ConfigError: if it cannot work there; names one that can.
    """
    has_triton = importlib.util.find_spec("triton") is not None
    if backend == "auto":
        recent = device_type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability() >= (8, 0))
        return "triton" if recent and has_triton else "torch"
    if backend == "triton":
        if not has_triton:
            raise ConfigError('moe.backend = "triton": no package named triton here; install it, or use "torch"')
        if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(
                f'moe.backend = "triton" needs a GPU, and this is {device_type}: use "torch" (or TRITON_INTERPRET=1 '
                "in the environment, to follow the kernels slowly in Triton's interpreter)"
            )
    return backend


@functools.cache
def _load(backend: str) -> GroupedMLP:
    module, function = BACKENDS[backend]
    loaded: GroupedMLP = getattr(importlib.import_module(module), function)
    return loaded


__all__ = ["BACKENDS", "choose_backend", "grouped_mlp"]
