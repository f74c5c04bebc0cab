"""Parameters in parts: DTensors outside, plain tensors where a module computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from moe.initialization import Shard


def split_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Replace a parameter by this process' part of it, on which the module's forward pass works from then on.

    Checkpoints, optimizer and FSDP2 see a DTensor under the parameter's name. In the forward pass `module.NAME` is the
    local part, so the module's own arithmetic need not know.
    """
    whole = module._parameters[name]
    assert whole is not None
    module._parameters[name] = nn.Parameter(distribute_tensor(whole.detach(), mesh, placements))
    forward = type(module).forward

    def on_local_part(self: nn.Module, *args: Any) -> Any:
        parameter = self._parameters[name]
        self._parameters[name] = local_part(parameter)  # type: ignore[assignment, arg-type]
        try:
            return forward(self, *args)
        finally:
            self._parameters[name] = parameter

    specialize(module, {"forward": on_local_part})


def specialize(module: nn.Module, members: dict[str, Any]) -> None:
    """Give one module a class of its own: its present one with other members."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), members)


def shard_of(parameter: Tensor) -> Shard:
    """The part of a parameter that this process holds, and where that lies in the whole: `initialize` fills it."""
    if not isinstance(parameter, DTensor):
        return Shard(parameter, tuple(parameter.shape), (0,) * parameter.dim())
    _, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Shard(parameter.to_local(), tuple(parameter.shape), tuple(start))


def mesh_axes(parameter: Tensor) -> set[str]:
    """Mesh axes that a parameter is split over."""
    return set(parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else set()


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """This process' part of a gradient; zeros where backward left none, because other processes may hold one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)
