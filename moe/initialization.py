"""Parameter values as a function of (seed, name, expert, row block): independent of layout and of build order.

A model is built without memory (on the meta device) and filled afterwards. Since each block of rows has a generator
of its own, a process that holds a shard will be able to draw just that.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from moe.config import ModelConfig, MoEConfig
from moe.layer import Experts
from moe.model import Transformer
from moe.modules import RMSNorm
from moe.routers.base import Router
from moe.soft import SoftMoELayer

# Rows drawn from one generator. A shard boundary inside a block would draw the block and keep a part.
ROW_BLOCK = 128


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
def initialize(model: Transformer, seed: int) -> None:
    """Fill parameters and buffers.

    Norms are 1. Matrices are normal with variance 1 / fan_in, so that activations keep their size at any width; those
    that write to the residual stream are divided by sqrt(2 L) more (GPT-2). An embedding of its own has variance 1, so
    that the blocks' first outputs do not drown the token they are about; a tied one has the head's 1 / D.
    """
    residual = 1 / math.sqrt(2 * model.config.layers)
    norms = {id(module.weight) for module in model.modules() if isinstance(module, RMSNorm)}
    routers = [module for module in model.modules() if isinstance(module, Router | SoftMoELayer)]
    vectors = {id(p) for router in routers for p in router.parameters() if p.dim() < 2}
    for name, parameter in model.named_parameters():
        if id(parameter) in norms:
            parameter.fill_(1.0)
            continue
        if id(parameter) in vectors:
            parameter.fill_(torch.nan)  # until the router says
            continue
        if parameter.dim() < 2:
            raise AssertionError(f"no initial value is defined for {name}: say here what it starts from")
        std = 1 / math.sqrt(parameter.shape[-1])
        if name == "embedding.weight" and model.head is not None:
            std = 1.0
        elif name.endswith((".output.weight", ".down.weight", ".w2_EDF")):
            std *= residual
        _fill_normal(parameter, std, seed, name, by_expert=name.endswith((".w13_E2FD", ".w2_EDF")))
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


def _fill_normal(parameter: Tensor, std: float, seed: int, name: str, by_expert: bool) -> None:
    """Draw each expert's rows, block by block, from a generator of their own."""
    matrices = parameter.flatten(1, -2).unbind(0) if by_expert else (parameter,)
    for expert, matrix in enumerate(matrices):
        for block in range(0, matrix.shape[0], ROW_BLOCK):
            rows = matrix[block : block + ROW_BLOCK]
            generator = torch.Generator().manual_seed(_key(seed, name, expert, block // ROW_BLOCK))
            rows.copy_(torch.randn(rows.shape, generator=generator) * std)


def _key(*parts: object) -> int:
    """A 63-bit seed from a tuple. Hashed, so that nearby tuples give unrelated streams."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def parameter_counts(model: Transformer) -> tuple[int, int]:
    """(all parameters, parameters that one token uses on average). The embedding table counts as used.

    A soft mixture counts as using the share of its experts that routing at `experts_per_token` would.
    """
    total = sum(p.numel() for p in model.parameters())
    moe = model.moe_config
    held = [sum(p.numel() for p in module.parameters()) for module in model.modules() if isinstance(module, Experts)]
    return total, total - sum(n - round(n / moe.num_experts * moe.assignments_per_token) for n in held)
