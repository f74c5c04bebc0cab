"""Every way of routing, and what must be known of it without importing it. A new router is one file and one entry.

Nothing here imports torch, so that a wrong flag fails in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from moe.config import MoEConfig

Verdict = Literal["causal", "batch-dependent", "leaks"]
"""What a token's routing can depend on: the token and its past only; also other sequences of the batch (still no
leak); or later tokens of its own sequence."""


@dataclass(frozen=True)
class RouterFacts:
    """One router.

    Attributes:
        target: "module.Class"; empty for the dense twin, which has no router.
        summary: what it does, in a few words.
        source: the paper.
        reads: keys of `[moe]` that this router reads and not all do. Setting another router's key is an error: a key
            that does nothing would be mistaken for one that was tried.
        training: what routing in training depends on. A router that does not say so counts as leaking.
        evaluation: the same for `mode="causal"`, by which every model is evaluated and served.
        static_shapes: whether every expert takes the same number of tokens in training (expert choice: until
            `threshold_after`), so that nothing waits for the host.
        needs_balance_loss: load is left to a loss; without one experts may starve.
        balance: what keeps load even besides losses.
        competes_in_groups: what leaks is only which tokens a routing group prefers, which falls quickly with its size:
            flat and chunk groups of `LEAK_SAFE_GROUP_TOKENS` or more need no `allow_leak`.
        requires: values that keys of `[moe]` must have.
        problem: what is wrong with the configuration for this router, starting with the key; empty if nothing.
    """

    target: str
    summary: str
    source: str
    reads: frozenset[str]
    training: Callable[[MoEConfig], Verdict] = lambda moe: "leaks"
    evaluation: Callable[[MoEConfig], Verdict] = lambda moe: "causal"
    static_shapes: bool = False
    needs_balance_loss: bool = False
    balance: str = "nothing but losses"
    competes_in_groups: bool = False
    requires: Mapping[str, Any] = field(default_factory=dict)
    problem: Callable[[MoEConfig], str] = lambda moe: ""


def _always(verdict: Verdict) -> Callable[[MoEConfig], Verdict]:
    return lambda moe: verdict


def _by_group(moe: MoEConfig) -> Verdict:
    """At one position across sequences nothing later takes part."""
    if "threshold_after" in ROUTERS[moe.router].reads and moe.threshold_after == 0:
        return "causal"
    return "batch-dependent" if moe.group == "position" else "leaks"


def _by_drop_order(moe: MoEConfig) -> Verdict:
    """Token order looks back only, within a sequence and at earlier sequences of the group; other orders look ahead."""
    if moe.capacity_factor is None:
        return "causal"
    first_come = moe.drop_order == "position" or (moe.drop_order == "choice" and moe.experts_per_token == 1)
    if not first_come:
        return "leaks"
    return "causal" if moe.group_sequences == 1 else "batch-dependent"


def _expert_choice_problem(moe: MoEConfig) -> str:
    if moe.inference == "predictor" and not moe.predictor_coefficient:
        return 'inference = "predictor" with predictor_coefficient = 0: no predictor is trained; raise the coefficient'
    if 0 < moe.expert_cap < moe.experts_per_token:
        return f"expert_cap = {moe.expert_cap}: must be at least experts_per_token = {moe.experts_per_token}, or 0"
    if moe.expert_cap > moe.num_experts:
        return f"expert_cap = {moe.expert_cap}: must be at most num_experts = {moe.num_experts}; 0 sets no limit"
    return ""


def _mixture_of_depths_problem(moe: MoEConfig) -> str:
    if moe.inference == "token_choice":
        return 'inference = "token_choice": with one expert every token would choose it; use threshold or predictor'
    return _expert_choice_problem(moe)


def _capacity_problem(moe: MoEConfig) -> str:
    if moe.drop_order != "position" and moe.capacity_factor is None:
        return f'drop_order = "{moe.drop_order}" has no effect without a capacity_factor: nothing is dropped'
    if moe.forced_balance and moe.capacity_factor is not None:
        return f"capacity_factor = {moe.capacity_factor} has no effect with forced_balance = true: remove one"
    return ""


def _noisy_problem(moe: MoEConfig) -> str:
    if moe.experts_per_token == 1:
        return "experts_per_token = 1: a softmax over one chosen expert is always 1, so the router would not learn"
    return _capacity_problem(moe)


def _remoe_problem(moe: MoEConfig) -> str:
    if 2 * moe.experts_per_token > moe.num_experts:
        return (
            f"experts_per_token = {moe.experts_per_token}: a ReLU starts with half of the num_experts = "
            f"{moe.num_experts} and its L1 only takes away: at most {moe.num_experts // 2}"
        )
    return ""


def _loss_free_problem(moe: MoEConfig) -> str:
    groups, kept, k = moe.expert_groups, moe.expert_groups_kept, moe.experts_per_token
    if groups < 1 or moe.num_experts % groups:
        return f"expert_groups = {groups}: must divide num_experts = {moe.num_experts}"
    if not 1 <= kept <= groups:
        return f"expert_groups_kept = {kept}: must be from 1 to expert_groups = {groups}"
    if k > kept * (moe.num_experts // groups):
        return (
            f"experts_per_token = {k}: {kept} of {groups} groups hold only {kept * moe.num_experts // groups} experts"
        )
    return _capacity_problem(moe)


COMMON = frozenset({"z_coefficient", "orthogonality_coefficient", "jitter", "route_scale"})
UNBALANCED = frozenset(
    {
        "balance_coefficient",
        "balance_scope",
        "importance_coefficient",
        "mutual_information_coefficient",
        "forced_balance",
    }
)
_CAPACITY = frozenset({"capacity_factor", "drop_order"})
_CUTOFFS = frozenset({"threshold_decay"})
_EXPERT_CHOICE = _CUTOFFS | {"group", "chunk_length", "threshold_after", "inference", "predictor_coefficient"}

ROUTERS: dict[str, RouterFacts] = {
    "expert_choice": RouterFacts(
        "moe.routers.expert_choice.ExpertChoiceRouter",
        "each expert takes its top C tokens of a group; served by thresholds",
        "Zhou et al. 2022, arXiv 2202.09368",
        COMMON | _EXPERT_CHOICE | {"score", "expert_cap"},
        training=_by_group,
        static_shapes=True,
        competes_in_groups=True,
        problem=_expert_choice_problem,
        balance="the choice itself",
    ),
    "threshold": RouterFacts(
        "moe.routers.threshold.ThresholdRouter",
        "a token meets every expert whose tracked cutoff its score reaches",
        "expert threshold routing; cutoffs of expert choice",
        COMMON | UNBALANCED | _CUTOFFS | {"score"},
        training=_always("causal"),
        balance="cutoffs that follow the scores",
    ),
    "mixture_of_depths": RouterFacts(
        "moe.routers.mixture_of_depths.MixtureOfDepthsRouter",
        "one expert in place of the feed-forward, which only the top share of tokens passes",
        "Raposo et al. 2024, arXiv 2404.02258",
        COMMON | _EXPERT_CHOICE | {"depth_capacity"},
        training=_by_group,
        static_shapes=True,
        competes_in_groups=True,
        problem=_mixture_of_depths_problem,
        balance="the choice itself",
        requires={"num_experts": 1, "experts_per_token": 1},
    ),
    "token_choice": RouterFacts(
        "moe.routers.token_choice.TokenChoiceRouter",
        "each token takes its k best experts; dropless, or with a capacity (Switch: k = 1)",
        "Shazeer et al. 2017, arXiv 1701.06538; Fedus et al. 2022, arXiv 2101.03961",
        COMMON | UNBALANCED | _CAPACITY | {"score", "renormalize"},
        training=_by_drop_order,
        needs_balance_loss=True,
        problem=_capacity_problem,
    ),
    "noisy_top_k": RouterFacts(
        "moe.routers.noisy_top_k.NoisyTopKRouter",
        "top-k of logits with learned noise; softmax over the chosen",
        "Shazeer et al. 2017, arXiv 1701.06538",
        COMMON | UNBALANCED | _CAPACITY | {"load_coefficient"},
        training=_by_drop_order,
        needs_balance_loss=True,
        problem=_noisy_problem,
    ),
    "gshard": RouterFacts(
        "moe.routers.gshard.GShardRouter",
        "top-2 whose second expert is kept at random in proportion to its weight",
        "Lepikhin et al. 2020, arXiv 2006.16668",
        COMMON | UNBALANCED | _CAPACITY,
        training=_by_drop_order,
        needs_balance_loss=True,
        problem=_capacity_problem,
        requires={"experts_per_token": 2},
    ),
    "loss_free": RouterFacts(
        "moe.routers.loss_free.LossFreeRouter",
        "top-k of sigmoid scores plus a bias that balances load, optionally within the best groups of experts",
        "Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437",
        COMMON
        | UNBALANCED
        | _CAPACITY
        | {"renormalize", "bias_rate", "bias_update", "expert_groups", "expert_groups_kept"},
        training=_by_drop_order,
        problem=_loss_free_problem,
        balance="a bias on the selection",
    ),
    "quantile": RouterFacts(
        "moe.routers.quantile.QuantileRouter",
        "top-k of scores less a quantile of each expert's margin over the last batch",
        "quantile balancing, as in Megatron-LM",
        COMMON | UNBALANCED | _CAPACITY | {"score", "renormalize"},
        training=_by_drop_order,
        problem=_capacity_problem,
        balance="a quantile of the last batch",
    ),
    "sinkhorn": RouterFacts(
        "moe.routers.sinkhorn.SinkhornRouter",
        "top-k of Sinkhorn-balanced scores of a group (S-BASE: k = 1); plain top-k when served",
        "Clark et al. 2022, arXiv 2202.01169",
        COMMON | UNBALANCED,
        training=_always("leaks"),
        balance="Sinkhorn in training",
    ),
    "base": RouterFacts(
        "moe.routers.assignment.BaseAssignmentRouter",
        "balanced linear assignment of a group's tokens, one expert each; greedy when served",
        "Lewis et al. 2021, arXiv 2103.16716",
        COMMON,
        training=_always("leaks"),
        balance="the assignment itself, in training",
        requires={"experts_per_token": 1},
    ),
    "hash": RouterFacts(
        "moe.routers.hash.HashRouter",
        "experts are a fixed function of the token id; nothing is learned",
        "Roller et al. 2021, arXiv 2106.04426",
        frozenset({"route_scale"}),
        training=_always("causal"),
        balance="the hash",
    ),
    "remoe": RouterFacts(
        "moe.routers.remoe.ReMoERouter",
        "relu scores, every positive one is used; an adaptive L1 keeps k experts a token on average",
        "Wang et al. 2024, arXiv 2412.14711",
        COMMON | {"l1_initial", "l1_multiplier", "forced_balance"},
        training=_always("causal"),
        balance="an adaptive L1 that weighs busy experts more",
        problem=_remoe_problem,
    ),
    "soft": RouterFacts(
        "moe.soft.SoftMoELayer",
        "slots are mixtures of a group's tokens; served with every token a group of its own",
        "Puigcerver et al. 2023, arXiv 2308.00951",
        frozenset({"group", "chunk_length", "slots_per_expert"}),
        training=_by_group,
        static_shapes=True,
        balance="equal slots",
    ),
    "dense": RouterFacts(
        "",
        "the dense twin: a feed-forward as wide as the experts of one token together",
        "",
        frozenset(),
        training=_always("causal"),
        static_shapes=True,
        balance="nothing to balance",
    ),
}
