"""Grouped-query attention with rotary positions, document masks and a key/value cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from moe.config import ModelConfig
from moe.modules import Linear, RMSNorm


class KeyValueCache:
    """Keys and values of the positions seen so far, for every layer.

    Args:
        config: model shape.
        batch: B.
        capacity: positions there is room for; filling the last one is fine, one more is an error.
        dtype: of the activations.
        device: where the model is.

    Attributes:
        length: positions filled, the same for all rows (shorter prompts are padded on the left).
        valid_BS: bool, False where a position is padding.
    """

    def __init__(
        self, config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.layers, 2, batch, config.resolved_kv_heads, capacity, config.resolved_head_dim)
        self.states = torch.zeros(shape, dtype=dtype, device=device)
        self.valid_BS = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return self.valid_BS.shape[1]

    def append(self, layer: int, key_BHSD: Tensor, value_BHSD: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values behind the filled ones; returns all so far. `advance` moves the end on."""
        end = self.length + key_BHSD.shape[2]
        self.states[layer, 0, :, :, self.length : end] = key_BHSD
        self.states[layer, 1, :, :, self.length : end] = value_BHSD
        return self.states[layer, 0, :, :, :end], self.states[layer, 1, :, :, :end]


class Attention(nn.Module):
    """Causal self-attention.

    Attributes:
        query, key, value: projections to heads, apart so that each can be split over its heads.
        output: projection back to the model width.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.heads, self.kv_heads = config.heads, config.resolved_kv_heads
        self.head_dim = config.resolved_head_dim
        self.query = Linear(config.width, self.heads * self.head_dim)
        self.key = Linear(config.width, self.kv_heads * self.head_dim)
        self.value = Linear(config.width, self.kv_heads * self.head_dim)
        self.output = Linear(self.heads * self.head_dim, config.width)
        self.norm_heads = config.qk_norm == "head"
        if config.qk_norm == "none":
            self.query_norm: nn.Module = nn.Identity()
            self.key_norm: nn.Module = nn.Identity()
        else:
            wide = config.qk_norm == "width"
            query_width, key_width = (self.heads, self.kv_heads) if wide else (1, 1)
            self.query_norm = RMSNorm(query_width * self.head_dim, config.norm_epsilon)
            self.key_norm = RMSNorm(key_width * self.head_dim, config.norm_epsilon)

    def forward(
        self,
        x_BSD: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x_BSD: (B, S, D).
            rotation: cosines and sines from `rotary_rotation`.
            mask: additive (B, 1, S, keys); None means plainly causal.
            cache: where earlier keys and values are.

        Returns:
            (B, S, D).
        """
        query, key, value = self.query(x_BSD), self.key(x_BSD), self.value(x_BSD)
        if not self.norm_heads:  # over the whole width, or identity
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (rearrange(t, "b s (h d) -> b h s d", d=self.head_dim) for t in (query, key, value))
        if self.norm_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, rotation), rotate(key, rotation)
        if cache is not None:
            key, value = cache.append(self.index, key, value)
        grouped = self.kv_heads != self.heads
        if grouped and mask is not None and query.is_cuda:
            # With a mask, CUDA's fused kernels want as many key heads as query heads; else the slow one is taken.
            key, value = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (key, value))
            grouped = False
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return self.output(rearrange(out, "b h s d -> b s (h d)"))


def rotary_rotation(position_BS: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (Su et al. 2021, eq. 15), each (B, 1, S, head_dim / 2).

    Angles are computed in fp32 and rounded to `dtype` last, since bf16 positions collide beyond 256.
    """
    exponent = torch.arange(0, head_dim, 2, device=position_BS.device, dtype=torch.float32) / head_dim
    angle = position_BS[:, None, :, None].float() * base**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BHSD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) by their position's angles."""
    cos, sin = rotation
    first, second = x_BHSD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention_mask(
    batch: int,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
    document_BS: Tensor | None = None,
    valid_BS: Tensor | None = None,
    cache: KeyValueCache | None = None,
) -> Tensor | None:
    """Additive mask (B, 1, S, keys), or None where plain causal attention says the same.

    A position sees itself and earlier valid positions of its document. Padding sees itself too, so that no row of
    the softmax is empty.

    Args:
        batch: B.
        length: S, new positions.
        device: of the model.
        dtype: of the activations.
        document_BS: document number of each position; not with a cache.
        valid_BS: validity of the new positions.
        cache: earlier positions; its `valid_BS` already covers the new ones.
    """
    if document_BS is None and valid_BS is None and cache is None:
        return None
    past = 0 if cache is None else cache.length
    query_S1 = torch.arange(past, past + length, device=device)[:, None]
    key_1S = torch.arange(past + length, device=device)[None, :]
    seen_BSS = (key_1S <= query_S1).expand(batch, -1, -1)
    if cache is not None:
        seen_BSS = seen_BSS & cache.valid_BS[:, None, : past + length]
    elif valid_BS is not None:
        seen_BSS = seen_BSS & valid_BS[:, None, :]
    if document_BS is not None:
        seen_BSS = seen_BSS & (document_BS[:, :, None] == document_BS[:, None, :])
    seen_BSS = seen_BSS | (key_1S == query_S1)
    return torch.zeros(seen_BSS.shape, device=device, dtype=dtype).masked_fill_(~seen_BSS, -torch.inf)[:, None]
