"""Where a kernel runs: the kind of device, and the one function that launches (or only notes down) a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction


@dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
        name: "sm_80", "sm_90", "sm_100", "gfx942", or "interpreter".
        processors: multiprocessors, and so programs of a persistent kernel.
        descriptors: it loads tiles by descriptor (TMA), not through pointers.
    """

    name: str
    processors: int
    descriptors: bool


INTERPRETER = Target("interpreter", 2, True)

# What ahead-of-time compilation stands in for: A100, H100 and H200, B200, MI300X.
TARGETS = {
    "sm_80": Target("sm_80", 108, False),
    "sm_90": Target("sm_90", 132, True),
    "sm_100": Target("sm_100", 148, True),
    "gfx942": Target("gfx942", 304, False),
}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 was set before triton was imported."""
    return isinstance(triton.language.sum, InterpretedFunction)


def target_of(device: torch.device) -> Target:
    """The target that stands for a device.

    Raises:
        ValueError: Triton runs on no such device, or there are no tile shapes for it.
    """
    if interpreted():
        return INTERPRETER
    if device.type != "cuda":
        raise ValueError(
            f"the triton backend runs on GPUs, and the tensors are on {device.type!r}: move them, choose "
            'backend = "torch", or set TRITON_INTERPRET=1 before Python starts (slow, for tests)'
        )
    properties = torch.cuda.get_device_properties(device)
    name = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    if name not in TARGETS:
        raise ValueError(
            f"the triton backend has tile shapes for {', '.join(TARGETS)} and not for {name} ({properties.name}): "
            'choose backend = "torch"'
        )
    return Target(name, properties.multi_processor_count, TARGETS[name].descriptors)


@dataclass(frozen=True)
class Launch:
    """One kernel call.

    Attributes:
        name: what the call is for; one kernel may serve several.
        kernel: the jitted function.
        grid: number of programs.
        arguments: by name, compile-time constants included.
        warps, stages: of Triton's launch options.
    """

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int


_noted: list[Launch] | None = None


@contextmanager
def only_noted() -> Iterator[list[Launch]]:
    """Within this context nothing runs: launches are collected, so that they can be compiled without a device."""
    global _noted
    before, _noted = _noted, []
    try:
        yield _noted
    finally:
        _noted = before


_watched: tuple[str, Callable[[], Any], list[tuple[Any, Any]]] | None = None


@contextmanager
def watched(name: str, clock: Callable[[], Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Within this context `clock` is called before and after each launch of one name, and the pairs are collected."""
    global _watched
    before, _watched = _watched, (name, clock, [])
    try:
        yield _watched[2]
    finally:
        _watched = before


def launch(name: str, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, **arguments: Any) -> None:
    """Run a kernel, or note it down."""
    if _noted is not None:
        _noted.append(Launch(name, kernel, grid, arguments, warps, stages))
        return
    clock = _watched[1] if _watched is not None and _watched[0] == name else None
    began = clock() if clock else None
    kernel[grid](**arguments, num_warps=warps, num_stages=stages)
    if clock and _watched is not None:
        _watched[2].append((began, clock()))


def precision(dtype: torch.dtype) -> str:
    """How fp32 operands are multiplied: exactly, unless PyTorch was told that its own products need not be."""
    exact = dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def describable(*tensors: Tensor) -> bool:
    """Whether descriptors can address these tensors: rows and start at multiples of 16 bytes."""
    return all(tensor.data_ptr() % 16 == 0 and tensor.shape[-1] * tensor.element_size() % 16 == 0 for tensor in tensors)
