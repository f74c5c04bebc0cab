"""Which tensor of a transformers checkpoint is which part of a Choir model, in both directions.

| Choir                                   | on disk                                                              |
|-----------------------------------------|----------------------------------------------------------------------|
| embedding.weight                        | model.embed_tokens.weight                                            |
| blocks.N.attention_norm.weight          | model.layers.N.input_layernorm.weight                                |
| blocks.N.attention.query.weight         | model.layers.N.self_attn.q_proj.weight (key, value, output: k, v, o) |
| blocks.N.attention.query_norm.weight    | model.layers.N.self_attn.q_norm.weight (key_norm: k_norm)            |
| blocks.N.feed_forward_norm.weight       | model.layers.N.post_attention_layernorm.weight                       |
| blocks.N.feed_forward.gate.weight       | model.layers.N.mlp.gate_proj.weight (up, down)                       |
| ...feed_forward.router.weight_ED        | ...mlp.gate.weight                                                   |
| ...feed_forward.experts.w13_E2FD[e, 0]  | ...mlp.experts.e.gate_proj.weight                                    |
| ...feed_forward.experts.w13_E2FD[e, 1]  | ...mlp.experts.e.up_proj.weight                                      |
| ...feed_forward.experts.w2_EDF[e]       | ...mlp.experts.e.down_proj.weight                                    |
| final_norm.weight, head.weight          | model.norm.weight, lm_head.weight                                    |

Mixtral writes `block_sparse_moe` for `mlp`, and `w1`, `w3`, `w2` for gate, up and down. These are the names that
`save_pretrained` writes; in memory transformers stacks the experts. Both rotate the pairs (i, i + head_dim / 2), so
that queries and keys need no permutation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moe.config import ModelConfig, MoEConfig, is_moe_layer


@dataclass(frozen=True)
class Names:
    """What a family calls its mixtures.

    Attributes:
        mixture: of a block.
        router: its projection.
        projections: gate, up and down of an expert.
        cutoffs: of threshold routing, beside the router's weight; only Choir's own files have them.
    """

    mixture: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    cutoffs: bool = False


class Piece(NamedTuple):
    """One tensor there, and the part of a tensor here that it is.

    Attributes:
        there: name in the checkpoint's files.
        here: name in the model's state.
        part: which part of it; () for the whole.
    """

    there: str
    here: str
    part: tuple[int, ...] = ()


def pieces(model: ModelConfig, moe: MoEConfig, names: Names) -> Iterator[Piece]:
    """Every tensor of a checkpoint, in the order of the layers."""
    yield Piece("model.embed_tokens.weight", "embedding.weight")
    for layer in range(model.layers):
        here, there = f"blocks.{layer}", f"model.layers.{layer}"
        yield Piece(f"{there}.input_layernorm.weight", f"{here}.attention_norm.weight")
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
            yield Piece(f"{there}.self_attn.{theirs}_proj.weight", f"{here}.attention.{ours}.weight")
        if model.qk_norm != "none":
            for ours, theirs in (("query", "q"), ("key", "k")):
                yield Piece(f"{there}.self_attn.{theirs}_norm.weight", f"{here}.attention.{ours}_norm.weight")
        yield Piece(f"{there}.post_attention_layernorm.weight", f"{here}.feed_forward_norm.weight")
        if moe.is_moe and is_moe_layer(model, layer):
            yield from _mixture(f"{here}.feed_forward", f"{there}.{names.mixture}", moe, names)
        else:
            yield from _feed_forward(f"{here}.feed_forward", f"{there}.mlp")
    yield Piece("model.norm.weight", "final_norm.weight")
    if not model.tie_embeddings:
        yield Piece("lm_head.weight", "head.weight")


def _mixture(here: str, there: str, moe: MoEConfig, names: Names) -> Iterator[Piece]:
    yield Piece(f"{there}.{names.router}.weight", f"{here}.router.weight_ED")
    if names.cutoffs:
        yield Piece(f"{there}.{names.router}.cutoffs", f"{here}.router.cutoff_E")
    gate, up, down = names.projections
    for expert in range(moe.num_experts):
        yield Piece(f"{there}.experts.{expert}.{gate}.weight", f"{here}.experts.w13_E2FD", (expert, 0))
        yield Piece(f"{there}.experts.{expert}.{up}.weight", f"{here}.experts.w13_E2FD", (expert, 1))
        yield Piece(f"{there}.experts.{expert}.{down}.weight", f"{here}.experts.w2_EDF", (expert,))
    if moe.shared_width:
        yield from _feed_forward(f"{here}.shared", f"{there}.shared_expert")


def _feed_forward(here: str, there: str) -> Iterator[Piece]:
    for name in ("gate", "up", "down"):
        yield Piece(f"{there}.{name}_proj.weight", f"{here}.{name}.weight")
