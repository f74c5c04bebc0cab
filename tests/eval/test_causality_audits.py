"""The exact audits: what every router x policy was measured to see, and that the audits can tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.causality_audits import certify_model, certify_router, information_bound, probe_shape, ways
from eval.causality_presets import PRESETS, SEQUENCE_LENGTH, Preset, markdown_table
from moe.config import ConfigError, MoEConfig
from moe.model import Transformer
from moe.routers.registry import ROUTERS
from tests.eval.small_models import VOCABULARY, random_text, small_model

C, B, L = "causal", "batch-dependent", "leaks"
# (training router, evaluation router), by hand.
EXPECTED = {
    ("expert_choice", "flat groups"): (L, C),
    ("expert_choice", "one position across sequences"): (B, C),
    ("expert_choice", "chunks of a sequence"): (L, C),
    ("expert_choice", "one short sequence"): (L, C),
    ("expert_choice", "flat, experts per token capped"): (L, C),
    ("expert_choice", "position, experts per token capped"): (B, C),
    ("expert_choice", "flat, threshold from the first step"): (C, C),
    ("expert_choice", "flat, served by predictor"): (L, C),
    ("expert_choice", "flat, served by token choice"): (L, C),
    ("threshold", ""): (C, C),
    ("mixture_of_depths", "one sequence"): (L, C),
    ("mixture_of_depths", "one sequence, served by predictor"): (L, C),
    ("mixture_of_depths", "one position across sequences"): (B, C),
    ("token_choice", "dropless"): (C, C),
    ("token_choice", "capacity in token order, one sequence"): (C, C),
    ("token_choice", "capacity in token order"): (B, C),
    ("token_choice", "Switch: k = 1, first choices first"): (B, C),
    ("token_choice", "k = 2, first choices first"): (L, C),
    ("token_choice", "lowest scores dropped"): (L, C),
    ("token_choice", "k = 1, lowest scores dropped"): (L, C),
    ("token_choice", "batch-prioritised"): (L, C),
    ("token_choice", "k = 1, batch-prioritised"): (L, C),
    ("noisy_top_k", "dropless"): (C, C),
    ("noisy_top_k", "capacity in token order"): (B, C),
    ("gshard", "dropless"): (C, C),
    ("gshard", "first choices first"): (L, C),
    ("gshard", "capacity in token order"): (B, C),
    ("loss_free", ""): (C, C),
    ("loss_free", "limited to the best 2 of 4 groups of experts"): (C, C),
    ("loss_free", "lowest scores dropped"): (L, C),
    ("quantile", ""): (C, C),
    ("sinkhorn", "k = 2"): (L, C),
    ("sinkhorn", "S-BASE: k = 1"): (L, C),
    ("base", ""): (L, C),
    ("hash", ""): (C, C),
    ("remoe", ""): (C, C),
    ("soft", "flat groups"): (L, C),
    ("soft", "one position across sequences"): (B, C),
    ("token_choice", "dropless, forced balance"): (C, C),
    ("dense", ""): (C, C),
}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: f"{preset.router}: {preset.policy}")
def test_the_verdicts_of_every_router_and_policy(preset: Preset) -> None:
    """H02, and the less known leaks: choice-major with k = 2, score-ordered dropping, batch-prioritised routing."""
    verdicts = certify_router(preset.config, SEQUENCE_LENGTH)
    assert (verdicts.training, verdicts.evaluation) == EXPECTED[preset.router, preset.policy]
    assert (verdicts.declared_training, verdicts.declared_evaluation) == (verdicts.training, verdicts.evaluation)


def test_every_router_of_the_registry_is_in_the_table() -> None:
    assert {preset.router for preset in PRESETS} == set(ROUTERS)
    assert [(preset.router, preset.policy) for preset in PRESETS] == list(EXPECTED)


def test_the_documentation_shows_the_verdicts_that_are_measured() -> None:
    lines = (Path(__file__).parents[2] / "docs/routing.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| router | policy | training | evaluation | A1 leaks | A2 changes |") + 2
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in lines[start : start + len(EXPECTED)]]
    assert {(router, policy): (training, served) for router, policy, training, served in rows} == EXPECTED
    assert not lines[start + len(EXPECTED)].startswith("|")


def test_the_table_is_markdown_and_names_a_declaration_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    humble = replace(ROUTERS["hash"], training=lambda moe: L)
    monkeypatch.setitem(ROUTERS, "hash", humble)
    lines = markdown_table([preset for preset in PRESETS if preset.router == "hash"]).splitlines()
    assert lines[2] == "| hash |  | causal (declared leaks) | causal | 0 of 12 | 0 of 6 |"


def certify(model: Transformer, rows: int = 4, length: int = 10) -> Any:
    return certify_model(model, random_text(rows, length, 1), random_text(rows, length, 2), torch.Generator())


def test_a_leak_is_counted_and_placed_and_leaves_no_trace_in_the_model() -> None:
    model = small_model("expert_choice", group="chunk", chunk_length=6, threshold_after=1.0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    training, frozen, evaluation = certify(model, length=12).audits
    assert training.leaks > 0 and training.moved_before > 0 and training.moved > 0
    assert training.first.startswith(("routes", "weights"))
    assert (training.suffix_probes, training.row_probes) == (6, 3)
    assert frozen.verdict == "leaks" and evaluation.verdict == "causal"
    assert evaluation.leaks == evaluation.moved_before == 0 and evaluation.moved > 0
    assert all(buffer.equal(before[name]) for name, buffer in model.named_buffers())


def test_the_phases_of_expert_choice_are_audited_apart() -> None:
    moe = MoEConfig(router="expert_choice")
    assert [way.name for way in ways(moe)][2:] == ["training, threshold phase", "evaluation"]
    assert [way.name for way in ways(replace(moe, threshold_after=1.0))][2:] == ["evaluation"]
    assert [way.name for way in ways(replace(moe, threshold_after=0.0))] == ["training, threshold phase", "evaluation"]
    assert [way.mode for way in ways(MoEConfig(router="token_choice"))] == ["train", "train_router", "causal"]


def test_a_probe_that_changes_nothing_is_no_evidence() -> None:
    model = small_model("token_choice")
    with torch.no_grad():
        model.embedding.weight.zero_()  # every token is the same token now
    with pytest.raises(ValueError, match="training: the probe has no power: no route, weight or output changed"):
        certify(model)


def test_routing_that_changes_by_itself_cannot_be_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("token_choice")
    router = model.moe_layers()[0].router
    score = router.score
    monkeypatch.setattr(router, "score", lambda logits_TE: score(logits_TE + torch.rand_like(logits_TE)))
    with pytest.raises(ValueError, match="the same batch gave other bits the second time"):
        certify(model)


def test_one_changed_bit_in_a_weight_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes stay; one weight of the first token moves by its last bit with the last token's score."""
    model = small_model("token_choice")
    router = model.moe_layers()[1].router

    def peek(scores_TE: torch.Tensor, decision: Any) -> torch.Tensor:
        weights_TE = scores_TE.clone()
        last_bit = torch.nextafter(weights_TE[0], torch.tensor(2.0))
        weights_TE[0] = torch.where((scores_TE[9] * 1e4).int() % 2 == 0, last_bit, weights_TE[0])
        return weights_TE

    monkeypatch.setattr(router, "weights", peek)
    found = {audit.way: audit for audit in certify(model, rows=1).audits}
    assert found["evaluation"].verdict == "leaks" and found["evaluation"].moved_before == 0
    assert found["evaluation"].first.startswith("weights of layer 1")


def test_what_a_layer_does_beside_its_routing_is_seen_too() -> None:
    """A shared expert of the last layer that looks one token ahead: only the last token before a change can tell."""
    model = small_model("token_choice")
    layer = model.moe_layers()[2]
    assert layer.shared is not None
    layer.shared.register_forward_hook(lambda module, given, output: output + output.roll(-1, 0))
    verdicts = certify(model)
    assert verdicts.evaluation == "leaks" and verdicts.declared_evaluation == "causal"
    assert verdicts.audits[-1].first.startswith("output of layer 2")


def test_a_capacity_that_drops_nothing_is_said_to_be_untested() -> None:
    tight = MoEConfig(router="token_choice", num_experts=4, capacity_factor=0.6, drop_order="score", allow_leak=True)
    loose = replace(tight, capacity_factor=4.0)
    assert not any("dropping was not tested" in note for note in certify_router(tight, 8).notes)
    verdicts = certify_router(loose, 8)
    assert verdicts.training == "causal" and verdicts.declared_training == "leaks"
    assert verdicts.notes[0] == "moe.capacity_factor = 4.0 dropped nothing here: dropping was not tested"


def test_allow_leak_is_not_needed_to_be_audited_but_groups_must_fit() -> None:
    moe = MoEConfig(num_experts=4, group_sequences=1)
    assert certify_router(moe, 8).training == "leaks"
    with pytest.raises(ConfigError, match="capacity .* is not a whole number"):
        certify_router(moe, 7)
    with pytest.raises(ValueError, match="a sequence of 1 token has no future"):
        certify_model(small_model("token_choice"), random_text(4, 1), random_text(4, 1, 1), torch.Generator())


def test_sequences_are_cut_only_where_no_group_spans_them() -> None:
    moe = MoEConfig(group_sequences=4)
    assert probe_shape(moe, 256) == (8, 256)
    assert probe_shape(moe, 4096) == (4, 4096)  # one group of 16,384 tokens
    assert probe_shape(replace(moe, group="position", group_sequences=16), 4096) == (32, 64)
    assert probe_shape(replace(moe, group="chunk", chunk_length=48), 4800) == (8, 240)
    assert probe_shape(replace(moe, group="chunk", chunk_length=1024), 4096) == (8, 1024)
    assert probe_shape(replace(moe, group_sequences=1), 8192) == (2, 8192)  # other rows are needed
    cut = MoEConfig(num_experts=4, group="position", group_sequences=4)
    assert certify_router(cut, 65).notes[1] == "sequences cut from 65 to 64 tokens, which no routing group spans"


def test_the_information_bound_has_the_published_value() -> None:
    """16 experts, 2 a token, 9 layers: 16 * H(1/8) * 9 = 78.3 bits a token; the paper's own bound is above 50."""
    moe = MoEConfig(num_experts=16, experts_per_token=2)
    assert information_bound(moe, 9) == pytest.approx(78.27, abs=0.005)
    assert information_bound(MoEConfig(num_experts=2, experts_per_token=1), 3) == 6.0  # an even choice is 1 bit
    assert information_bound(MoEConfig(num_experts=2, experts_per_token=2), 3) == 0.0
    depth = {"router": "mixture_of_depths", "num_experts": 1, "experts_per_token": 1, "depth_capacity": 0.5}
    assert information_bound(MoEConfig(**depth), 4) == 4.0
    assert information_bound(MoEConfig(router="soft"), 3) is None
    assert information_bound(MoEConfig(router="dense"), 0) is None


def test_text_that_repeats_itself_still_changes_where_it_is_resampled() -> None:
    """Held-out text may hold the same token at the same place twice: such places are changed all the same."""
    model = small_model("token_choice")
    text = random_text(2, 6)
    verdicts = certify_model(model, text, text.clone(), torch.Generator())
    assert all(audit.moved > 0 for audit in verdicts.audits)
    assert text.max() < VOCABULARY
