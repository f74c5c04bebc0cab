"""Configuration of a Choir model for transformers: a decoder with experts, routed by thresholds or by top-k.

This file and modeling_choir.py are copied beside exported weights; they need torch and transformers, nothing else.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


class ChoirConfig(PreTrainedConfig):
    """Shape of the model, and how it routes.

    Args:
        vocab_size: token ids.
        hidden_size: width of the residual stream.
        intermediate_size: hidden width of a dense feed-forward.
        moe_intermediate_size: hidden width of one expert.
        shared_expert_intermediate_size: hidden width of the expert that every token passes; 0 for none.
        num_hidden_layers: blocks.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: size of a head.
        qk_norm: "none", "head" (queries and keys normed head by head) or "width" (all heads together).
        mlp_only_layers: blocks with a dense feed-forward in place of experts.
        num_experts: experts of a block.
        num_experts_per_tok: experts a token gets: exactly under "top_k", on average under "threshold".
        routing: "threshold": a token meets every expert whose cutoff its score reaches, which may be none;
            "top_k": its best ones.
        score_function: "softmax" or "sigmoid", of the router's logits.
        norm_topk_prob: under "top_k", divide a token's weights by their sum.
        routed_scaling_factor: times every weight.
        rms_norm_eps: added to the mean square inside RMSNorm.
        rope_theta: base of the rotary position embedding.
        max_position_embeddings: tokens of a training sequence; nothing is tied to it.
        initializer_range: deviation of new weights.
        use_cache: whether to keep keys and values when generating.
        tie_word_embeddings: the head is the embedding's matrix.
        **kwargs: token ids and what else every configuration has.
    """

    model_type = "choir"
    keys_to_ignore_at_inference = ("cache",)

    def __init__(
        self,
        vocab_size: int = 2048,
        hidden_size: int = 256,
        intermediate_size: int = 512,
        moe_intermediate_size: int = 256,
        shared_expert_intermediate_size: int = 0,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        head_dim: int = 64,
        qk_norm: str = "none",
        mlp_only_layers: list[int] | None = None,
        num_experts: int = 16,
        num_experts_per_tok: int = 2,
        routing: str = "threshold",
        score_function: str = "softmax",
        norm_topk_prob: bool = False,
        routed_scaling_factor: float = 1.0,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        max_position_embeddings: int = 256,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        allowed = {
            "qk_norm": (qk_norm, ("none", "head", "width")),
            "routing": (routing, ("threshold", "top_k")),
            "score_function": (score_function, ("softmax", "sigmoid")),
        }
        for key, (value, choices) in allowed.items():
            if value not in choices:
                raise ValueError(f"{key} = {value!r}: must be one of {', '.join(choices)}")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.moe_intermediate_size = moe_intermediate_size
        self.shared_expert_intermediate_size = shared_expert_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.qk_norm = qk_norm
        self.mlp_only_layers = list(mlp_only_layers or [])
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.routing = routing
        self.score_function = score_function
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(**kwargs | {"tie_word_embeddings": tie_word_embeddings})
