"""A Choir model for transformers: a pre-norm decoder with experts, routed by thresholds or by top-k.

Threshold routing: a token meets every expert whose cutoff its score reaches. The cutoffs are numbers of the checkpoint,
so a token's experts depend on that token and its past alone, whatever else is in the batch. A token may meet no expert;
it then passes the block by its residual, and by the shared expert where there is one.

This file and configuration_choir.py are copied beside exported weights; they need torch and transformers, nothing else.

Shape suffixes: B batch, S sequence, T tokens (B*S), D width, E experts, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_choir import ChoirConfig


class ChoirAttention(nn.Module):
    """Causal attention with rotary positions; keys and values may have fewer heads than queries."""

    def __init__(self, config: ChoirConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.is_causal = True
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        if config.qk_norm != "none":
            by_head = config.qk_norm == "head"
            self.q_norm = nn.RMSNorm(config.head_dim if by_head else query_width, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim if by_head else key_width, config.rms_norm_eps)

    def forward(
        self, x_BSD: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None, **kwargs: Any
    ) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        batch, length, _ = x_BSD.shape
        query, key, value = self.q_proj(x_BSD), self.k_proj(x_BSD), self.v_proj(x_BSD)
        if self.config.qk_norm == "width":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (t.view(batch, length, -1, self.head_dim) for t in (query, key, value))
        if self.config.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        query, key = rotate(query, rotation), rotate(key, rotation)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, sdpa_attention_forward)
        out, _ = attend(self, query, key, value, mask, dropout=0.0, scaling=self.head_dim**-0.5, **kwargs)
        return self.o_proj(out.reshape(batch, length, -1))


def rotate(x_BHSD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) by their position's angles (RoFormer, eq. 15)."""
    cos, sin = rotation
    first, second = x_BHSD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class ChoirFeedForward(nn.Module):
    """SwiGLU: a dense feed-forward, one expert, or the shared expert."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden_width, bias=False)
        self.up_proj = nn.Linear(width, hidden_width, bias=False)
        self.down_proj = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ChoirRouter(nn.Module):
    """Scores tokens and decides which experts they meet, in fp32 whatever the model's type."""

    cutoffs: Tensor

    def __init__(self, config: ChoirConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=torch.float32))
        if config.routing == "threshold":
            self.register_buffer("cutoffs", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, D) -> logits (T, E), chosen (T, E) bool, and combine weights (T, E), 0 where not chosen."""
        logits_TE = x_TD.float() @ self.weight.float().T
        score_TE = logits_TE.softmax(-1) if self.config.score_function == "softmax" else logits_TE.sigmoid()
        if self.config.routing == "threshold":
            chosen_TE = score_TE >= self.cutoffs.float()
        else:  # of equal scores the lowest index, hence a stable sort
            order_TE = score_TE.sort(dim=-1, descending=True, stable=True).indices
            chosen_TE = torch.zeros_like(score_TE, dtype=torch.bool)
            chosen_TE.scatter_(1, order_TE[:, : self.config.num_experts_per_tok], True)
        weight_TE = score_TE.masked_fill(~chosen_TE, 0.0)
        if self.config.routing == "top_k" and self.config.norm_topk_prob:
            weight_TE = weight_TE / weight_TE.sum(-1, keepdim=True).clamp_min(1e-20)
        return logits_TE, chosen_TE, weight_TE * self.config.routed_scaling_factor


class ChoirMixture(nn.Module):
    """Experts behind a router, and an optional one that every token passes."""

    def __init__(self, config: ChoirConfig) -> None:
        super().__init__()
        width, shared_width = config.hidden_size, config.shared_expert_intermediate_size
        self.router = ChoirRouter(config)
        self.experts = nn.ModuleList(
            ChoirFeedForward(width, config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.shared_expert = ChoirFeedForward(width, shared_width) if shared_width else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D): the plain loop over experts."""
        x_TD = x_BSD.flatten(0, 1)
        _, chosen_TE, weight_TE = self.router(x_TD)
        y_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            token_A = chosen_TE[:, number].nonzero().squeeze(1)
            weighted_AD = expert(x_TD[token_A]) * weight_TE[token_A, number, None]
            y_TD.index_add_(0, token_A, weighted_AD.to(y_TD.dtype))
        if self.shared_expert is not None:
            y_TD = y_TD + self.shared_expert(x_TD)
        return y_TD.view_as(x_BSD)


class ChoirDecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, each behind a norm and on a residual branch."""

    def __init__(self, config: ChoirConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = ChoirAttention(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = layer_idx in config.mlp_only_layers
        self.mlp = ChoirFeedForward(config.hidden_size, config.intermediate_size) if dense else ChoirMixture(config)

    def forward(
        self, x_BSD: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None, **kwargs: Any
    ) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rotation, mask, cache, **kwargs)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class ChoirPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of both classes below."""

    config: ChoirConfig
    config_class = ChoirConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ChoirDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    # Nearly equal scores collapse into ties in bf16, so the router keeps its precision.
    _keep_in_fp32_modules_strict = ["router"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ChoirRouter):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if module.config.routing == "threshold":
                init.zeros_(module.cutoffs)


class ChoirModel(ChoirPreTrainedModel):
    """Token ids to the last block's normed outputs."""

    def __init__(self, config: ChoirConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ChoirDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states (B, S, D) and the cache; arguments as everywhere in transformers."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden_BSD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(hidden_BSD.shape[1], device=hidden_BSD.device) + past)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_BSD,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        rotation = self._rotation(position_ids, hidden_BSD.dtype)
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD, rotation, mask, cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_BSD), cache=cache)

    def _rotation(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (B, 1, S, head_dim / 2); angles in fp32."""
        dim = self.config.head_dim
        exponent = torch.arange(0, dim, 2, device=position_ids.device, dtype=torch.float32) / dim
        angle = position_ids[:, None, :, None].float() * self.config.rope_theta**-exponent
        return angle.cos().to(dtype), angle.sin().to(dtype)


class ChoirForCausalLM(ChoirPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ChoirConfig) -> None:
        super().__init__(config)
        self.model = ChoirModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, S, V), and the loss of next-token prediction where labels are given."""
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BSV = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BSV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BSV, cache=out.cache)
