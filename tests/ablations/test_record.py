"""RESULTS.md: a rerun replaces exactly its own section."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ablations.record import RESULTS, markers, record, replace_section
from ablations.slurm import sbatch_script
from ablations.spec import Ablation
from ablations.summary import summarise
from moe.config import ConfigError
from tests.ablations.conftest import made_up


def summary(ablation: Ablation, missing: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    runs = {arm.name: {0: made_up(2.0), 1: made_up(2.1)} for arm in ablation.arms}
    return summarise(dataclasses.replace(ablation, **changes), runs, missing, "python -m ablations.run question.toml")


def test_a_new_section_is_appended_and_an_old_one_replaced_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "R.md"
    replace_section(path, "one", "first\n")
    replace_section(path, "two", "second")
    path.write_text(path.read_text() + "\nby hand\n")
    before = path.read_text()
    replace_section(path, "one", "third")
    assert path.read_text() == before.replace("first", "third")
    assert path.read_text().index("third") < path.read_text().index("second") < path.read_text().index("by hand")


def test_a_name_that_begins_another_has_its_own_section(tmp_path: Path) -> None:
    path = tmp_path / "R.md"
    replace_section(path, "leak-long", "a")
    replace_section(path, "leak", "b")
    assert path.read_text().count("begin -->") == 2


@pytest.mark.parametrize("lines", [["begin"], ["end"], ["end", "begin"], ["begin", "begin", "end"]])
def test_damaged_markers_are_an_error_and_nothing_is_written(tmp_path: Path, lines: list[str]) -> None:
    path = tmp_path / "R.md"
    of = dict(zip(("begin", "end"), markers("one"), strict=True))
    path.write_text("\n".join(of[line] for line in lines))
    before = path.read_text()
    with pytest.raises(ValueError, match="once each"):
        replace_section(path, "one", "new")
    assert path.read_text() == before


def test_the_section_has_command_commit_date_and_cost(two_arms: Ablation, tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    files = record(summary(two_arms), b"png", path)
    assert files == [path, tmp_path / "figures" / "question.png"] and files[1].read_bytes() == b"png"
    text = path.read_text()
    assert "`python -m ablations.run question.toml`" in text and "Commit abc; run 2030-01-02" in text
    assert "1.0 CPU minutes in all" in text and "](figures/question.png)" in text


def test_smoke_runs_and_incomplete_ones_are_not_recorded(two_arms: Ablation, tmp_path: Path) -> None:
    for kept_out in (summary(two_arms, quick=True), summary(two_arms, missing=("none, seed 1: failed",))):
        with pytest.raises(ConfigError):
            record(kept_out, b"png", tmp_path / "RESULTS.md")
    assert not list(tmp_path.glob("**/*.md"))


def test_the_sections_of_the_file_that_is_shipped_are_whole_and_no_smoke_runs() -> None:
    text = RESULTS.read_text(encoding="utf-8")
    assert text.count(": begin -->") == text.count(": end -->")
    assert "SMOKE" not in text


def test_the_slurm_script_is_one_task_a_run() -> None:
    lines = sbatch_script("leak", 40, ["ablations/leak.toml", "--output", "my runs"], threads=2).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "#SBATCH --array=0-39" in lines and "#SBATCH --cpus-per-task=2" in lines
    assert any(line.startswith("#   python -m ablations.run") and line.endswith("--collect") for line in lines)
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(options) < lines.index("set -euo pipefail")  # sbatch reads no option after the first command
    assert lines[-1] == (
        "srun python -m ablations.run ablations/leak.toml --output 'my runs' "
        '--threads "$SLURM_CPUS_PER_TASK" --job "$SLURM_ARRAY_TASK_ID"'
    )
