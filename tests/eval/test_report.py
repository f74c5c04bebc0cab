"""The scoreboard says what was measured, apart from what is no result, and writes whole files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.batches import Batches, heldout_windows
from eval import figures, generate, ngram, report
from eval.command import run_command
from eval.likelihood import evaluate
from eval.report_tables import markdown, tables
from eval.scoreboard import compute, strongest, training_balance
from training.run import Run


@pytest.fixture(scope="module")
def computed(small_run: Run) -> dict[str, Any]:
    return compute(small_run)


@pytest.fixture
def copied_run(small_run: Run, tmp_path: Path) -> Run:
    """A copy that a test may write to."""
    return Run.open(shutil.copytree(small_run.folder, tmp_path / "copied"))


def test_the_model_is_scored_causally_on_the_asked_tokens(small_run: Run, computed: dict[str, Any]) -> None:
    expected = evaluate(small_run.model("cpu"), small_run.corpus(), small_run.config, 200)
    assert computed["scores"]["model"]["total"]["bits_per_byte"] == pytest.approx(expected.bits_per_byte)
    assert computed["scores"]["model"]["domains"]["low"]["tokens"] == 216  # 200 in whole windows of 24
    assert computed["step"] == 10
    # The evaluation at the end of training is the same.
    (final,) = [line for line in small_run.metrics() if "final/loss" in line]
    assert final["final/bits_per_byte"] == pytest.approx(expected.bits_per_byte)


def test_baselines_are_fitted_on_what_the_run_consumed(small_run: Run, computed: dict[str, Any]) -> None:
    corpus = small_run.corpus()
    batches = Batches(corpus, 24, 4, 0)
    consumed = [batches.batch(step) for step in range(10)]
    _, bigram = ngram.fit([(b.token_BS, b.label_BS) for b in consumed], corpus.vocabulary_size)
    nats = sum(bigram.nats(w.token_BS, w.label_BS).sum() for w in heldout_windows(corpus, 24, max_tokens=200))
    assert computed["scores"]["bigram"]["total"]["nats"] == pytest.approx(nats)
    assert computed["tokens_consumed"] == 960
    scores = computed["scores"]
    assert scores["bigram"]["total"]["tokens"] == scores["model"]["total"]["tokens"]
    assert scores["bigram"]["total"]["bits_per_byte"] < scores["unigram"]["total"]["bits_per_byte"]


def test_the_noncausal_figure_stands_apart_and_says_what_it_is(computed: dict[str, Any]) -> None:
    """H02."""
    assert "never a result" in computed["noncausal"]["warning"]
    board, noncausal, *_ = tables(computed)
    assert "causal routing" in board.title and "noncausal" not in str(board)
    assert noncausal.title.startswith("NOT causal, never a result")
    assert noncausal.rows[0][0] == "training router (sees later tokens)"


def test_total_and_mean_are_both_given_and_named(computed: dict[str, Any]) -> None:
    rows = {row[0]: row for row in tables(computed)[0].rows}
    assert list(rows) == ["low", "high", "all bytes (total)", "all domains alike (mean)"]
    parts = [part["bits_per_byte"] for part in computed["scores"]["model"]["domains"].values()]
    assert rows["all domains alike (mean)"][1] == f"{np.mean(parts):.4f}"


def test_routing_is_described_layer_by_layer(computed: dict[str, Any]) -> None:
    routing = computed["routing"]
    assert [layer["layer"] for layer in routing["layers"]] == [0, 1]
    for layer in routing["layers"]:
        counts_ME = np.array(layer["counts"])
        assert sum(layer["fan_out"]) == 432
        assert layer["experts_per_token"] == pytest.approx(counts_ME.sum() / 432)
        assert np.array(layer["share_of_domain_tokens"]) == pytest.approx(counts_ME / 216)
        assert 0 <= layer["zero_expert_fraction"] <= 1
    assert routing["training_phase"] == "threshold"
    assert routing["training_steps"] == [6, 10]


def test_phases_of_training_are_not_mixed() -> None:
    records = [
        {"step": 1, "counts": [[2, 2]], "threshold_phase": False},
        {"step": 2, "counts": [[4, 0]], "threshold_phase": True},
        {"step": 3, "counts": [[3, 1]], "threshold_phase": True},
    ]
    balance = training_balance(records)
    assert balance == {"phase": "threshold", "steps": [2, 3], "max_violation": [pytest.approx(0.75)]}
    assert training_balance(records, newest=1)["max_violation"] == [pytest.approx(0.5)]  # type: ignore[index]
    assert training_balance([]) is None


def test_the_most_particular_expert_of_each_domain() -> None:
    found = strongest(np.array([[1.0, 0.2], [1.0, 0.6]]), ["a", "b"])
    assert [(f["domain"], f["expert"]) for f in found] == [("a", 0), ("b", 1)]
    assert found[1]["ratio"] == pytest.approx(1.5)
    assert strongest(np.array([[1.0, 0.2]]), ["a"]) == []


def test_files_are_written_and_whole(copied_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    report.main([str(copied_run.folder), "--tokens", "50"])
    folder = copied_run.folder / "eval"
    assert sorted(path.name for path in folder.iterdir()) == [
        "domains.png",
        "load.png",
        "loss.png",
        "report.json",
        "report.md",
    ]
    saved = json.loads((folder / "report.json").read_text())
    assert saved["scores"]["model"]["domains"]["high"]["tokens"] == 72  # 50 in whole windows of 24
    text = (folder / "report.md").read_text()
    assert "![loss](loss.png)" in text and "NOT causal" in text
    printed = capsys.readouterr().out
    assert "Held-out bits per byte" in printed and "report.json" in printed


def test_a_failed_figure_leaves_no_file(copied_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ModuleNotFoundError("figures need matplotlib")

    monkeypatch.setattr(figures, "load_figure", fail)
    with pytest.raises(ModuleNotFoundError):
        report.write_report(copied_run, compute(copied_run, 50))
    assert not (copied_run.folder / "eval").exists()
    assert len(report.write_report(copied_run, compute(copied_run, 50), with_figures=False)) == 2


def test_values_that_json_lacks_are_written_in_words(computed: dict[str, Any]) -> None:
    from eval.scoreboard import finite

    cleaned = finite({"a": [math.nan, math.inf, 1.5], "b": "x"})
    assert cleaned == {"a": [None, "inf", 1.5], "b": "x"}
    changed = json.loads(json.dumps(computed))
    changed["scores"]["model"]["total"]["bits_per_byte"] = "inf"
    changed["routing"]["layers"][0]["load_entropy"] = None
    assert "| all bytes (total) | inf |" in markdown(changed, [])


def test_a_dense_run_has_scores_and_no_routing(dense_run: Run) -> None:
    dense = compute(dense_run, 50)
    assert dense["routing"] is None and dense["noncausal"] is None
    assert len(tables(dense)) == 1
    assert [path.name for path in report.write_report(dense_run, dense)] == ["loss.png", "report.json", "report.md"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "not a run folder"),
        (["RUN", "--tokens", "0"], "--tokens is 0; allowed are 1 and above"),
    ],
)
def test_errors_are_one_line(
    small_run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    arguments = [str(small_run.folder) if a == "RUN" else a for a in arguments]
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda: report.main(arguments))
    assert stopped.value.code == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1


def test_a_run_without_checkpoint_is_explained(copied_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied_run.checkpoints)
    with pytest.raises(SystemExit):
        run_command(lambda: report.main([str(copied_run.folder)]))
    assert "no checkpoint yet" in capsys.readouterr().err


def test_the_generate_command(small_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(small_run.folder), "--prompt", "abc", "--new-tokens", "9", "--seed", "3"]
    generate.main(arguments)
    first = capsys.readouterr().out
    assert first.startswith("abc")
    generate.main(arguments)
    assert capsys.readouterr().out == first
    generate.main([str(small_run.folder), "--new-tokens", "50"])
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "trained on 24" in captured.err
