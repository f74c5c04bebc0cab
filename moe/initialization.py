"""Parameter values as a function of (seed, name, expert, row block): independent of layout and of build order.

A model is built without memory (on the meta device) and filled afterwards. Each block of rows has a generator of its
own, so a process that holds a shard draws the blocks that it lies in and no other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe.config import ModelConfig, MoEConfig
from moe.model import Transformer
from moe.modules import RMSNorm
from moe.routers.base import Router
from moe.soft import Slots

# Rows drawn from one generator. A shard boundary inside a block would draw the block and keep a part.
ROW_BLOCK = 128


class Shard(NamedTuple):
    """The part of a parameter that this process holds.

    Attributes:
        values: the part itself, written in place.
        shape: of the whole parameter.
        start: where the part begins, in each dimension.
    """

    values: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]


def whole(parameter: Tensor) -> Shard:
    """A parameter that one process holds."""
    return Shard(parameter, tuple(parameter.shape), (0,) * parameter.dim())


def build_model(
    model: ModelConfig,
    moe: MoEConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype = torch.float32,
) -> Transformer:
    """Build and initialise a model."""
    with torch.device("meta"):
        transformer = Transformer(model, moe, compute_dtype)
    transformer.to_empty(device=device)
    initialize(transformer, seed)
    return transformer


@torch.no_grad()
def initialize(model: Transformer, seed: int, shard_of: Callable[[Tensor], Shard] = whole) -> None:
    """Fill parameters and buffers.

    Norms are 1. Matrices are normal with variance 1 / fan_in, so that activations keep their size at any width; those
    that write to the residual stream are divided by sqrt(2 L) more (GPT-2). An embedding of its own has variance 1, so
    that the blocks' first outputs do not drown the token they are about; a tied one has the head's 1 / D.

    Args:
        model: whole, or a stage.
        seed: of the run.
        shard_of: finds the part of a parameter that is here.
    """
    residual = 1 / math.sqrt(2 * model.config.layers)
    norms = {id(p) for module in model.modules() if isinstance(module, RMSNorm) for p in module.parameters()}
    routers = [module for module in model.modules() if isinstance(module, Router | Slots)]
    vectors = {id(p) for router in routers for p in router.parameters() if p.dim() < 2}
    for name, parameter in model.named_parameters():
        shard = shard_of(parameter)
        if id(parameter) in norms:
            shard.values.fill_(1.0)
            continue
        if id(parameter) in vectors:
            shard.values.fill_(torch.nan)  # until the router says
            continue
        if parameter.dim() < 2:
            raise AssertionError(f"no initial value is defined for {name}: say here what it starts from")
        std = 1 / math.sqrt(parameter.shape[-1])
        if name == "embedding.weight" and not model.config.tie_embeddings:
            std = 1.0
        elif name.endswith((".output.weight", ".down.weight", ".w2_EDF")):
            std *= residual
        _fill_normal(shard, std, seed, name, by_expert=is_expert(name))
    for router in routers:
        for buffer in router.buffers():  # memory garbage could pass for a value
            buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)
        router.reset_parameters()
        if isinstance(router, Router):
            router.reset_buffers()
        for name, tensor in [*router.named_parameters(), *router.named_buffers()]:
            unset = tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).min
            if unset.any():
                raise AssertionError(f"{type(router).__name__} does not say in reset_... what {name} starts from")


def is_expert(name: str) -> bool:
    """Whether a parameter's first dimension counts experts."""
    return name.endswith((".w13_E2FD", ".w2_EDF"))


def _fill_normal(shard: Shard, std: float, seed: int, name: str, by_expert: bool) -> None:
    """Draw each expert's rows, block by block, from a generator of their own.

    An expert's gate and up projections are numbered as the rows of one matrix: up's follow gate's.
    """
    values, shape, start = shard
    if not by_expert:
        _fill_rows(values, (seed, name, 0), std, shape[0], start[0], (shape[-1], start[-1]))
        return
    matrices = 2 if len(shape) == 4 else 1
    for index, expert_values in enumerate(values.unbind(0)):
        key = (seed, name, start[0] + index)
        parts = expert_values.unbind(0) if matrices == 2 else (expert_values,)
        first = start[1] if matrices == 2 else 0
        for matrix, part in enumerate(parts, start=first):
            row = matrix * shape[-2] + start[-2]
            _fill_rows(part, key, std, shape[-2] * matrices, row, (shape[-1], start[-1]))


def _fill_rows(
    values: Tensor, key: tuple[int, str, int], std: float, rows: int, start: int, columns: tuple[int, int]
) -> None:
    """Fill rows from `start` of a matrix that has `rows`; `columns` are how many it has, and the first one here."""
    width, first_column = columns
    end = start + values.shape[0]
    for block in range(start // ROW_BLOCK, -(-end // ROW_BLOCK) if values.numel() else 0):
        top = block * ROW_BLOCK
        generator = torch.Generator().manual_seed(_key(*key, block))
        drawn = torch.randn((min(ROW_BLOCK, rows - top), width), generator=generator) * std
        here = slice(max(start, top), min(end, top + ROW_BLOCK))
        kept = drawn[here.start - top : here.stop - top, first_column : first_column + values.shape[1]]
        values[here.start - start : here.stop - start].copy_(kept)


def _key(*parts: object) -> int:
    """A 63-bit seed from a tuple. Hashed, so that nearby tuples give unrelated streams."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def parameter_counts(model: Transformer) -> tuple[int, int]:
    """(all parameters, parameters that one token uses on average). The embedding table counts as used.

    A soft mixture counts as using the share of its experts that routing at `experts_per_token` would.
    """
    total = sum(p.numel() for p in model.parameters())
    moe = model.moe_config
    held = sum(p.numel() for name, p in model.named_parameters() if is_expert(name))
    return total, total - held + round(held / moe.num_experts * moe.assignments_per_token)
