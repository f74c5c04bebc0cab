"""Routing groups: the sets of tokens that look at each other, and what their size allows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from moe.config import ConfigError, MoEConfig, divisors, require
from moe.routers.registry import ROUTERS

# Groups of fewer tokens than this let a flat or chunk expert-choice router exploit what it sees of the future: 0.28,
# 0.03 and -0.002 +- 0.002 bits a character at 16, 64 and 2,048 tokens (`python -m ablations.leak`; it lies between).
LEAK_SAFE_GROUP_TOKENS = 1024


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
    chunk_length: int = 0

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
    facts = ROUTERS[moe.router]
    if "threshold_decay" in facts.reads:  # experts with slots, or with cutoffs made from those
        expert_choice_capacity(moe, group, micro_batch_sequences)
    if needs_allow_leak(moe, sequence_length) and not moe.allow_leak:
        measure = "`python -m eval.causality CONFIG` measures it"
        if facts.competes_in_groups:
            raise ConfigError(
                f'moe.group = "{moe.group}" with {group.tokens} tokens in a group lets earlier tokens see their '
                f"future: use at least {LEAK_SAFE_GROUP_TOKENS} tokens (raise moe.group_sequences), moe.group = "
                f'"position", or accept it with moe.allow_leak = true; {measure}'
            )
        detail = f' with moe.drop_order = "{moe.drop_order}"' if moe.capacity_factor is not None else ""
        raise ConfigError(
            f'moe.router = "{moe.router}"{detail} lets earlier tokens see their future in training: choose another '
            f"(python -m moe.routers says which are causal), or accept it with moe.allow_leak = true; {measure}"
        )


def needs_allow_leak(moe: MoEConfig, sequence_length: int) -> bool:
    """Whether this router is trained only where `moe.allow_leak` is set."""
    if moe.causal_in_training:
        return False
    group = RoutingGroup(moe.group, moe.group_sequences, sequence_length, moe.chunk_length)
    return not (ROUTERS[moe.router].competes_in_groups and group.tokens >= LEAK_SAFE_GROUP_TOKENS)


def expert_choice_capacity(moe: MoEConfig, group: RoutingGroup, micro_batch_sequences: int | None = None) -> int:
    """Tokens C = N * c / E that every expert takes from one group (Zhou et al. 2022, section 3.2).

    Args:
        moe: c and E.
        group: N.
        micro_batch_sequences: only its divisors are offered as a remedy; None offers any number.

    Raises:
        ConfigError: if C is not a whole number of at least 1; names the nearest group_sequences that works.
    """
    share = Fraction(moe.assignments_per_token).limit_denominator(10**6) / moe.num_experts
    slots = group.tokens * share
    if slots.denominator == 1 and slots > 0:
        return slots.numerator
    key = "depth_capacity" if moe.router == "mixture_of_depths" else "experts_per_token"
    what = f"moe.{key} * {group.tokens} tokens / moe.num_experts = {float(slots):g}"
    if group.kind == "chunk":
        raise ConfigError(f"capacity {what} is not a whole number >= 1: change moe.chunk_length = {group.chunk_length}")
    unit = (slots / group.sequences).denominator  # the multiples of this work
    if micro_batch_sequences is None:
        nearest = max(unit, (group.sequences + unit // 2) // unit * unit)
    elif micro_batch_sequences % unit == 0:
        possible = [n for n in divisors(micro_batch_sequences) if n % unit == 0]
        nearest = min(possible, key=lambda n: abs(n - group.sequences))
    else:
        raise ConfigError(
            f"capacity {what} is not a whole number >= 1, and no moe.group_sequences that divides "
            f"training.micro_batch_sequences = {micro_batch_sequences} mends it: change moe.{key} or moe.num_experts, "
            f"or make training.micro_batch_sequences a multiple of {unit}"
        )
    raise ConfigError(
        f"capacity {what} is not a whole number >= 1: the nearest moe.group_sequences that works is {nearest} "
        f"(given {group.sequences})"
    )
