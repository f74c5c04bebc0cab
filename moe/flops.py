"""Arithmetic of one token, counted from the configuration."""

from __future__ import annotations

from moe.config import ModelConfig, MoEConfig, is_moe_layer
from moe.groups import RoutingGroup


def forward_flops_per_token(model: ModelConfig, moe: MoEConfig, sequence_length: int) -> int:
    """Floating-point operations of the matrix products in one token's forward pass; a multiply-add is two.

    The router counts, the embedding look-up does not, and attention counts the causal half of its products: on
    average a position attends to half the sequence (Megatron's convention, which also leaves norms and softmax out).

    Args:
        model: the transformer.
        moe: the experts; a token passes `assignments_per_token` of them on average.
        sequence_length: S.
    """
    layers = sum(layer_flops(model, moe, sequence_length, index) for index in range(model.layers))
    return round(layers + head_flops(model))


def layer_flops(model: ModelConfig, moe: MoEConfig, sequence_length: int, index: int) -> float:
    """Those of block `index`; see `forward_flops_per_token`."""
    query_width = model.heads * model.resolved_head_dim
    kv_width = model.resolved_kv_heads * model.resolved_head_dim
    projections = model.width * (2 * query_width + 2 * kv_width)
    attention = sequence_length * query_width  # scores and values, S/2 keys each
    if is_moe_layer(model, index):
        feed_forward = _mixture(model.width, moe, sequence_length)
    else:
        feed_forward = 3 * model.width * (model.feed_forward_width or moe.dense_width)
    return 2 * (projections + attention + feed_forward)


def head_flops(model: ModelConfig) -> int:
    """Those of the output head."""
    return 2 * model.width * model.vocabulary_size


def _mixture(width: int, moe: MoEConfig, sequence_length: int) -> float:
    """Multiply-adds of one token in a mixture layer, or in the dense twin's feed-forward."""
    shared = 3 * width * moe.shared_width
    if not moe.is_moe:
        return 3 * width * moe.dense_width
    if moe.router == "soft":  # affinities, mixing and unmixing; experts work on slots, which the group's tokens share
        slots = moe.num_experts * moe.slots_per_expert
        group = RoutingGroup(moe.group, moe.group_sequences, max(1, sequence_length), moe.chunk_length)
        return 3 * width * slots + 3 * width * moe.expert_width * slots / group.tokens + shared
    routers = {"hash": 0, "noisy_top_k": 2}.get(moe.router, 1) + (moe.predictor_coefficient > 0)
    return 3 * width * moe.assignments_per_token * moe.expert_width + shared + width * moe.num_experts * routers


def training_flops_per_token(model: ModelConfig, moe: MoEConfig, sequence_length: int) -> int:
    """Forward and backward: three times the forward pass. Recompute is not counted, so it cannot raise MFU."""
    return 3 * forward_flops_per_token(model, moe, sequence_length)
