"""Files of ablations: arms, grids, budgets, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ablations.budget import Cost
from ablations.spec import grid_points, load_ablation, merge, nested, shrink
from moe.config import ConfigError
from moe.flops import training_flops_per_token
from tests.ablations.conftest import TWO_ARMS

SHIPPED = sorted(
    path
    for path in (Path(__file__).parents[2] / "ablations").glob("*.toml")
    if path.name not in ("base.toml", "characters.toml")
)
HEAD = 'question = "?"\nbase = "base.toml"\nbaseline = "a"\n'


def test_an_arm_is_the_base_with_overrides_and_its_own_changes(write_ablation: Callable[[str], Path]) -> None:
    path = write_ablation(
        HEAD + '[overrides]\n"moe.balance_coefficient" = 0.25\ntraining.steps = 9\n[arms.a]\n'
        "[arms.b]\nmoe.num_experts = 8\n"
    )
    a, b = load_ablation(path).arms
    assert (a.config.moe.num_experts, b.config.moe.num_experts) == (4, 8)
    assert a.config.moe.balance_coefficient == b.config.moe.balance_coefficient == 0.25
    assert a.config.training.steps == 9 and a.config.model.width == 16
    assert (a.changes, b.changes) == ({}, {"moe.num_experts": 8})


def test_a_grid_is_every_combination(write_ablation: Callable[[str], Path]) -> None:
    path = write_ablation(
        HEAD.replace('"a"', '"num_experts=4 expert_width=8"')
        + '[grid]\n"moe.num_experts" = [4, 8]\n[grid.moe]\nexpert_width = [8, 12, 16]\n'
    )
    arms = load_ablation(path).arms
    assert [arm.name for arm in arms] == [f"num_experts={e} expert_width={f}" for e in (4, 8) for f in (8, 12, 16)]
    assert [(arm.config.moe.num_experts, arm.config.moe.expert_width) for arm in arms][3] == (8, 8)


def test_arms_times_a_grid(write_ablation: Callable[[str], Path]) -> None:
    path = write_ablation(
        HEAD.replace('"a"', '"a num_experts=4"')
        + "[grid]\nmoe.num_experts = [4, 8]\n[arms.a]\n[arms.b]\nmoe.balance_coefficient = 0.1\n"
    )
    names = [arm.name for arm in load_ablation(path).arms]
    assert names == ["a num_experts=4", "a num_experts=8", "b num_experts=4", "b num_experts=8"]


def test_dotted_and_nested_keys_are_the_same() -> None:
    assert nested({"moe.router": 1, "moe": {"a.b": 2}}) == {"moe": {"router": 1, "a": {"b": 2}}}
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}) == {"a": {"b": 3, "c": 2}, "d": 4}
    assert list(grid_points({}, "file")) == [{}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "[arms.a]\nmoe.num_expert = 4", 'arm "a": unknown key moe.num_expert; did you mean moe.num_experts?'),
        (HEAD + "[arms.a]\nmodel.num_experts = 4", "did you mean moe.num_experts?"),
        (HEAD + "[arm.a]\n", "unknown key arm; did you mean arms?"),
        (HEAD + "seed = 3\n[arms.a]\n", "did you mean run.seed"),
        (HEAD + "[budget]\nrul = 'flops'\n[arms.a]\n", "did you mean budget.rule?"),
        (HEAD + "[budget]\nrule = 'flop'\n[arms.a]\n", "one of 'tokens', 'active_parameters', 'flops'"),
        (HEAD + "[budget]\nadjust_steps = true\n[arms.a]\n", "has no effect with budget.rule"),
        (HEAD + "[halving]\nrung = [1.0]\n[arms.a]\n", "did you mean halving.rungs?"),
        (HEAD + "[halving]\nrungs = [0.5, 0.25, 1.0]\n[arms.a]\n", "must rise"),
        (HEAD + "[halving]\nrungs = [0.5]\n[arms.a]\n", "to 1.0, the whole run"),
        (HEAD + "[arms.a]\nmoe.num_experts = 0\n", 'arm "a": moe.num_experts = 0: must be at least 1'),
        (HEAD + "[arms.b]\n", "baseline = 'a': must be an arm: b"),
        (HEAD, "give \\[arms.NAME\\] sections, or a \\[grid\\]"),
        (HEAD.replace("base.toml", "bass.toml") + "[arms.a]\n", "base = 'bass.toml': no such file"),
        (HEAD.replace("question", "base2") + "[arms.a]\n", "unknown key base2; did you mean base?"),
        ("base = 'base.toml'\nbaseline = 'a'\n[arms.a]\n", "question is missing"),
        (HEAD + "[arms]\na = 3\n", "arms.a = 3: must be a section"),
        (HEAD + "[grid]\nmoe.num_experts = 4\n", "grid.moe.num_experts = 4: must be a list"),
        (HEAD + "[arms.a]\n[arms.A]\nmoe.num_experts = 8\n", "would share the folder a"),
        (HEAD + "[arms.a]\n[arms.b]\nrun.seed = 4\n", "run.seed differs between arms \\(a: 0, b: 4\\)"),
        (HEAD + "[arms.a]\n[arms.b]\ntraining.sequence_length = 48\n", "not be scored on the same text"),
        (HEAD + "seeds = 0\n[arms.a]\n", "seeds = 0: must be at least 1"),
        (HEAD + "leak_pairs = 1\n[arms.a]\n", "leak_pairs = 1"),
    ],
)
def test_what_is_wrong_is_an_error_that_says_what_to_do(
    write_ablation: Callable[[str], Path], text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_ablation(write_ablation(text))


def test_a_budget_misfit_lists_every_arm_s_numbers(write_ablation: Callable[[str], Path]) -> None:
    path = write_ablation(
        HEAD + '[budget]\nrule = "active_parameters"\n[arms.a]\n[arms."b wide"]\nmoe.expert_width = 16\n'
        "[arms.c]\nmoe.balance_coefficient = 0.1\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_ablation(path)
    said = str(caught.value)
    assert "equal active parameters, within 1% of the baseline's (a), which b wide misses" in said
    for arm, width in (("a", 8), ("b wide", 16)):
        # 2 layers, D 16, k 2: embedding and head, attention, router, three matrices an expert, norms
        active = 2 * 280 * 16 + 2 * (4 * 16 * 16 + 4 * 16 + 2 * 3 * 16 * width + 2 * 16) + 16
        assert f"{arm}: {active:,} active parameters" in said
    assert "576 tokens in 6 steps" in said


@pytest.mark.parametrize("rule", ["tokens", "active_parameters"])
def test_unequal_tokens_are_a_misfit(write_ablation: Callable[[str], Path], rule: str) -> None:
    path = write_ablation(HEAD + f'[budget]\nrule = "{rule}"\n[arms.a]\n[arms.b]\ntraining.steps = 7\n')
    with pytest.raises(ConfigError, match="which b misses.*672 tokens in 7 steps"):
        load_ablation(path)


def test_flops_are_checked_or_met_by_the_number_of_steps(write_ablation: Callable[[str], Path]) -> None:
    arms = "[overrides]\ntraining.steps = 400\n[arms.a]\n[arms.b]\nmoe.expert_width = 64\n"
    with pytest.raises(ConfigError, match="set budget.adjust_steps = true"):
        load_ablation(write_ablation(HEAD + '[budget]\nrule = "flops"\n' + arms))
    a, b = load_ablation(write_ablation(HEAD + '[budget]\nrule = "flops"\nadjust_steps = true\n' + arms)).arms
    per_token = [training_flops_per_token(arm.config.model, arm.config.moe, 24) for arm in (a, b)]
    assert a.config.training.steps == 400
    assert b.config.training.steps == round(400 * per_token[0] / per_token[1]) < 400
    assert Cost.of(b.config).flops == pytest.approx(Cost.of(a.config).flops, rel=0.01)


def test_steps_too_few_to_match_the_flops_closely_are_a_misfit(write_ablation: Callable[[str], Path]) -> None:
    budget = '[budget]\nrule = "flops"\nadjust_steps = true\ntolerance = 0.001\n'
    with pytest.raises(ConfigError, match="which b misses"):
        load_ablation(write_ablation(HEAD + budget + "[arms.a]\n[arms.b]\nmoe.expert_width = 16\n"))


def test_a_quick_form_is_marked_and_shares_nothing_but_the_arms(write_ablation: Callable[[str], Path]) -> None:
    ablation = load_ablation(write_ablation(TWO_ARMS + "[overrides]\ntraining.steps = 500\n"))
    quick = shrink(ablation, steps=3, seeds=1)
    assert quick.quick and not ablation.quick
    assert {arm.config.training.steps for arm in quick.arms} == {3} and quick.seeds == 1
    assert [arm.config.moe for arm in quick.arms] == [arm.config.moe for arm in ablation.arms]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_file_that_is_shipped_is_valid_and_meets_its_budget(path: Path) -> None:
    ablation = load_ablation(path)
    assert len(ablation.arms) >= 4 and ablation.seeds >= 2
    assert ablation.claims or ablation.halving
    seeds = len(ablation.arms) * ablation.seeds
    assert seeds <= 60  # at under 45 s of one core each: under 40 minutes on two
