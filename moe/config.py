"""The shape of the model, as plain dataclasses.

Every field is a key of the TOML file (`[model]` and `[moe]`) and a command-line flag. A combination that cannot
work raises `ConfigError`, whose message starts with the key to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

# Groups of fewer tokens than this let a flat or chunk expert-choice router exploit what it sees of the future
# (0.77, 0.055 and 0.004 bits a character were measured at 16, 64 and 2,048 tokens).
LEAK_SAFE_GROUP_TOKENS = 1024


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

    router: Literal["expert_choice", "threshold", "token_choice", "dense"] = "expert_choice"
    """How tokens meet experts. `dense` builds the dense twin: no router, a feed-forward as wide as the experts of
    one token together."""
    num_experts: int = 16
    """Experts E in each mixture layer."""
    experts_per_token: int = 2
    """Experts a token gets: exactly (token_choice), or on average (expert_choice and threshold)."""
    expert_width: int = 256
    """Hidden width F of one expert."""
    shared_width: int = 0
    """Hidden width of a shared expert that every token passes; 0 for none."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Router logits to scores; the combine weight is the score (times route_scale)."""
    route_scale: float = 1.0
    """Factor on every combine weight."""

    group: Literal["position", "flat", "chunk"] = "flat"
    """What expert choice compares: one position across the group's sequences, all tokens of the group, or
    stretches of chunk_length tokens of one sequence."""
    group_sequences: int = 4
    """Sequences in a routing group. Capacity, expert choice and balance losses are defined over one group."""
    chunk_length: int = 0
    """Tokens in a stretch, for group = "chunk"."""
    allow_leak: bool = False
    """Accept a training router that shows earlier tokens their future (flat or chunk groups below 1,024 tokens)."""
    threshold_after: float = 0.8
    """expert_choice: after this fraction of the run's steps, training routes by threshold; 1 never switches."""
    threshold_decay: float = 0.95
    """Decay of the moving average of each expert's cutoff, per optimizer step."""

    renormalize: bool = False
    """token_choice: divide the weights of a token's experts by their sum."""
    capacity_factor: float | None = None
    """token_choice: an expert takes at most ceil(factor * N * k / E) tokens of a group, the first come first;
    None never drops (dropless)."""
    balance_coefficient: float = 0.0
    """Weight of the Switch/GShard balance loss (1 at uniform routing), summed over layers."""
    z_coefficient: float = 0.0
    """Weight of the router z-loss, mean over tokens, summed over layers."""
    backend: Literal["auto", "reference", "torch"] = "auto"
    """Implementation of the experts: `reference` is a plain loop for tests."""

    @property
    def is_moe(self) -> bool:
        """False for the dense twin."""
        return self.router != "dense"

    @property
    def causal_in_training(self) -> bool:
        """Whether no token's routing in training can depend on later tokens of its sequence."""
        return ROUTER_FACTS[self.router].causal(self)

    @property
    def active_width(self) -> int:
        """Hidden units that one token passes in a mixture layer: the width of the dense twin's feed-forward."""
        return self.experts_per_token * self.expert_width + self.shared_width

    def __post_init__(self) -> None:
        require_choices("moe", self)
        require_positive(
            "moe",
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_width=self.expert_width,
            group_sequences=self.group_sequences,
        )
        require(
            self.experts_per_token <= self.num_experts,
            f"moe.experts_per_token = {self.experts_per_token}: must be at most moe.num_experts = {self.num_experts}",
        )
        require(self.shared_width >= 0, f"moe.shared_width = {self.shared_width}: must be 0 or more")
        require(
            0 <= self.threshold_decay < 1,
            f"moe.threshold_decay = {self.threshold_decay}: must be at least 0 and below 1",
        )
        require(
            0 <= self.threshold_after <= 1,
            f"moe.threshold_after = {self.threshold_after}: must be from 0 to 1",
        )
        require(self.route_scale > 0, f"moe.route_scale = {self.route_scale}: must be greater than 0")
        require(self.balance_coefficient >= 0, f"moe.balance_coefficient = {self.balance_coefficient}: must be >= 0")
        require(self.z_coefficient >= 0, f"moe.z_coefficient = {self.z_coefficient}: must be >= 0")
        if self.capacity_factor is not None:
            require(self.capacity_factor > 0, f"moe.capacity_factor = {self.capacity_factor}: must be above 0")
        defaults = {f.name: f.default for f in fields(self)}
        for key in sorted(set().union(*(facts.reads for facts in ROUTER_FACTS.values()))):
            value = getattr(self, key)
            readers = [name for name, facts in ROUTER_FACTS.items() if key in facts.reads]
            require(
                self.router in readers or value == defaults[key],
                f"moe.{key} = {value} has no effect with moe.router = {self.router!r}: remove it or use "
                f"{' or '.join(readers)}",
            )
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


@dataclass(frozen=True)
class RouterFacts:
    """What the configuration must know of a router without importing it.

    Attributes:
        reads: keys of `[moe]` that this router reads and not all do. Setting another router's key is an error: a key
            that does nothing would be mistaken for one that was tried.
        causal: whether no token's routing in training can depend on later tokens of its sequence. A router that does
            not say so counts as leaking: its losses are logged as noncausal.
    """

    reads: frozenset[str]
    causal: Callable[[MoEConfig], bool] = lambda moe: False


_ALL_ROUTERS = frozenset({"score", "route_scale", "z_coefficient"})
ROUTER_FACTS: dict[str, RouterFacts] = {
    "expert_choice": RouterFacts(
        _ALL_ROUTERS | {"group", "chunk_length", "threshold_after", "threshold_decay"},
        causal=lambda moe: moe.group == "position",
    ),
    "threshold": RouterFacts(_ALL_ROUTERS | {"threshold_decay", "balance_coefficient"}, causal=lambda moe: True),
    "token_choice": RouterFacts(
        _ALL_ROUTERS | {"renormalize", "capacity_factor", "balance_coefficient"}, causal=lambda moe: True
    ),
    "dense": RouterFacts(frozenset(), causal=lambda moe: True),
}


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


@dataclass(frozen=True)
class RoutingGroup:
    """The set of tokens over which a routing decision is made, in tokens.

    Attributes:
        kind: "position", "flat" or "chunk".
        sequences: sequences B_g in a routing group.
        sequence_length: S.
        chunk_length: length of a stretch for `chunk`, else 0.
    """

    kind: Literal["position", "flat", "chunk"]
    sequences: int
    sequence_length: int
    chunk_length: int = field(default=0)

    @property
    def tokens(self) -> int:
        """Tokens N that compete for one expert."""
        return {
            "position": self.sequences,
            "flat": self.sequences * self.sequence_length,
            "chunk": self.chunk_length,
        }[self.kind]


def check_routing(moe: MoEConfig, sequence_length: int, micro_batch_sequences: int) -> None:
    """Check what needs the sequence length: capacities are whole, groups fit, leaks are allowed.

    Raises:
        ConfigError: naming the nearest value that works.
    """
    if not moe.is_moe:
        return
    require(
        micro_batch_sequences % moe.group_sequences == 0,
        f"moe.group_sequences = {moe.group_sequences} does not divide training.micro_batch_sequences = "
        f"{micro_batch_sequences}: a routing group lives inside one micro-batch; choose among "
        f"{divisors(micro_batch_sequences)}",
    )
    group = RoutingGroup(moe.group, moe.group_sequences, sequence_length, moe.chunk_length)
    if moe.group == "chunk":
        require(
            sequence_length % moe.chunk_length == 0,
            f"moe.chunk_length = {moe.chunk_length} does not divide training.sequence_length = {sequence_length}",
        )
    if "threshold_decay" in ROUTER_FACTS[moe.router].reads:  # experts with a capacity, or with cutoffs made from one
        expert_choice_capacity(moe, group, micro_batch_sequences)
    require(
        moe.causal_in_training or moe.allow_leak or group.tokens >= LEAK_SAFE_GROUP_TOKENS,
        f'moe.group = "{moe.group}" with {group.tokens} tokens in a group lets earlier tokens see their future: use at '
        f'least {LEAK_SAFE_GROUP_TOKENS} tokens (raise moe.group_sequences), moe.group = "position", or accept it with '
        "moe.allow_leak = true",
    )


def expert_choice_capacity(moe: MoEConfig, group: RoutingGroup, micro_batch_sequences: int | None = None) -> int:
    """Tokens C = N * c / E that every expert takes from one group (Zhou et al. 2022, section 3.2).

    Args:
        moe: c and E.
        group: N.
        micro_batch_sequences: only its divisors are offered as a remedy; None offers any number.

    Raises:
        ConfigError: if C is not a whole number of at least 1; names the nearest group_sequences that works.
    """
    slots = group.tokens * moe.experts_per_token
    if slots % moe.num_experts == 0 and slots > 0:
        return slots // moe.num_experts
    what = f"moe.experts_per_token * {group.tokens} tokens / moe.num_experts = {slots} / {moe.num_experts}"
    if group.kind == "chunk":
        raise ConfigError(f"capacity {what} is not a whole number >= 1: change moe.chunk_length = {group.chunk_length}")
    per_sequence = slots // group.sequences
    unit = moe.num_experts // math.gcd(per_sequence, moe.num_experts)  # the multiples of this work
    if micro_batch_sequences is None:
        nearest = max(unit, (group.sequences + unit // 2) // unit * unit)
    elif micro_batch_sequences % unit == 0:
        possible = [n for n in divisors(micro_batch_sequences) if n % unit == 0]
        nearest = min(possible, key=lambda n: abs(n - group.sequences))
    else:
        raise ConfigError(
            f"capacity {what} is not a whole number >= 1, and no moe.group_sequences that divides "
            f"training.micro_batch_sequences = {micro_batch_sequences} mends it: change moe.num_experts or make "
            f"training.micro_batch_sequences a multiple of {unit}"
        )
    raise ConfigError(
        f"capacity {what} is not a whole number >= 1: the nearest moe.group_sequences that works is {nearest} "
        f"(given {group.sequences})"
    )
