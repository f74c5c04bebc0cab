"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022, section 4.2).

Between the parts of a block each process holds S/tp positions of its sequences. Attention, feed-forwards and mixture
layers gather the sequence, compute their part of heads, widths or assignments, and scatter the sum. Norms work on the
shards, so their gradients, and the router's, are parts that add up over tensor-parallel processes
(`parallel/gradients.py`). Embedding and head are split over the vocabulary, and so is the loss.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from moe.attention import Attention
from moe.model import Transformer
from moe.modules import FeedForward, Linear, RMSNorm
from parallel.collectives import gather_sequence, scatter_sequence, sum_over
from parallel.mesh import Group
from parallel.shards import local_part, specialize, split_parameter


def split_tensors(model: Transformer, mesh: DeviceMesh) -> None:
    """Split a stage over the processes of a one-axis mesh; the experts are `parallel/expert.py`'s."""
    for block in model.blocks.values():
        attention, feed_forward = cast(Attention, block.attention), cast(nn.Module, block.feed_forward)
        _split_attention(attention, mesh)
        for module in feed_forward.modules():  # itself, or the shared expert of a mixture
            if isinstance(module, FeedForward):
                _split_feed_forward(module, mesh)
        _between_shards(attention, mesh)
        _between_shards(feed_forward, mesh)
    group = mesh.get_group()
    if model.embedding is not None:
        split_parameter(model.embedding, "weight", mesh, [Shard(0)])
        specialize(model.embedding, {"forward": _VocabularyEmbedding.forward, "mesh": mesh})
    if model.head is not None:
        split_parameter(model.head, "weight", mesh, [Shard(0)])

    def logits(self: Transformer, normed_BSD: Tensor) -> Tensor:
        gathered_BSD = gather_sequence(normed_BSD, mesh)
        if self.head is not None:
            return self.head(gathered_BSD)
        assert self.embedding is not None
        return F.linear(gathered_BSD, local_part(self.embedding.weight).to(gathered_BSD.dtype))

    def losses(self: Transformer, normed_BSD: Tensor, label_BS: Tensor) -> Tensor:
        start, _ = vocabulary_part(self.config.vocabulary_size, mesh)
        return vocabulary_losses(self.logits(normed_BSD), label_BS, start, group)

    specialize(model, {"logits": logits, "losses": losses})


def vocabulary_part(vocabulary: int, mesh: DeviceMesh) -> tuple[int, int]:
    """(first id, one past the last) of this process: DTensor's cut, equal parts rounded up and a shorter last one."""
    part = -(-vocabulary // mesh.size())
    start = min(mesh.get_local_rank() * part, vocabulary)
    return start, min(start + part, vocabulary)


def _split_attention(attention: Attention, mesh: DeviceMesh) -> None:
    for projection in (attention.query, attention.key, attention.value):
        split_parameter(projection, "weight", mesh, [Shard(0)])
    split_parameter(attention.output, "weight", mesh, [Shard(1)])
    for norm in (attention.query_norm, attention.key_norm):
        if isinstance(norm, RMSNorm) and not attention.norm_heads:  # over the whole width, which is split now
            split_parameter(norm, "weight", mesh, [Shard(0)])
            specialize(norm, {"forward": _split_norm, "group": mesh.get_group(), "processes": mesh.size()})


def _split_feed_forward(module: FeedForward, mesh: DeviceMesh) -> None:
    for projection in (module.gate, module.up):
        split_parameter(projection, "weight", mesh, [Shard(0)])
    split_parameter(cast(Linear, module.down), "weight", mesh, [Shard(1)])


def _between_shards(module: nn.Module, mesh: DeviceMesh) -> None:
    """Gather what goes in, and scatter the sum of what comes out."""
    forward = type(module).forward

    def gathered(self: nn.Module, x_BSD: Tensor, *rest: Any) -> Tensor:
        return scatter_sequence(forward(self, gather_sequence(x_BSD, mesh), *rest), mesh)

    specialize(module, {"forward": gathered})


def _split_norm(self: Any, x: Tensor) -> Tensor:
    """RMSNorm over a last dimension that is split over processes."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = sum_over(wide.square().sum(-1, keepdim=True), self.group)
    scale = torch.rsqrt(squares / (x.shape[-1] * self.processes) + self.epsilon)
    return (wide * scale).to(x.dtype) * local_part(self.weight).to(x.dtype)


class _VocabularyEmbedding(nn.Embedding):
    """A part of the rows of an embedding."""

    mesh: DeviceMesh

    def forward(self, token_BS: Tensor) -> Tensor:
        """(B, S) -> (B, S/tp, D): ids of other processes look up nothing."""
        start, end = vocabulary_part(self.num_embeddings, self.mesh)
        mine_BS = (token_BS >= start) & (token_BS < end)
        found_BSD = F.embedding(torch.where(mine_BS, token_BS - start, 0), local_part(self.weight))
        return scatter_sequence(torch.where(mine_BS[..., None], found_BSD, 0.0), self.mesh)


def vocabulary_losses(logits_BSV: Tensor, label_BS: Tensor, start: int, group: Group) -> Tensor:
    """`token_losses` of logits that are split over the vocabulary.

    Args:
        logits_BSV: this process' part, ids from `start` on.
        label_BS: int64 ids of the whole vocabulary, -100 where there is none.
        start: first id.
        group: processes of the other parts.

    Returns:
        fp32 (B, S) negative log-likelihood in nats, the same on all; 0 where the label is -100.
    """
    return _VocabularyLosses.apply(logits_BSV, label_BS, start, group)


class _VocabularyLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, label_BS: Tensor, start: int, group: Group) -> Tensor:
        shifted_BSV = logits_BSV.float()
        largest_BS = shifted_BSV.amax(-1)
        dist.all_reduce(largest_BS, dist.ReduceOp.MAX, group=group)
        shifted_BSV = shifted_BSV - largest_BS[..., None]
        mine_BS = (label_BS >= start) & (label_BS < start + logits_BSV.shape[-1])
        place_BS = torch.where(mine_BS, label_BS - start, 0)
        label_logit_BS = torch.where(mine_BS, shifted_BSV.gather(-1, place_BS[..., None]).squeeze(-1), 0.0)
        shifted_BSV = shifted_BSV.exp_()
        sums_2BS = torch.stack((shifted_BSV.sum(-1), label_logit_BS))
        dist.all_reduce(sums_2BS, group=group)
        shifted_BSV.div_(sums_2BS[0][..., None])  # probabilities by now
        ctx.save_for_backward(shifted_BSV, label_BS, mine_BS, place_BS)
        ctx.dtype = logits_BSV.dtype
        return torch.where(label_BS == -100, 0.0, sums_2BS[0].log() - sums_2BS[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probability_BSV, label_BS, mine_BS, place_BS = ctx.saved_tensors
        grad_BS1 = torch.where(label_BS == -100, 0.0, grads[0])[..., None]
        dlogits_BSV = probability_BSV * grad_BS1
        dlogits_BSV.scatter_add_(-1, place_BS[..., None], -grad_BS1 * mine_BS[..., None])
        return dlogits_BSV.to(ctx.dtype), None, None, None
