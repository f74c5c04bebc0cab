"""Every router with every policy that changes what it can see: the table of `python -m eval.causality --all`."""

from __future__ import annotations

from typing import Any, NamedTuple

from eval.causality_audits import Verdicts, certify_router
from moe.config import MoEConfig

SEQUENCE_LENGTH = 24


class Preset(NamedTuple):
    """One row: 8 experts, 2 a token, groups of 2 sequences of 24 tokens, unless it says otherwise.

    Attributes:
        router: name.
        policy: what is special, for people.
        moe: keys of `[moe]` that differ.
    """

    router: str
    policy: str
    moe: dict[str, Any]

    @property
    def config(self) -> MoEConfig:
        """The routing."""
        sizes = {"num_experts": 8, "experts_per_token": 2, "group_sequences": 2, "allow_leak": True}
        return MoEConfig(router=self.router, **{**sizes, **self.moe})


POSITION = {"group": "position", "group_sequences": 4}
CHUNK = {"group": "chunk", "chunk_length": 8}
TIGHT = {"capacity_factor": 0.7}
DEPTH = {"num_experts": 1, "experts_per_token": 1, "depth_capacity": 0.25}
PREDICTOR = {"inference": "predictor", "predictor_coefficient": 0.01}

PRESETS = [
    Preset("expert_choice", "flat groups", {}),
    Preset("expert_choice", "one position across sequences", POSITION),
    Preset("expert_choice", "chunks of a sequence", CHUNK),
    Preset("expert_choice", "one short sequence", {"group_sequences": 1}),
    Preset("expert_choice", "flat, experts per token capped", {"expert_cap": 3}),
    Preset("expert_choice", "position, experts per token capped", {**POSITION, "expert_cap": 3}),
    Preset("expert_choice", "flat, threshold from the first step", {"threshold_after": 0.0}),
    Preset("expert_choice", "flat, served by predictor", PREDICTOR),
    Preset("expert_choice", "flat, served by token choice", {"inference": "token_choice"}),
    Preset("threshold", "", {}),
    Preset("mixture_of_depths", "one sequence", {**DEPTH, "group_sequences": 1}),
    Preset("mixture_of_depths", "one sequence, served by predictor", {**DEPTH, **PREDICTOR, "group_sequences": 1}),
    Preset("mixture_of_depths", "one position across sequences", {**DEPTH, **POSITION}),
    Preset("token_choice", "dropless", {}),
    Preset("token_choice", "capacity in token order, one sequence", {**TIGHT, "group_sequences": 1}),
    Preset("token_choice", "capacity in token order", TIGHT),
    Preset(
        "token_choice", "Switch: k = 1, first choices first", {**TIGHT, "experts_per_token": 1, "drop_order": "choice"}
    ),
    Preset("token_choice", "k = 2, first choices first", {**TIGHT, "drop_order": "choice"}),
    Preset("token_choice", "lowest scores dropped", {**TIGHT, "drop_order": "score"}),
    Preset("token_choice", "k = 1, lowest scores dropped", {**TIGHT, "experts_per_token": 1, "drop_order": "score"}),
    Preset("token_choice", "batch-prioritised", {**TIGHT, "drop_order": "priority"}),
    Preset("token_choice", "k = 1, batch-prioritised", {**TIGHT, "experts_per_token": 1, "drop_order": "priority"}),
    Preset("noisy_top_k", "dropless", {}),
    Preset("noisy_top_k", "capacity in token order", TIGHT),
    Preset("gshard", "dropless", {}),
    Preset("gshard", "first choices first", {**TIGHT, "drop_order": "choice"}),
    Preset("gshard", "capacity in token order", TIGHT),
    Preset("loss_free", "", {}),
    Preset("loss_free", "limited to the best 2 of 4 groups of experts", {"expert_groups": 4, "expert_groups_kept": 2}),
    Preset("loss_free", "lowest scores dropped", {**TIGHT, "drop_order": "score"}),
    Preset("quantile", "", {}),
    Preset("sinkhorn", "k = 2", {}),
    Preset("sinkhorn", "S-BASE: k = 1", {"experts_per_token": 1}),
    Preset("base", "", {"experts_per_token": 1}),
    Preset("hash", "", {}),
    Preset("remoe", "", {}),
    Preset("soft", "flat groups", {}),
    Preset("soft", "one position across sequences", POSITION),
    Preset("token_choice", "dropless, forced balance", {"forced_balance": True}),
    Preset("dense", "", {}),
]


def markdown_table(presets: list[Preset] | None = None) -> str:
    """Certify the presets: a Markdown table, with what was measured; a declaration that differs is named."""
    lines = [
        "| router | policy | training | evaluation | A1 leaks | A2 changes |",
        "|---|---|---|---|---|---|",
    ]
    for preset in PRESETS if presets is None else presets:
        verdicts = certify_router(preset.config, SEQUENCE_LENGTH)
        training = [audit for audit in verdicts.audits if audit.training][:2]  # without expert choice's threshold phase
        leaks = sum(audit.leaks for audit in training), sum(audit.suffix_probes for audit in training)
        changes = sum(audit.batch_dependent for audit in training), sum(audit.row_probes for audit in training)
        lines.append(
            f"| {preset.router} | {preset.policy} | {_cell(verdicts, 'training')} | {_cell(verdicts, 'evaluation')} "
            f"| {leaks[0]} of {leaks[1]} | {changes[0]} of {changes[1]} |"
        )
    return "\n".join(lines)


def _cell(verdicts: Verdicts, which: str) -> str:
    measured, declared = getattr(verdicts, which), getattr(verdicts, f"declared_{which}")
    return str(measured) if measured == declared else f"{measured} (declared {declared})"
