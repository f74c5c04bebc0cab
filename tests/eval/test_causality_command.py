"""The command: two verdicts, a table, JSON, and an exit status that a CI job can read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import causality_presets
from eval.causality import EXIT_NOT_CAUSAL, load, main
from eval.command import run_command
from moe.config import ConfigError
from moe.routers.registry import ROUTERS
from moe.routers.threshold import ThresholdRouter
from training.run import Run

CONFIG = """
[moe]
num_experts = 4
group_sequences = 2
[training]
sequence_length = 12
batch_sequences = 4
micro_batch_sequences = 4
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Expert choice over 24 tokens, without allow_leak."""
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


def status(*arguments: object) -> int:
    """The exit status as a shell sees it."""
    try:
        run_command(lambda: main([str(argument) for argument in arguments]))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_leaking_router_without_allow_leak_is_audited_and_fails(config_file: Path, capsys: Any) -> None:
    assert status(config_file, "--canary-steps", 0) == EXIT_NOT_CAUSAL == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == "training router (expert_choice): leaks; its losses are never a result"
    assert lines[-2] == "training with it is refused: it needs moe.allow_leak = true and lacks it"
    assert lines[-1] == "evaluation router: causal"


def test_with_allow_leak_it_passes_and_is_still_said_to_leak(config_file: Path, capsys: Any) -> None:
    assert status(config_file, "--moe.allow-leak", "--canary-steps", 0) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "training router (expert_choice): leaks; its losses are never a result"


def test_flags_override_the_file_and_findings_are_written(config_file: Path, tmp_path: Path, capsys: Any) -> None:
    found = tmp_path / "deep" / "found.json"
    flags = ["--moe.group", "position", "--json", found, "--canary-steps", 20]
    assert status(config_file, *flags) == 0
    out = capsys.readouterr().out
    assert "training router (expert_choice): batch-dependent" in out
    report = json.loads(found.read_text())
    assert report["training"] == {"measured": "batch-dependent", "declared": "batch-dependent"}
    assert report["evaluation"]["measured"] == "causal" and report["certified"]
    assert report["leak"] is None and report["not_measured"] == "not measured: untrained"
    assert report["canary"]["steps"] == 20 and not report["canary"]["proves_leak"]
    assert [audit["way"] for audit in report["audits"]][-1] == "evaluation"


def test_an_evaluation_router_that_sees_the_future_fails(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """H02: served by expert choice itself. Declared honestly it exits with 3, declared causal with an error."""
    training = torch.nn.Module.__call__  # the layers see a context whose mode is the training router's

    def served_by_choice(module: Any, *given: Any, **named: Any) -> Any:
        if type(module).__name__ == "MoELayer":
            given = (given[0], replace(given[1], mode="train_router"))
        return training(module, *given, **named)

    monkeypatch.setattr(torch.nn.Module, "__call__", served_by_choice)
    flags = ["--moe.allow-leak", "--canary-steps", 0]
    assert status(config_file, *flags) == 1
    captured = capsys.readouterr()
    assert "the registry is wrong: expert_choice declares its evaluation router causal" in captured.err
    assert "measured to be leaks" in captured.err and captured.out.splitlines()[-1].startswith(
        "evaluation router: leaks;"
    )
    monkeypatch.setitem(ROUTERS, "expert_choice", replace(ROUTERS["expert_choice"], evaluation=lambda moe: "leaks"))
    assert status(config_file, *flags) == EXIT_NOT_CAUSAL


def test_a_declared_leak_that_is_not_seen_is_said(config_file: Path, capsys: Any) -> None:
    flags = ["--moe.router", "token_choice", "--moe.drop-order", "score", "--moe.capacity-factor", "4"]
    assert status(config_file, *flags, "--moe.allow-leak", "--canary-steps", 0) == 0
    out = capsys.readouterr().out
    assert "training router (token_choice): causal; declared leaks, which 18 probes did not see" in out
    assert "moe.capacity_factor = 4.0 dropped nothing here: dropping was not tested" in out


def test_loading_remembers_whether_allow_leak_was_given(config_file: Path) -> None:
    config, given = load([str(config_file)])
    assert config.moe.allow_leak and not given
    assert load([str(config_file), "--moe.allow-leak"])[1]
    assert not load([str(config_file), "--moe.group", "position"])[0].moe.allow_leak
    with pytest.raises(ConfigError, match="group_sequences = 3 does not divide"):
        load([str(config_file), "--moe.group-sequences", "3"])


def test_a_run_is_measured_with_its_own_weights(small_run: Run, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    shutil.copytree(small_run.folder, folder)
    assert status(folder, "--canary-steps", 0, "--pairs", 3) == 0
    report = json.loads((folder / "eval" / "causality.json").read_text())
    assert report["training"]["measured"] == "leaks" and report["evaluation"]["measured"] == "causal"
    assert report["step"] == 10 and (report["rows"], report["length"]) == (4, 24)
    assert report["leak"]["bits_per_token"]["draws"] == 3 and report["canary"] is None
    causal, native = (report["gap"][f"{name}_bits_per_token"] for name in ("causal", "noncausal_training_router"))
    assert report["gap"]["bits_per_token"]["mean"] == pytest.approx(causal - native)
    out = capsys.readouterr().out
    assert f"leaks, {report['leak']['bits_per_token']['mean']:.4f} ± " in out and "A6 gap, not a leak" in out


def test_a_run_keeps_its_configuration(small_run: Run, dense_run: Run, tmp_path: Path, capsys: Any) -> None:
    assert status(small_run.folder, "--moe.group", "position") == 2
    assert "is a run, whose configuration is fixed: --moe.group position" in capsys.readouterr().err
    assert status(tmp_path) == 1
    assert "not a run folder (no config.toml)" in capsys.readouterr().err
    assert status(tmp_path / "none.toml") == 1
    dense = tmp_path / "dense"
    shutil.copytree(dense_run.folder, dense)
    assert status(dense) == 0
    assert "not measured: the model has no router" in capsys.readouterr().out


def test_a_cutoff_that_follows_the_batch_is_caught(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """H01: thresholds made from the batch in front of them make evaluation depend on the other rows."""
    folder = tmp_path / "run"
    shutil.copytree(small_run.folder, folder)
    decide = ThresholdRouter.decide

    def by_this_batch(self: Any, scores_TE: Any, *more: Any) -> Any:
        self.cutoff_E.copy_(scores_TE.median(0).values)
        return decide(self, scores_TE, *more)

    monkeypatch.setattr(ThresholdRouter, "decide", by_this_batch)
    assert status(folder, "--canary-steps", 0, "--pairs", 2) == 1
    assert "declares its evaluation router causal, and it was measured to be leaks" in capsys.readouterr().err


def test_the_table_of_all_routers_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    presets = [preset for preset in causality_presets.PRESETS if preset.router in ("hash", "threshold")]
    monkeypatch.setattr(causality_presets, "PRESETS", presets)
    assert status("--all") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| threshold", "| hash"]
    assert lines[2] == "| threshold |  | causal | causal | 0 of 12 | 0 of 6 |"


def test_wrong_usage_is_two(config_file: Path, capsys: Any) -> None:
    assert status() == status("--all", config_file) == status("--all", "--moe.group", "chunk") == 2
    assert status(config_file, "--canary-steps", 5) == 1
    assert "--canary-steps 5: must be at least 20" in capsys.readouterr().err
    assert status(config_file, "--moe.grupp", "chunk") == 2
