"""Every configuration that cannot work is refused with a message that names the key and what to do."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from moe.config import ConfigError, ModelConfig, MoEConfig
from moe.groups import (
    LEAK_SAFE_GROUP_TOKENS,
    RoutingGroup,
    check_routing,
    expert_choice_capacity,
)
from moe.routers import ROUTERS, router_class
from moe.routers.base import Router
from moe.soft import SoftMoELayer

# (what is given, the key that the message starts with, the value that it quotes, the remedy it offers)
BAD_MODELS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"vocabulary_size": 0}, "model.vocabulary_size", "0", "at least 1"),
    ({"width": 0}, "model.width", "0", "at least 1"),
    ({"layers": 0}, "model.layers", "0", "at least 1"),
    ({"heads": 0}, "model.heads", "0", "at least 1"),
    ({"moe_every": 0}, "model.moe_every", "0", "at least 1"),
    ({"feed_forward_width": 0}, "model.feed_forward_width", "0", "at least 1"),
    ({"width": 30, "heads": 4}, "model.heads", "4", "[1, 2, 3, 5, 6, 10, 15, 30]"),
    ({"width": 30, "heads": 10}, "model.head_dim", "3", "must be even"),
    ({"head_dim": 7}, "model.head_dim", "7", "must be even"),
    ({"head_dim": 0}, "model.head_dim", "0", "must be even"),
    ({"heads": 4, "kv_heads": 3}, "model.kv_heads", "3", "[1, 2, 4]"),
    ({"heads": 4, "kv_heads": 8}, "model.kv_heads", "8", "[1, 2, 4]"),
    ({"heads": 4, "kv_heads": 0}, "model.kv_heads", "0", "[1, 2, 4]"),
    ({"layers": 3, "dense_layers": 4}, "model.dense_layers", "4", "from 0 to model.layers = 3"),
    ({"dense_layers": -1}, "model.dense_layers", "-1", "from 0 to"),
    ({"rope_base": 1.0}, "model.rope_base", "1.0", "greater than 1"),
    ({"qk_norm": "heads"}, "model.qk_norm", "'heads'", "['none', 'head', 'width']"),
    ({"norm_epsilon": 0.0}, "model.norm_epsilon", "0.0", "greater than 0"),
    ({"norm_epsilon": math.nan}, "model.norm_epsilon", "nan", "greater than 0"),
]

TC = {"router": "token_choice"}
BAD_MOES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"router": "top2"}, "moe.router", "'top2'", "'token_choice'"),
    ({"score": "tanh"}, "moe.score", "'tanh'", "['softmax', 'sigmoid']"),
    ({"router": "dense", "z_coefficient": 0.1}, "moe.z_coefficient", "0.1", "remove it or use expert_choice"),
    ({**TC, "threshold_decay": 0.5}, "moe.threshold_decay", "0.5", "expert_choice or threshold"),
    ({"num_experts": 0}, "moe.num_experts", "0", "at least 1"),
    ({"experts_per_token": 0}, "moe.experts_per_token", "0", "at least 1"),
    ({"expert_width": 0}, "moe.expert_width", "0", "at least 1"),
    ({"group_sequences": 0}, "moe.group_sequences", "0", "at least 1"),
    ({"num_experts": 3, "experts_per_token": 4}, "moe.experts_per_token", "4", "at most moe.num_experts = 3"),
    ({"shared_width": -1}, "moe.shared_width", "-1", "0 or more"),
    ({"threshold_decay": 1.0}, "moe.threshold_decay", "1.0", "below 1"),
    ({"threshold_decay": -0.1}, "moe.threshold_decay", "-0.1", "at least 0"),
    ({"threshold_after": 1.1}, "moe.threshold_after", "1.1", "from 0 to 1"),
    ({"route_scale": 0.0}, "moe.route_scale", "0.0", "greater than 0"),
    ({"route_scale": math.nan}, "moe.route_scale", "nan", "greater than 0"),
    ({**TC, "balance_coefficient": -0.1}, "moe.balance_coefficient", "-0.1", "0 or more"),
    ({"z_coefficient": -0.1}, "moe.z_coefficient", "-0.1", "0 or more"),
    (
        {"balance_coefficient": 0.01},
        "moe.balance_coefficient",
        "'expert_choice'",
        "remove it or use threshold or token_choice",
    ),
    (
        {"router": "dense", "balance_coefficient": 0.01},
        "moe.balance_coefficient",
        "'dense'",
        "remove it or use threshold or token_choice",
    ),
    ({"capacity_factor": 1.0}, "moe.capacity_factor", "'expert_choice'", "remove it or use token_choice"),
    ({"router": "threshold", "capacity_factor": 1.0}, "moe.capacity_factor", "'threshold'", "use token_choice"),
    ({**TC, "capacity_factor": 0.0}, "moe.capacity_factor", "0.0", "above 0"),
    ({"renormalize": True}, "moe.renormalize", "'expert_choice'", "remove it or use token_choice"),
    ({**TC, "renormalize": True, "experts_per_token": 1}, "moe.renormalize", "1", "set renormalize = false"),
    ({"chunk_length": 8}, "moe.chunk_length", "'flat'", "the other groups need 0"),
    ({"group": "chunk"}, "moe.chunk_length", "0", "needs chunk_length >= 1"),
]


def check_message(error: pytest.ExceptionInfo[ConfigError], key: str, value: str, remedy: str) -> None:
    message = str(error.value)
    assert message.startswith(key) and value in message and remedy in message, message


@pytest.mark.parametrize(
    ("given", "key", "value", "remedy"), BAD_MODELS, ids=lambda v: str(v) if isinstance(v, dict) else ""
)
def test_a_bad_model_is_refused(given: dict[str, Any], key: str, value: str, remedy: str) -> None:
    """Key, value and remedy are all in the message."""
    with pytest.raises(ConfigError) as error:
        ModelConfig(**given)
    check_message(error, key, value, remedy)


@pytest.mark.parametrize(
    ("given", "key", "value", "remedy"), BAD_MOES, ids=lambda v: str(v) if isinstance(v, dict) else ""
)
def test_a_bad_mixture_is_refused(given: dict[str, Any], key: str, value: str, remedy: str) -> None:
    """Key, value and remedy are all in the message."""
    with pytest.raises(ConfigError) as error:
        MoEConfig(**given)
    check_message(error, key, value, remedy)


GOOD: list[dict[str, Any]] = [
    {},
    {"router": "dense"},
    {**TC, "experts_per_token": 16, "renormalize": True, "capacity_factor": 1.25, "balance_coefficient": 0.01},
    {"router": "threshold", "balance_coefficient": 0.01, "z_coefficient": 0.001},
    {"group": "chunk", "chunk_length": 8, "threshold_decay": 0.0, "threshold_after": 0.0},
    {"threshold_after": 1.0, "score": "sigmoid", "z_coefficient": 0.1},
]


@pytest.mark.parametrize("given", GOOD, ids=str)
def test_limits_are_inclusive_where_they_say_so(given: dict[str, Any]) -> None:
    """The checks do not refuse what works."""
    assert MoEConfig(**given).is_moe == (given.get("router") != "dense")


def test_a_group_must_fit_a_micro_batch() -> None:
    """The message lists the divisors."""
    with pytest.raises(ConfigError) as error:
        check_routing(MoEConfig(**TC, group_sequences=4), sequence_length=7, micro_batch_sequences=6)
    check_message(error, "moe.group_sequences", "4", "[1, 2, 3, 6]")
    check_routing(MoEConfig(**TC, group_sequences=3), sequence_length=7, micro_batch_sequences=6)
    check_routing(MoEConfig(router="dense", group_sequences=4), sequence_length=7, micro_batch_sequences=6)


def test_a_chunk_must_divide_the_sequence() -> None:
    """Both numbers are named."""
    moe = MoEConfig(group="chunk", chunk_length=1024, group_sequences=1)
    with pytest.raises(ConfigError) as error:
        check_routing(moe, sequence_length=1536, micro_batch_sequences=2)
    check_message(error, "moe.chunk_length", "1024", "training.sequence_length = 1536")
    check_routing(moe, sequence_length=2048, micro_batch_sequences=2)


@pytest.mark.parametrize(
    ("router", "group", "length", "refused"),
    [
        ("expert_choice", {"group": "flat", "group_sequences": 2}, 511, True),
        ("expert_choice", {"group": "flat", "group_sequences": 2}, 512, False),
        ("expert_choice", {"group": "flat", "group_sequences": 2, "allow_leak": True}, 8, False),
        ("expert_choice", {"group": "chunk", "chunk_length": 512, "group_sequences": 2}, 2048, True),
        ("expert_choice", {"group": "position", "group_sequences": 2}, 8, False),
        ("threshold", {"group": "flat", "group_sequences": 2}, 8, False),
    ],
)
def test_small_groups_that_leak_need_permission(router: Any, group: dict[str, Any], length: int, refused: bool) -> None:
    """H02: below 1,024 tokens `flat` and `chunk` are refused for expert choice, and only for it."""
    moe = MoEConfig(router=router, num_experts=2, experts_per_token=1, **group)
    if refused:
        with pytest.raises(ConfigError) as error:
            check_routing(moe, length, micro_batch_sequences=4)
        check_message(error, "moe.group", str(LEAK_SAFE_GROUP_TOKENS), "moe.allow_leak = true")
    else:
        check_routing(moe, length, micro_batch_sequences=4)


@pytest.mark.parametrize(
    ("kind", "sequences", "length", "chunk", "expected"),
    [("position", 4, 100, 0, 2), ("flat", 2, 9, 0, 9), ("chunk", 2, 12, 4, 2)],
)
def test_capacity_is_tokens_times_k_over_experts(
    kind: Any, sequences: int, length: int, chunk: int, expected: int
) -> None:
    """6 experts, 3 a token: half of the group's tokens each."""
    moe = MoEConfig(num_experts=6, experts_per_token=3)
    assert expert_choice_capacity(moe, RoutingGroup(kind, sequences, length, chunk)) == expected


@pytest.mark.parametrize("kind", ["position", "flat"])
@pytest.mark.parametrize(("experts", "k", "length"), [(6, 2, 5), (8, 1, 6), (16, 3, 12), (7, 2, 9)])
def test_the_suggested_group_works_and_none_is_nearer(kind: Any, experts: int, k: int, length: int) -> None:
    """For every group up to twice the number of experts, the message's number is checked by trying."""
    moe = MoEConfig(num_experts=experts, experts_per_token=k)

    def works(sequences: int) -> bool:
        tokens = RoutingGroup(kind, sequences, length).tokens
        return tokens * k % experts == 0

    refused = 0
    for given in range(1, 2 * experts + 1):
        group = RoutingGroup(kind, given, length)
        if works(given):
            assert expert_choice_capacity(moe, group) == group.tokens * k // experts
            continue
        refused += 1
        with pytest.raises(ConfigError, match=rf"moe.group_sequences that works is (\d+) \(given {given}\)") as error:
            expert_choice_capacity(moe, group)
        suggested = int(str(error.value).split("works is ")[1].split()[0])
        distance = abs(suggested - given)
        assert works(suggested)
        assert not any(works(g) for g in range(max(1, given - distance + 1), given + distance))
    assert refused > 0


def test_a_chunk_without_a_whole_capacity_names_its_length() -> None:
    """`chunk` groups are not helped by more sequences."""
    with pytest.raises(ConfigError, match="change moe.chunk_length = 7"):
        expert_choice_capacity(MoEConfig(num_experts=3, experts_per_token=1), RoutingGroup("chunk", 2, 14, 7))


def test_the_registry_loads_no_torch_and_names_classes_that_exist() -> None:
    """A wrong flag must fail at once; a wrong name in the registry would fail only when chosen."""
    code = "import sys, moe.config, moe.groups; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
    for name, facts in ROUTERS.items():
        assert facts.summary and (facts.source or name == "dense")
        assert facts.reads <= {field.name for field in fields(MoEConfig)}
        if name != "dense":
            assert issubclass(router_class(name), SoftMoELayer if name == "soft" else Router)


@pytest.mark.parametrize(
    ("moe", "causal"),
    [
        ({"router": "expert_choice", "group": "flat"}, False),
        ({"router": "expert_choice", "group": "chunk", "chunk_length": 4}, False),
        ({"router": "expert_choice", "group": "position"}, True),
        ({"router": "threshold"}, True),
        ({"router": "token_choice", "capacity_factor": 1.0}, True),
    ],
)
def test_which_training_routers_can_see_the_future(moe: dict[str, Any], causal: bool) -> None:
    assert MoEConfig(**moe).causal_in_training is causal
