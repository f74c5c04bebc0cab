"""Random numbers as a function of (seed, step, layer, token): the same under any layout and any micro-batching."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.routing import RoutingContext

# Uses of noise within one layer, told apart by a number.
PURPOSES = {"jitter": 1, "noisy top-k": 2, "second expert": 3}


def uniform(context: RoutingContext, layer: int, purpose: str, numbers: int, device: torch.device) -> Tensor:
    """fp32 (T, numbers) in (0, 1); a token's row does not depend on which other tokens share its pass.

    SplitMix64's finaliser (Steele et al. 2014, "Fast splittable pseudorandom number generators") scrambles seed, step,
    layer, purpose, token and number, one after the other, in integer arithmetic: equal on every device. The first
    four are tensors too, so that torch.compile neither stops at them nor compiles anew for every step.

    Args:
        context: seed, step, and the number of the pass' first token in the step.
        layer: number of the block.
        purpose: one of `PURPOSES`.
        numbers: how many for each token.
        device: where to.
    """
    key = torch.zeros((), dtype=torch.int64, device=device)
    for part in (context.seed, context.step, layer, PURPOSES[purpose]):
        key = _mix(key + part)
    token_T1 = torch.arange(context.num_tokens, device=device)[:, None] + context.first_token
    return _unit(_mix(_mix(key + token_T1) + torch.arange(numbers, device=device)))


def normal(context: RoutingContext, layer: int, purpose: str, numbers: int, device: torch.device) -> Tensor:
    """fp32 (T, numbers) standard normal; see `uniform`."""
    return torch.special.ndtri(uniform(context, layer, purpose, numbers, device))


def _unit(scrambled: Tensor) -> Tensor:
    """fp32 in (0, 1) from 64 random bits: the middles of 2^23 equal steps.

    One bit more and the last middle would round to 1, whose normal quantile is infinite: once in 17 million draws.
    """
    return (_shift_right(scrambled, 41).float() + 0.5) * 2.0**-23


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose sums and products wrap."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shift_right(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Of an unsigned number: int64's own shift would copy the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
