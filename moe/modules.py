"""Small building blocks: linear maps and norms that compute in the activation's precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        """Same shape and dtype as the input; the mean is taken in fp32."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.epsilon)


class FeedForward(nn.Module):
    """Dense SwiGLU: W2 (silu(W1 x) * W3 x) (Shazeer 2020). Also the shared expert and the dense twin."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * hidden_width)
        self.down = Linear(hidden_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
