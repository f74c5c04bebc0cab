"""What every backend may rely on: shapes, types and places that fit together. A kernel would read past their ends."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.routing import Routing

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_operands(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor, routing: Routing) -> None:
    """Refuse operands that do not fit together. Nothing waits for a device.

    On a CPU the values of `offsets_E` are looked at too. On other devices they are trusted, and so is `token_A`
    everywhere: a router made them.

    Raises:
        ValueError: says what was given and what fits.
    """
    token_A, weight_A, offsets_E = routing.token_A, routing.weight_A, routing.offsets_E
    given = {"x": x_TD, "w13": w13_E2FD, "w2": w2_EDF, "offsets_E": offsets_E, "token_A": token_A, "weight_A": weight_A}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            raise ValueError(f"{name} is a {type(tensor).__name__}: give its part here, {name}.to_local()")
    if len(devices := {tensor.device for tensor in tensors.values()}) > 1:
        raise ValueError(f"operands are on {' and '.join(sorted(map(str, devices)))}: move all of them to one device")
    _check_types(x_TD, w13_E2FD, w2_EDF)
    fit = x_TD.dim() == 2 and w13_E2FD.dim() == 4 and w13_E2FD.shape[1] == 2 and offsets_E.dim() == 1
    if fit:
        num_experts, _, hidden, width = w13_E2FD.shape
        fit = x_TD.shape[1] == width and w2_EDF.shape == (num_experts, width, hidden)
        fit = fit and offsets_E.shape[0] == num_experts and min(num_experts, hidden, width) > 0
    fit = fit and (token_A is None or token_A.dim() == 1)
    rows = x_TD.shape[0] if token_A is None else token_A.shape[0]
    if not fit or (weight_A is not None and weight_A.shape != (rows,)):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(
            f"operands do not fit together: {shapes}. They are x (T, D), w13 (E, 2, F, D), w2 (E, D, F), offsets_E "
            "(E,), token_A (A,) or None, and weight_A as long as token_A, or as x where that is None"
        )
    if offsets_E.dtype != torch.int32 or not offsets_E.is_contiguous():
        raise ValueError(
            f"offsets_E is {offsets_E.dtype} with strides {offsets_E.stride()}: give contiguous int32, "
            "offsets_E.to(torch.int32).contiguous()"
        )
    if token_A is not None and token_A.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"token_A is {token_A.dtype}: give int64")
    if routing.capacity is not None and routing.capacity * num_experts != rows:
        raise ValueError(
            f"capacity = {routing.capacity} of {num_experts} experts is {routing.capacity * num_experts} rows, and "
            f"there are {rows}: give capacity = None where experts take unequal numbers"
        )
    if type(offsets_E) is Tensor and offsets_E.device.type == "cpu":
        check_offsets(offsets_E, rows, routing.capacity)


def _check_types(x_TD: Tensor, w13_E2FD: Tensor, w2_EDF: Tensor) -> None:
    if not x_TD.dtype == w13_E2FD.dtype == w2_EDF.dtype:
        named = {"x": x_TD, "w13": w13_E2FD, "w2": w2_EDF}
        found = ", ".join(f"{name} is {tensor.dtype}" for name, tensor in named.items())
        raise ValueError(f"the experts' operands have one type: {found}. Cast them to one")
    if x_TD.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"the experts compute in {names}, not in {x_TD.dtype}: cast")


def check_offsets(offsets_E: Tensor, rows: int, capacity: int | None) -> None:
    """Refuse values that are not the ends of runs; only of a tensor in the host's memory, which nobody waits for."""
    end_E = offsets_E.tolist()
    start_E = [0, *end_E[:-1]]
    lengths = [end - start for start, end in zip(start_E, end_E, strict=True)]
    if capacity is not None and set(lengths) != {capacity}:
        raise ValueError(
            f"capacity = {capacity} and offsets_E = {end_E}: these are not ends of runs of {capacity}; give capacity = "
            "None where experts take unequal numbers"
        )
    if min(lengths) < 0 or end_E[-1] > rows:
        raise ValueError(f"offsets_E = {end_E}: must be the rising ends of runs in {rows} rows")
