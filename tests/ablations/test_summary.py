"""Tables and sentences on results with known intervals."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ablations.figure import scores_figure
from ablations.measures import Results
from ablations.spec import Ablation
from ablations.summary import ranking, statements, summarise
from ablations.tables import markdown, tables
from eval.figures import to_png
from tests.ablations.conftest import made_up


def results(none: list[float], balanced: list[float], **more: Any) -> Results:
    return {
        "none": {seed: made_up(bits) for seed, bits in enumerate(none)},
        "balanced": {seed: made_up(bits, **more) for seed, bits in enumerate(balanced)},
    }


def sentence(two_arms: Ablation, none: list[float], balanced: list[float]) -> str:
    ablation = dataclasses.replace(two_arms, seeds=len(none))
    return statements(summarise(ablation, results(none, balanced)))[0]


def test_a_clear_difference_is_said_with_its_interval(two_arms: Ablation) -> None:
    """Differences 0.1, 0.2, 0.3: mean 0.2, half width 4.3027 * 0.1 / sqrt 3 = 0.2484, which holds 0; less a tenth."""
    said = sentence(two_arms, [2.0, 2.1, 2.2], [2.10, 2.21, 2.32])
    assert said == (
        "balanced is worse than none by 0.1100 bits a byte (95% interval 0.0852 to 0.1348, 3 seeds); p = 0.0027."
    )
    assert "balanced is better than none by 0.1100" in sentence(two_arms, [2.10, 2.21, 2.32], [2.0, 2.1, 2.2])


def test_an_interval_that_holds_0_is_said_to_be_no_evidence(two_arms: Ablation) -> None:
    assert sentence(two_arms, [2.0, 2.0, 2.0], [2.1, 2.2, 2.3]) == (
        "balanced and none: +0.2000 [-0.0484, +0.4484] bits a byte, an interval that contains 0: no evidence of a "
        "difference in either direction, and some against one of more than 0.4484."
    )


def test_one_seed_is_said_to_be_no_evidence(two_arms: Ablation) -> None:
    assert "without a second one no difference is evidence" in sentence(two_arms, [2.0], [1.0])


def test_an_interval_that_excludes_0_only_uncorrected_is_a_hint(two_arms: Ablation) -> None:
    """Two comparisons: p of 0.11, 0.12, 0.20 is 0.037, corrected 0.074 where the other is not smaller."""
    third = dataclasses.replace(two_arms.arms[1], name="third")
    ablation = dataclasses.replace(two_arms, arms=(*two_arms.arms, third), seeds=3)
    found = results([2.0, 2.0, 2.0], [2.11, 2.12, 2.20]) | {"third": {s: made_up(2.0 + s - 1) for s in range(3)}}
    said = summarise(ablation, found)["statements"]
    hint = next(each for each in said if each.startswith("balanced"))
    assert "among 2 comparisons" in hint and hint.endswith("a hint, not evidence.")


def test_the_best_is_first_and_no_noncausal_loss_takes_part(two_arms: Ablation) -> None:
    found = results([2.0, 2.1], [2.5, 2.6], noncausal_bits_per_byte=0.5, leak_bits=0.25)
    summary = summarise(two_arms, found)
    assert ranking(summary) == ["none", "balanced"]
    scores = tables(summary)[0]
    assert scores.columns[-1] == "noncausal bits/byte" and "leak, bits/token" in scores.columns
    assert [row[0] for row in scores.rows] == ["none", "balanced"]
    assert [row[-1] for row in scores.rows] == ["-", "0.5000"]
    assert any("which is no result" in said for said in summary["statements"])


def test_the_columns_of_leak_and_noncausal_are_left_out_where_nothing_leaks(two_arms: Ablation) -> None:
    columns = tables(summarise(two_arms, results([2.0, 2.1], [2.5, 2.6])))[0].columns
    assert not [column for column in columns if "leak" in column or "noncausal" in column]


def test_the_table_has_means_intervals_and_differences(two_arms: Ablation) -> None:
    scores, budget, domains = tables(summarise(two_arms, results([2.0, 2.2], [2.1, 2.32])))
    # t(0.975, 1) = 12.7062: 2.1 +- 1.2706; the difference 0.11 +- 0.1271
    assert scores.rows[0][:3] == ("none", "2.1000 [0.8294, 3.3706]", "baseline")
    assert scores.rows[1][2] == "+0.1100 [-0.0171, +0.2371]"
    assert budget.rows[1][-1] == "moe.balance_coefficient = 0.5" and budget.rows[0][5] == "576"
    assert domains.columns == ("arm", "low", "high") and domains.rows[0][1].startswith("2.000 [")


def test_claims_and_what_is_missing_are_in_the_markdown(two_arms: Ablation) -> None:
    from ablations.claims import Claim

    ablation = dataclasses.replace(two_arms, seeds=3, claims=(Claim(("none", "balanced"), "balance costs"),))
    found = results([2.0, 2.1, 2.2], [2.10, 2.21, 2.32])
    text = markdown(summarise(ablation, found, ["none, seed 9: failed"], "python -m x"), "scores.png", level=2)
    assert "| balance costs | supported | gain +0.1100" in text
    assert "Incomplete: none, seed 9: failed." in text
    assert "`python -m x`" in text and "Commit abc; run 2030-01-02" in text and "1.5 CPU minutes" in text
    assert text.startswith("## question") and "### Scores" in text and "](scores.png)" in text


def test_the_data_are_json_and_the_figure_is_a_picture(two_arms: Ablation) -> None:
    summary = summarise(two_arms, results([2.0, 2.1], [2.5, 2.6]))
    assert json.loads(json.dumps(summary, allow_nan=False)) == json.loads(json.dumps(summary))
    assert to_png(scores_figure(summary)).startswith(b"\x89PNG")


def test_seeds_that_only_one_arm_has_are_not_compared(two_arms: Ablation) -> None:
    found = results([2.0, 2.1, 2.2], [2.5, 2.6])
    assert summarise(two_arms, found)["arms"]["balanced"]["against_baseline"]["values"] == 2


def test_an_arm_without_a_run_is_shown_as_missing(two_arms: Ablation) -> None:
    summary = summarise(two_arms, {"none": {0: made_up(2.0)}, "balanced": {}}, ["balanced, seed 0: failed"])
    assert tables(summary)[0].rows[-1][:2] == ("balanced", "-")
    to_png(scores_figure(summary))


def test_different_corpora_and_no_runs_at_all_are_refused(two_arms: Ablation) -> None:
    with pytest.raises(ValueError, match="different corpora"):
        summarise(two_arms, results([2.0], [2.1], corpus_sha256="d" * 64))
    with pytest.raises(ValueError, match="no run is finished"):
        summarise(two_arms, {"none": {}, "balanced": {}})


def test_a_smoke_run_says_so_everywhere(two_arms: Ablation) -> None:
    summary = summarise(dataclasses.replace(two_arms, quick=True), results([2.0, 2.1], [2.5, 2.6]))
    assert summary["statements"][0].startswith("SMOKE RUN")
    assert markdown(summary).startswith("# SMOKE RUN, not a result: question")
