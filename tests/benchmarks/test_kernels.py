"""The command `python -m benchmarks.kernels`: what it refuses, and what its tables hold."""

from __future__ import annotations

import json

import pytest

from benchmarks import kernels


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command: what it printed, as one line."""
    monkeypatch.setattr(kernels, "keep_freed_memory", lambda: None)  # for the rest of the tests' process

    def call(*flags):
        monkeypatch.setattr("sys.argv", ["kernels", *map(str, flags)])
        kernels.main()
        return " ".join(capsys.readouterr().out.split())

    return call


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--repeats", "0"), "--repeats 0: must be at least 1"),
        (("--threads", "-1"), "--threads -1: must be at least 1"),
        (("--json", "nowhere/at/all.json"), "there is no folder nowhere/at"),
        (("--json", "."), "is a folder"),
        (("--shapes", "4x16x16"), "must be four numbers"),
        (("--shapes", "4x16x16x8", "4x16x16x7"), "7 rows do not divide among 4 experts"),
        (("--model", "--json", "bounds.json"), "leave one out"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_measured(run, monkeypatch, flags, message):
    monkeypatch.setattr(kernels, "measure", lambda *arguments: pytest.fail("measured"))
    with pytest.raises(ValueError, match=message):
        run(*flags)


def test_widths_that_grouped_mm_does_not_take_have_no_figure_for_it(run, tmp_path):
    file = tmp_path / "times.json"
    shown = run("--shapes", "4x63x65x128", "4x64x64x128", "--repeats", "1", "--groups", "equal", "--json", file)
    odd, even = (
        [each for each in json.loads(file.read_text()) if each["width"] == width and each["precision"] == "bf16"]
        for width in (63, 64)
    )
    assert "grouped_mm alone" not in odd[0]["ratio"] and "gather and combine" in odd[0]["ratio"]
    assert "grouped_mm alone" in even[0]["ratio"]
    rows = [[cell.strip() for cell in row.split("│")] for row in shown.split("│ 4 ")[1:]]
    assert [row[11] for row in rows[:2]] == ["-", "-"] and "-" not in [row[11] for row in rows[2:]]


def test_columns_have_names_of_their_own(run):
    shown = run("--shapes", "4x16x16x8", "--repeats", "1", "--precisions", "fp32", "--groups", "equal")
    assert shown.count("experts") == 1


@pytest.mark.parametrize(
    ("times", "shown"),
    [
        ([0.004, 0.0052, 0.0061], "0.0052 (0.0040-0.0061)"),
        ([0.4, 0.52, 0.61], "0.52 (0.40-0.61)"),
        ([98.2, 101.0, 120.7], "101 (98-121)"),
    ],
)
def test_short_times_keep_their_digits(times, shown):
    assert kernels._spread(times) == shown


def test_the_model_takes_shapes(run):
    shown = run("--model", "--shapes", "8x512x1024x4096")
    assert "4,096 tokens, D 512, F 1024, 8 experts, 1 a token" in shown and "Qwen" not in shown
    assert "Qwen3-30B-A3B" in run("--model")
