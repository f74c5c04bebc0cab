"""The shape of the model, as plain dataclasses.

Every field is a key of the TOML file (`[model]` and `[moe]`) and a command-line flag. A combination that cannot
work raises `ConfigError`, whose message starts with the key to change.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from moe.routers.registry import ROUTERS, RouterFacts, Verdict

# Ranges of `[moe]`'s numbers.
NOT_NEGATIVE = (
    "shared_width",
    "expert_cap",
    "bias_rate",
    "predictor_coefficient",
    "balance_coefficient",
    "importance_coefficient",
    "load_coefficient",
    "mutual_information_coefficient",
    "z_coefficient",
    "orthogonality_coefficient",
)
RANGES = {"threshold_decay": (0, 1), "jitter": (0, 1)}


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the key, the value given and what would be allowed."""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_positive(section: str, **values: float) -> None:
    """Every value must be at least 1 (counts and widths)."""
    for key, value in values.items():
        require(value >= 1, f"{section}.{key} = {value}: must be at least 1")


@dataclass(frozen=True)
class ModelConfig:
    """The transformer around the experts."""

    vocabulary_size: int = 2048
    """Number of token ids: the corpus' vocabulary, or that rounded up to a multiple of up to 128."""
    width: int = 256
    """Model width D: the size of the residual stream."""
    layers: int = 4
    """Number of transformer blocks."""
    heads: int = 4
    """Query heads."""
    kv_heads: int | None = None
    """Key/value heads (grouped-query attention); None means as many as query heads."""
    head_dim: int | None = None
    """Size of one head; None means width / heads. It need not divide the width."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm on queries and keys: per head (Qwen3), over the whole width (OLMoE), or none."""
    feed_forward_width: int | None = None
    """Hidden width of the dense feed-forward layers; None means what the experts of one token hold together."""
    dense_layers: int = 0
    """The first so many layers have a dense feed-forward in place of experts."""
    moe_every: int = 1
    """After the dense layers, every n-th layer has experts and the others are dense."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head too."""
    rope_base: float = 10000.0
    """Base of the rotary position embedding (RoFormer, eq. 15)."""
    norm_epsilon: float = 1e-5
    """Added to the mean square inside RMSNorm."""

    @property
    def resolved_kv_heads(self) -> int:
        """Key/value heads with the default resolved."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def resolved_head_dim(self) -> int:
        """Head size with the default resolved."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    def __post_init__(self) -> None:
        require_choices("model", self)
        require_positive(
            "model",
            vocabulary_size=self.vocabulary_size,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            moe_every=self.moe_every,
        )
        if self.head_dim is None:
            require(
                self.width % self.heads == 0,
                f"model.heads = {self.heads} does not divide model.width = {self.width}: "
                f"choose heads among {divisors(self.width)} or give model.head_dim",
            )
        require(
            self.resolved_head_dim >= 2 and self.resolved_head_dim % 2 == 0,
            f"model.head_dim = {self.resolved_head_dim}: must be even",
        )
        require(
            self.resolved_kv_heads >= 1 and self.heads % self.resolved_kv_heads == 0,
            f"model.kv_heads = {self.resolved_kv_heads} does not divide model.heads = {self.heads}: "
            f"choose among {divisors(self.heads)}",
        )
        require(
            0 <= self.dense_layers <= self.layers,
            f"model.dense_layers = {self.dense_layers}: must be from 0 to model.layers = {self.layers}",
        )
        if self.feed_forward_width is not None:
            require_positive("model", feed_forward_width=self.feed_forward_width)
        require(self.rope_base > 1, f"model.rope_base = {self.rope_base}: must be greater than 1")
        require(self.norm_epsilon > 0, f"model.norm_epsilon = {self.norm_epsilon}: must be greater than 0")


@dataclass(frozen=True)
class MoEConfig:
    """Routing and experts."""

    router: str = "expert_choice"
    """How tokens meet experts: a name that `python -m moe.routers` lists. `dense` builds the dense twin: no router, a
    feed-forward as wide as the experts of one token together."""
    num_experts: int = 16
    """Experts E in each mixture layer."""
    experts_per_token: int = 2
    """Experts a token gets: exactly (token choice and its kin), or on average (expert_choice, threshold, remoe)."""
    expert_width: int = 256
    """Hidden width F of one expert."""
    shared_width: int = 0
    """Hidden width of a shared expert that every token passes; 0 for none."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Router logits to scores; the combine weight is the score (times route_scale)."""
    route_scale: float = 1.0
    """Factor on every combine weight."""
    jitter: float = 0.0
    """In training the router's input, and nothing else, is multiplied by noise uniform in 1 - jitter to 1 + jitter."""
    forced_balance: bool = False
    """In training ignore the scores and deal the experts round-robin: for benchmarks of speed, never for learning."""

    group: Literal["position", "flat", "chunk"] = "flat"
    """What expert choice compares: one position across the group's sequences, all tokens of the group, or
    stretches of chunk_length tokens of one sequence."""
    group_sequences: int = 4
    """Sequences in a routing group. Capacity, expert choice and balance losses are defined over one group."""
    chunk_length: int = 0
    """Tokens in a stretch, for group = "chunk"."""
    allow_leak: bool = False
    """Accept a training router that shows earlier tokens their future; `python -m eval.causality` measures how much.
    Expert choice over flat or chunk groups of 1,024 tokens or more does not ask for it."""
    threshold_after: float = 0.8
    """expert_choice: after this fraction of the run's steps, training routes by threshold; 1 never switches."""
    threshold_decay: float = 0.95
    """Decay of the moving average of each expert's cutoff, per optimizer step."""
    inference: Literal["threshold", "predictor", "token_choice"] = "threshold"
    """expert_choice: how the model is evaluated and served. `predictor` asks a linear guess of the expert's choice."""
    predictor_coefficient: float = 0.0
    """Weight of the loss that trains the predictor (on detached inputs); 0 builds none."""
    expert_cap: int = 0
    """expert_choice: most experts a token is meant to get (EC-CAP; a few get more); 0 for no limit."""
    depth_capacity: float = 0.125
    """mixture_of_depths: share of the tokens that pass the feed-forward."""
    slots_per_expert: int = 1
    """soft: mixtures of tokens that one expert works on, in each routing group."""

    renormalize: bool = False
    """Divide the weights of a token's experts by their sum."""
    capacity_factor: float | None = None
    """An expert takes at most ceil(factor * N * k / E) tokens of a group; None never drops (dropless)."""
    drop_order: Literal["position", "choice", "score", "priority"] = "position"
    """Who is dropped beyond the capacity: the last in token order; second choices before first ones (GShard); an
    expert's lowest scores; or choices of the tokens with the lowest best score (V-MoE). Only `position` is causal."""
    bias_rate: float = 1e-3
    """loss_free: change of an expert's bias in one step."""
    bias_update: Literal["sign", "proportional"] = "sign"
    """loss_free: by the sign of the load's error, or in proportion to it."""
    expert_groups: int = 1
    """loss_free: equal groups of experts, of which a token's experts come from the best `expert_groups_kept`."""
    expert_groups_kept: int = 1
    """loss_free: see `expert_groups`."""
    l1_initial: float = 1e-8
    """remoe: first weight of the L1 on the scores."""
    l1_multiplier: float = 1.2
    """remoe: factor by which the weight of the L1 rises or falls in one step."""

    balance_coefficient: float = 0.0
    """Weight of the Switch/GShard balance loss (1 at uniform routing), summed over layers."""
    balance_scope: Literal["sequence", "group", "global"] = "group"
    """Whose load the balance loss looks at: each sequence's, each routing group's, or the last global batch's."""
    importance_coefficient: float = 0.0
    """Weight of the squared variation of the experts' summed gates over a routing group, before any drop."""
    load_coefficient: float = 0.0
    """noisy_top_k: weight of the squared variation of the experts' expected load over a routing group."""
    mutual_information_coefficient: float = 0.0
    """Weight of minus the mutual information of token and expert (0 at uniform scores, -ln E at best)."""
    z_coefficient: float = 0.0
    """Weight of the router z-loss, mean over tokens, summed over layers."""
    orthogonality_coefficient: float = 0.0
    """Weight of the distance of the router's rows from orthonormal ones."""
    backend: Literal["auto", "reference", "torch", "triton", "megablocks"] = "auto"
    """Implementation of the experts: `auto` takes triton on GPUs and torch elsewhere; `megablocks` needs its packages;
    `reference` is a plain loop for tests (docs/kernels.md)."""

    @property
    def is_moe(self) -> bool:
        """False for the dense twin."""
        return self.router != "dense"

    @property
    def causal_in_training(self) -> bool:
        """Whether no token's routing in training can depend on later tokens of its sequence."""
        return self.training_verdict != "leaks"

    @property
    def training_verdict(self) -> Verdict:
        """What routing in training depends on, as declared; `python -m eval.causality` measures it."""
        return "causal" if self.forced_balance else ROUTERS[self.router].training(self)

    @property
    def balance_description(self) -> str:
        """What keeps load even, and the losses really in use with their coefficients."""
        losses = {
            f.name.removesuffix("_coefficient"): getattr(self, f.name)
            for f in fields(self)
            if f.name.endswith("_coefficient")
        }
        used = [f"{name.replace('_', ' ')} {value:g}" for name, value in losses.items() if value]
        by = "round-robin, scores ignored" if self.forced_balance else ROUTERS[self.router].balance
        chance = not used and by == RouterFacts.balance
        return f"{by}; losses besides: {', '.join(used) or 'none'}{', so load is left to chance' if chance else ''}"

    @property
    def assignments_per_token(self) -> float:
        """Experts that a token passes on average."""
        return self.depth_capacity if self.router == "mixture_of_depths" else self.experts_per_token

    @property
    def dense_width(self) -> int:
        """Hidden width of the dense twin's feed-forward: the experts of one token together, and the shared one."""
        return self.experts_per_token * self.expert_width + self.shared_width

    def __post_init__(self) -> None:
        require_choices("moe", self)
        require_positive(
            "moe",
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_width=self.expert_width,
            group_sequences=self.group_sequences,
            slots_per_expert=self.slots_per_expert,
        )
        near = difflib.get_close_matches(self.router, ROUTERS, 1)
        require(
            self.router in ROUTERS,
            f"moe.router = {self.router!r}: must be one of {', '.join(map(repr, ROUTERS))}"
            + (f"; did you mean {near[0]!r}?" if near else "; python -m moe.routers describes them"),
        )
        for key, value in ROUTERS[self.router].requires.items():
            wanted = ", ".join(f"moe.{k} = {v}" for k, v in ROUTERS[self.router].requires.items())
            given = getattr(self, key)
            require(given == value, f"moe.{key} = {given}: moe.router = {self.router!r} needs {wanted}")
        require(
            self.experts_per_token <= self.num_experts,
            f"moe.experts_per_token = {self.experts_per_token}: must be at most moe.num_experts = {self.num_experts}",
        )
        for key in NOT_NEGATIVE:
            require(getattr(self, key) >= 0, f"moe.{key} = {getattr(self, key)}: must be 0 or more")
        for key, (low, high) in RANGES.items():
            value = getattr(self, key)
            require(low <= value < high, f"moe.{key} = {value}: must be at least {low} and below {high}")
        require(
            0 <= self.threshold_after <= 1,
            f"moe.threshold_after = {self.threshold_after}: must be from 0 to 1",
        )
        require(
            0 < self.depth_capacity <= 1, f"moe.depth_capacity = {self.depth_capacity}: must be above 0 and at most 1"
        )
        require(self.route_scale > 0, f"moe.route_scale = {self.route_scale}: must be greater than 0")
        require(0 < self.l1_initial <= 1, f"moe.l1_initial = {self.l1_initial}: must be above 0 and at most 1")
        require(
            1 < self.l1_multiplier <= 10, f"moe.l1_multiplier = {self.l1_multiplier}: must be above 1 and at most 10"
        )
        require(self.bias_rate <= 1, f"moe.bias_rate = {self.bias_rate}: must be at most 1, as far as scores go")
        require(
            self.balance_scope == "group" or self.balance_coefficient > 0,
            f'moe.balance_scope = "{self.balance_scope}" has no effect with moe.balance_coefficient = 0: raise it',
        )
        if self.capacity_factor is not None:
            require(self.capacity_factor > 0, f"moe.capacity_factor = {self.capacity_factor}: must be above 0")
        require_read(self)
        problem = ROUTERS[self.router].problem(self)
        require(not problem, f"moe.{problem}")
        require(
            not (self.renormalize and self.experts_per_token == 1),
            "moe.renormalize = true with moe.experts_per_token = 1 makes every weight 1, so the router would get no "
            "gradient: set renormalize = false",
        )
        require(
            (self.chunk_length > 0) == (self.group == "chunk"),
            f"moe.chunk_length = {self.chunk_length} with moe.group = {self.group!r}: "
            'group = "chunk" needs chunk_length >= 1 and the other groups need 0',
        )


def require_read(moe: MoEConfig) -> None:
    """Every key that differs from its default must be one that the router reads."""
    defaults = {f.name: f.default for f in fields(moe)}
    for key in sorted(set().union(*(facts.reads for facts in ROUTERS.values()))):
        value = getattr(moe, key)
        readers = [name for name, facts in ROUTERS.items() if key in facts.reads]
        require(
            moe.router in readers or value == defaults[key],
            f"moe.{key} = {value} has no effect with moe.router = {moe.router!r}: remove it or use "
            f"{' or '.join(readers)}",
        )


def require_choices(section: str, config: Any) -> None:
    """Every field annotated as a `Literal` must hold one of its values."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal:
            value = getattr(config, name)
            require(value in get_args(hint), f"{section}.{name} = {value!r}: must be one of {list(get_args(hint))}")


def divisors(number: int) -> list[int]:
    """All divisors, rising, for error messages."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def is_moe_layer(model: ModelConfig, index: int) -> bool:
    """Whether block `index` has experts: not the first `dense_layers`, then every `moe_every`-th."""
    after = index - model.dense_layers
    return after >= 0 and after % model.moe_every == 0
