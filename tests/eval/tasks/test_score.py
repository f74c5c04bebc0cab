"""The command: questions of files and of held-out text to a table and RUN/eval/tasks.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eval.score import compute, main, tasks_of_files
from eval.tasks.tables import accuracy_table, comparison_table, number, percent
from training.run import Run, RunError

LINES = [
    {
        "id": str(n),
        "context": "abc de",
        "continuations": [" abcde", " vw", " a b c"],
        "label": n % 3,
        "domain": "xy"[n % 2],
    }
    for n in range(7)
]


@pytest.fixture
def run(small_run: Run, tmp_path: Path) -> Run:
    """A copy, as its folder is written to."""
    return Run.open(shutil.copytree(small_run.folder, tmp_path / "small"))


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "letters.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_a_file_is_scored_written_and_printed(run: Run, requests: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    main([str(run.folder), "--requests", str(requests), "--nulls", "--limit", "6"])
    report = json.loads((run.folder / "eval" / "tasks.json").read_text())
    task = report["tasks"]["letters"]
    assert (report["step"], report["row_length"], report["limit"]) == (10, 24, 6)
    assert task["all"]["questions"] == 6 and set(task["domains"]) == {"x", "y"}
    # One context and one set of continuations: the same answer six times, right twice.
    assert task["correct"]["acc"].count(1) == 2
    assert task["all"]["acc"] == [pytest.approx(1 / 3), pytest.approx((4 / 3 / 5 / 6) ** 0.5)]
    assert task["all"]["less_chance"][0] == pytest.approx(0)
    bigram = task["compared"]["bigram"]["acc"]
    assert bigram["model_less_this"][0] == pytest.approx(task["all"]["acc"][0] - bigram["of_this"][0])
    printed = capsys.readouterr().out
    for text in ("all letters", "33.3 ± 21.1%", "scored by", "Only the first 6 questions of each task.", "tasks.json"):
        assert text in printed
    # Scored against itself, nothing differs.
    main([str(run.folder), "--requests", str(requests), "--limit", "6", "--against", str(run.folder)])
    again = json.loads((run.folder / "eval" / "tasks.json").read_text())["tasks"]["letters"]
    assert again["compared"]["small"]["acc"]["model_less_this"] == [0.0, 0.0]
    with pytest.raises(RunError, match="no score on the same questions of letters"):
        main([str(run.folder), "--requests", str(requests), "--against", str(run.folder)])


def test_the_built_in_tasks_and_another_tokenizers_terms(run: Run, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("eval.tasks.continuation.APART_BYTES", 0)
    monkeypatch.setattr("eval.score.continuation_questions", _short)
    tokenizer = str(run.corpus().folder / "tokenizer.json")
    main([str(run.folder), "--questions", "4", "--tokenizer", tokenizer, "--tokens", "100"])
    report = json.loads((run.folder / "eval" / "tasks.json").read_text())
    assert list(report["tasks"]) == ["continuation", "continuation-document"]
    assert report["tasks"]["continuation"]["source"]["made_from"] == run.corpus().sha256
    assert "Held-out perplexity in the terms of tokenizer.json" in capsys.readouterr().out


def _short(corpus, variant, questions, seed):  # type: ignore[no-untyped-def]
    from eval.tasks.continuation import continuation_questions

    return continuation_questions(corpus, variant, questions, seed, 30, 8)


def test_mistakes_are_explained(run: Run, requests: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--limit is 0; allowed are 1 and above"):
        main([str(run.folder), "--limit", "0"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letters.jsonl").write_text(requests.read_text())
    with pytest.raises(ValueError, match="two of the request files are called letters"):
        tasks_of_files([requests, tmp_path / "other" / "letters.jsonl"])
    with pytest.raises(ValueError, match="no such file"):
        main([str(run.folder), "--tokenizer", str(tmp_path / "missing.json")])


def test_what_was_cut_and_left_out_is_told(run: Run, tmp_path: Path) -> None:
    lines = [
        {"request": {"context": "a " * 200, "continuation": " b"}, "doc_id": 0, "idx": 0, "label": 0},
        {"request": {"context": "a", "continuation": " bcd" * 200}, "doc_id": 1, "idx": 0, "label": None},
        {"request": {"context": "", "continuation": " b"}, "doc_id": 1_000_000, "idx": 0, "label": 0},
    ]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = compute(run, tasks_of_files([path]))
    everything = report["tasks"]["long"]["all"]
    assert (everything["context_cut"], everything["in_pieces"], everything["acc"]) == (2, 1, None)
    table = accuracy_table(report)
    assert "2 of 2 continuations had their context cut on the left to the 24 tokens of training." in table.note
    assert "1 lines that repeat questions without context were left out." in table.note
    assert table.rows[0][2:8] == ("-",) * 6
    assert comparison_table(report) is None


def test_figures_as_text() -> None:
    assert percent((0.276, 0.0201)) == "27.6 ± 2.0%"
    assert percent((0.026, None), signed=True) == "+2.6%"
    assert percent(None) == "-"
    assert (number((2.5, 0.01)), number((float("inf"), None))) == ("2.5000 ± 0.0100", "inf")
