"""Arithmetic of one token, counted from the configuration."""

from __future__ import annotations

from moe.config import ModelConfig, MoEConfig, is_moe_layer


def forward_flops_per_token(model: ModelConfig, moe: MoEConfig, sequence_length: int) -> int:
    """Floating-point operations of the matrix products in one token's forward pass; a multiply-add is two.

    The router counts, the embedding look-up does not, and attention counts the causal half of its products: on
    average a position attends to half the sequence (Megatron's convention, which also leaves norms and softmax out).

    Args:
        model: the transformer.
        moe: the experts; a token passes `experts_per_token` of them on average.
        sequence_length: S.
    """
    query_width = model.heads * model.resolved_head_dim
    kv_width = model.resolved_kv_heads * model.resolved_head_dim
    projections = model.width * (2 * query_width + 2 * kv_width)
    attention = sequence_length * query_width  # scores and values, S/2 keys each
    layers = 0
    for index in range(model.layers):
        if is_moe_layer(model, index):
            feed_forward = 3 * model.width * moe.active_width
            layers += feed_forward + (model.width * moe.num_experts if moe.is_moe else 0)
        else:
            layers += 3 * model.width * (model.feed_forward_width or moe.active_width)
    head = model.width * model.vocabulary_size
    return 2 * (model.layers * (projections + attention) + layers + head)


def training_flops_per_token(model: ModelConfig, moe: MoEConfig, sequence_length: int) -> int:
    """Forward and backward: three times the forward pass. Recompute is not counted, so it cannot raise MFU."""
    return 3 * forward_flops_per_token(model, moe, sequence_length)
