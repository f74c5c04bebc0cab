"""Small building blocks: linear maps and norms that compute in the activation's precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Linear(nn.Module):
    """A bias-free linear map. The fp32 weight is cast to the input's dtype, so bf16 runs keep fp32 masters.

    Args:
        in_width: size of the input's last dimension.
        out_width: size of the output's.
    """

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_width, in_width))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_width) -> (..., out_width)."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as the input; the mean is taken in fp32 at least."""
        if x.device.type == "cpu":
            return _RMSNormOnCPU.apply(x, self.weight.to(x.dtype), self.epsilon)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.epsilon)


class _RMSNormOnCPU(torch.autograd.Function):
    """F.rms_norm in fewer passes over memory: it has no fused kernel on CPU (measured: 2.5 times faster in bf16).

    The row's scale is rounded to the activation's dtype, so a bf16 row can be off by one more bf16 rounding (0.4%).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        scale = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_().to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        (dy,) = grads
        normed = x * scale
        dweight = (dy * normed).flatten(0, -2).sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
        dnormed = dy * weight
        mean = (dnormed * normed).mean(-1, keepdim=True)
        return torch.addcmul(dnormed, normed, mean, value=-1).mul_(scale), dweight.to(weight.dtype), None


class FeedForward(nn.Module):
    """Dense SwiGLU: W2 (silu(W1 x) * W3 x) (Shazeer 2020). Also the shared expert and the dense twin."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate = Linear(width, hidden_width)
        self.up = Linear(width, hidden_width)
        self.down = Linear(hidden_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))
