"""The decoder-only transformer, with experts in place of some feed-forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.attention import Attention, KeyValueCache, attention_mask, rotary_rotation
from moe.config import ModelConfig, MoEConfig, is_moe_layer
from moe.layer import MoELayer
from moe.modules import FeedForward, Linear, RMSNorm
from moe.routers import router_class
from moe.routers.base import Router
from moe.routing import RoutingContext
from moe.soft import SoftMoELayer


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each on a residual branch."""

    def __init__(self, model: ModelConfig, moe: MoEConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.width, model.norm_epsilon)
        self.attention = Attention(model, index)
        self.feed_forward_norm = RMSNorm(model.width, model.norm_epsilon)
        self.feed_forward: MoELayer | SoftMoELayer | FeedForward
        if moe.is_moe and is_moe_layer(model, index):
            mixture = SoftMoELayer if moe.router == "soft" else MoELayer
            self.feed_forward = mixture(moe, model.width, index)
        else:
            dense_width = model.feed_forward_width or moe.dense_width
            twin = is_moe_layer(model, index)  # where the mixture model has experts, its dense twin matches their width
            self.feed_forward = FeedForward(model.width, moe.dense_width if twin else dense_width)

    def forward(
        self,
        x_BSD: Tensor,
        context: RoutingContext,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotation, mask, cache)
        normed_BSD = self.feed_forward_norm(x_BSD)
        if isinstance(self.feed_forward, MoELayer | SoftMoELayer):
            return x_BSD + self.feed_forward(normed_BSD, context)
        return x_BSD + self.feed_forward(normed_BSD)


class Transformer(nn.Module):
    """Token ids to logits: the whole model, or the part of it that is one stage of a pipeline.

    Args:
        model: shape of the whole.
        moe: routing and experts.
        compute_dtype: see below.
        layers: which blocks this part holds. With the first one comes the embedding, with the last one the final norm
            and the head, which under `tie_embeddings` is the embedding's matrix (or, on another stage, a copy of it).

    Attributes:
        compute_dtype: of activations and matrix products; parameters stay fp32. Router, norms' means and loss are
            fp32 always.
        is_first, is_last: whether this part begins with the embedding, and ends with the head.
    """

    def __init__(
        self,
        model: ModelConfig,
        moe: MoEConfig,
        compute_dtype: torch.dtype = torch.float32,
        layers: range | None = None,
    ) -> None:
        super().__init__()
        self.config = model
        self.moe_config = moe
        self.compute_dtype = compute_dtype
        layers = range(model.layers) if layers is None else layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.layers
        needs_table = self.is_first or (self.is_last and model.tie_embeddings)
        self.embedding = nn.Embedding(model.vocabulary_size, model.width) if needs_table else None
        # A dictionary keeps a block's name where a pipeline stage holds only some: seeds and checkpoints go by it.
        self.blocks = nn.ModuleDict({str(index): Block(model, moe, index) for index in layers})
        self.final_norm = RMSNorm(model.width, model.norm_epsilon) if self.is_last else None
        has_head = self.is_last and not model.tie_embeddings
        self.head = Linear(model.width, model.vocabulary_size) if has_head else None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def moe_layers(self) -> list[MoELayer]:
        """The layers with a router, first to last; soft mixtures have none."""
        return [module for module in self.modules() if isinstance(module, MoELayer)]

    def forward(
        self,
        token_BS: Tensor,
        context: RoutingContext | None = None,
        document_BS: Tensor | None = None,
        cache: KeyValueCache | None = None,
        hidden_BSD: Tensor | None = None,
        label_BS: Tensor | None = None,
    ) -> Tensor:
        """Logits of every position, or with labels the losses.

        Args:
            token_BS: int64 ids.
            context: routing mode, padding and normalisation; by default causal routing and no padding.
            document_BS: document number of each position: attention stays within a document and positions restart at
                its first token. None: one document a row.
            cache: keys and values of earlier positions; the new ones are appended. Not with `document_BS`.
            hidden_BSD: what the stage before handed on; only where this is not the first one.
            label_BS: int64 ids to predict, -100 where there is none.

        Returns:
            (B, S, V) logits in `compute_dtype`; with labels `token_losses`, (B, S), so that logits need not leave the
            model. From a stage that is not the last: (B, S, D) for the next one, which leaves through no norm.

        Raises:
            ValueError: if the cache is too small, or is used with documents.
        """
        batch, length = token_BS.shape
        context = RoutingContext(batch, length) if context is None else context
        context.token_BS = token_BS
        device, dtype = token_BS.device, self.compute_dtype
        if document_BS is not None:  # numbered by runs, so that a number used twice in a row is two documents
            document_BS = F.pad(document_BS[:, 1:] != document_BS[:, :-1], (1, 0)).cumsum(1)
        valid_BS = context.valid_BS
        if cache is not None:
            if document_BS is not None:
                raise ValueError("a key/value cache holds one document a row: give document_BS or a cache, not both")
            if cache.length + length > cache.capacity:
                raise ValueError(
                    f"the cache has room for {cache.capacity} positions, {cache.length} are filled and {length} more "
                    "were given: make a larger cache"
                )
            new_valid = True if valid_BS is None else valid_BS
            cache.valid_BS[:, cache.length : cache.length + length] = new_valid
        position_BS = positions(batch, length, device, document_BS, valid_BS, cache)
        rotation = rotary_rotation(position_BS, self.config.resolved_head_dim, self.config.rope_base, dtype)
        mask = attention_mask(batch, length, device, dtype, document_BS, valid_BS, cache)
        if self.is_first:
            assert self.embedding is not None
            hidden_BSD = self.embedding(token_BS).to(dtype)
        assert hidden_BSD is not None, "a later stage needs what the one before hands on"
        for block in self.blocks.values():
            hidden_BSD = block(hidden_BSD, context, rotation, mask, cache)
        if cache is not None:
            cache.length += length
        if self.final_norm is None:
            return hidden_BSD
        normed_BSD = self.final_norm(hidden_BSD)
        return self.logits(normed_BSD) if label_BS is None else self.losses(normed_BSD, label_BS)

    def logits(self, normed_BSD: Tensor) -> Tensor:
        """(B, S, V) of the last block's normed outputs."""
        if self.head is not None:
            return self.head(normed_BSD)
        assert self.embedding is not None
        return F.linear(normed_BSD, self.embedding.weight.to(normed_BSD.dtype))

    def losses(self, normed_BSD: Tensor, label_BS: Tensor) -> Tensor:
        """See `token_losses`."""
        return token_losses(self.logits(normed_BSD), label_BS)

    def after_step(self) -> None:
        """Let every router update its balance state; call once after each optimizer step."""
        update_routers(self.moe_config, [layer.router for layer in self.moe_layers()])

    def forget_step(self) -> None:
        """Let every router drop what it recorded of a step that is not taken."""
        for layer in self.moe_layers():
            layer.router.forget_step()


def update_routers(
    moe: MoEConfig, routers: Sequence[Router], over_stages: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Let routers update their balance state from what they recorded of a step.

    Args:
        moe: their configuration.
        routers: of all layers here, of which there may be none.
        over_stages: adds a tensor up over the stages of a pipeline, all of which call it together; None where there is
            one only.
    """
    if moe.is_moe and moe.router != "soft":
        router_class(moe.router).after_step_together(routers, over_stages)


def positions(
    batch: int,
    length: int,
    device: torch.device,
    document_BS: Tensor | None,
    valid_BS: Tensor | None,
    cache: KeyValueCache | None,
) -> Tensor:
    """int64 (B, S) position of each token within its document.

    Padding before a row's first token is not counted. With documents it is: padding is then a document of its own.
    """
    if cache is not None:
        counted_BS = cache.valid_BS[:, : cache.length + length].cumsum(1)
        return (counted_BS[:, cache.length :] - 1).clamp_min(0)
    if valid_BS is not None and document_BS is None:
        return (valid_BS.cumsum(1) - 1).clamp_min(0)
    index_BS = torch.arange(length, device=device).expand(batch, -1)
    if document_BS is None:
        return index_BS
    starts_BS = torch.ones_like(document_BS, dtype=torch.bool)
    starts_BS[:, 1:] = document_BS[:, 1:] != document_BS[:, :-1]
    return index_BS - torch.where(starts_BS, index_BS, 0).cummax(1).values


def token_losses(logits_BSV: Tensor, label_BS: Tensor) -> Tensor:
    """fp32 (B, S) negative log-likelihood in nats; 0 where the label is -100 (ignored)."""
    return F.cross_entropy(logits_BSV.float().flatten(0, 1), label_BS.flatten(), reduction="none").view_as(label_BS)
