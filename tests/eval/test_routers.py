"""One checkpoint under every inference router it can have: the same text, paired differences, the reasons for gaps."""

from __future__ import annotations

import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eval import routers
from eval.command import run_command
from eval.inference_routers import compute, inference_routers, paired_difference
from eval.likelihood import Likelihood, evaluate
from moe.config import MoEConfig
from moe.routing import RoutingContext
from train import train
from training.job import Job
from training.run import Run

FIVE = ["as trained", "EMA threshold", "recalibrated", "predictor", "token choice"]


@pytest.fixture(scope="module")
def computed(small_run: Run) -> dict[str, Any]:
    return compute(small_run, 200, parity_rows=2, predictor_steps=30)


def trained(small_run: Run, folder: Path, **moe: Any) -> Run:
    """Two steps of another router on the same text."""
    config = replace(
        small_run.config,
        run=replace(small_run.config.run, name="other", folder=str(folder)),
        moe=MoEConfig(**{"num_experts": 4, "expert_width": 8, "group_sequences": 2, "allow_leak": True, **moe}),
        training=replace(small_run.config.training, steps=2),
    )
    assert train(config, Job(), Console(file=io.StringIO())) == 0
    return Run.open(folder / "other")


@pytest.mark.parametrize(
    ("moe", "rows", "left_out"),
    [
        ({"router": "expert_choice"}, FIVE, []),
        ({"router": "expert_choice", "group": "position"}, FIVE, []),
        ({"router": "expert_choice", "threshold_after": 0}, [*FIVE[1:3], FIVE[4]], ["as trained", "predictor"]),
        ({"router": "expert_choice", "threshold_after": 0, "predictor_coefficient": 0.1}, FIVE[1:], ["as trained"]),
        ({"router": "mixture_of_depths", "num_experts": 1, "experts_per_token": 1}, FIVE[:4], ["token choice"]),
        ({"router": "threshold"}, FIVE[1:3], ["as trained", *FIVE[3:]]),
        ({"router": "token_choice"}, ["as served"], FIVE),
        ({"router": "token_choice", "capacity_factor": 1.0}, ["as trained", "as served"], FIVE[1:]),
        ({"router": "remoe"}, ["as served"], FIVE),
        ({"router": "soft"}, ["as trained", "as served"], FIVE[1:]),
    ],
)
def test_rows_are_those_that_the_router_has_and_the_others_have_a_reason(
    moe: dict[str, Any], rows: list[str], left_out: list[str]
) -> None:
    found, reasons = inference_routers(MoEConfig(**moe))
    assert found == rows
    assert list(reasons) == left_out and all(reasons.values())


def test_one_checkpoint_has_five_rows(computed: dict[str, Any]) -> None:
    assert list(computed["rows"]) == FIVE
    assert computed["left_out"] == {}
    assert computed["step"] == 10 and computed["baseline"] == "EMA threshold"
    assert computed["calibration_tokens"] == computed["calibration_windows"] * 23


def test_causal_rows_score_the_same_text_which_is_that_of_a_report(small_run: Run, computed: dict[str, Any]) -> None:
    rows = computed["rows"]
    assert {rows[name]["tokens"] for name in FIVE[1:]} == {432}
    assert {rows[name]["windows"] for name in FIVE[1:]} == {18}
    report = evaluate(small_run.model("cpu"), small_run.corpus(), small_run.config, 200)
    assert rows["EMA threshold"]["bits_per_byte"] == pytest.approx(report.bits_per_byte, rel=1e-6)
    for domain, likelihood in report.domains.items():
        found = rows["EMA threshold"]["domains"][domain]
        assert found["bits_per_byte"] == pytest.approx(likelihood.bits_per_byte, rel=1e-6)
        assert found["tokens"] == likelihood.tokens


def test_as_trained_is_the_training_router_and_says_that_it_is_no_result(
    small_run: Run, computed: dict[str, Any]
) -> None:
    row = computed["rows"]["as trained"]
    assert row["verdict"] == "leaks" and "never a result" in row["warning"]
    expected = evaluate(small_run.model("cpu"), small_run.corpus(), small_run.config, 200, mode="train_router")
    assert row["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-6)
    assert row["experts_per_token"] == 2  # expert choice: exactly
    assert row["max_violation"] == 0
    assert row["parity"] == {
        "possible": False,
        "reason": "a token competes with later ones, which are not generated yet",
    }
    assert all(computed["rows"][name]["verdict"] == "causal" for name in FIVE[1:])


def test_each_way_of_routing_is_the_one_its_row_names(small_run: Run, computed: dict[str, Any]) -> None:
    rows = computed["rows"]
    assert rows["token choice"]["experts_per_token"] == 2
    assert rows["token choice"]["zero_expert_fraction"] == 0
    assert rows["recalibrated"]["experts_per_token"] == pytest.approx(2, rel=0.1)
    assert len({rows[name]["bits_per_byte"] for name in FIVE}) == 5
    for row in rows.values():
        assert [layer["layer"] for layer in row["layers"]] == [0, 1]
        for key in ("experts_per_token", "zero_expert_fraction", "max_violation"):
            assert row[key] == pytest.approx(sum(layer[key] for layer in row["layers"]) / 2)


def test_generation_agrees_under_every_causal_row(computed: dict[str, Any]) -> None:
    for name in FIVE[1:]:
        parity = computed["rows"][name]["parity"]
        assert parity["holds"] and parity["windows"] == 2
        assert parity["routes"] == 4 * 2 * 2 * 24 * 4  # ways, layers, rows, positions, experts
        assert parity["ways"][0]["way"] == "token by token"


def test_differences_are_paired_with_the_baseline(computed: dict[str, Any]) -> None:
    rows = computed["rows"]
    base = rows["EMA threshold"]
    assert base["difference"] is None
    for name in ("recalibrated", "predictor", "token choice"):
        difference = rows[name]["difference"]
        assert difference["windows"] == 18
        for unit in ("bits_per_byte", "nats_per_token"):
            assert difference[unit] == pytest.approx(rows[name][unit] - base[unit])
            assert difference[f"{unit}_standard_error"] > 0


def test_a_paired_difference_by_hand() -> None:
    row = {"0": Likelihood(9.0, 3, 2), "1": Likelihood(2.0, 1, 2), "2": Likelihood(7.0, 2, 0)}
    base = {"0": Likelihood(6.0, 3, 2), "1": Likelihood(3.0, 1, 2), "7": Likelihood(5.0, 2, 0)}
    found = paired_difference(row, base)
    assert found["windows"] == 2  # only what both have
    assert found["nats_per_token"] == pytest.approx((3 - 1) / 4)
    # Residuals 3 - 3/2 and -1 - 1/2 over 4 tokens.
    assert found["nats_per_token_standard_error"] == pytest.approx(math.sqrt(2 * (1.5**2 + 1.5**2)) / 4)
    assert found["bits_per_byte"] == pytest.approx(2 / 4 / math.log(2))


def test_a_difference_of_one_window_has_no_error_and_one_without_text_no_bits() -> None:
    found = paired_difference({"0": Likelihood(3.0, 2, 0)}, {"0": Likelihood(2.0, 2, 0)})
    assert found["nats_per_token"] == pytest.approx(0.5)
    assert found["nats_per_token_standard_error"] is None
    assert found["bits_per_byte"] is None


def test_the_fitted_predictor_is_declared_with_its_accuracy_beside_the_base_rate(computed: dict[str, Any]) -> None:
    predictor = computed["predictor"]
    assert predictor["fitted_here"]
    assert predictor["steps"] == 30 and predictor["training_tokens"] == 30 * 4 * 24  # the run's batch is all it has
    assert predictor["base_rate"] == pytest.approx(0.5)  # 2 of 4 experts
    assert predictor["accuracy"] > 0.5
    (note,) = [note for note in routers.notes(computed) if note.startswith("predictor")]
    assert "fitted here, as the run trained none" in note and "one answer for all would be right for 50.0%" in note


def test_a_predictor_that_was_trained_with_the_run_is_used(small_run: Run, tmp_path: Path) -> None:
    run = trained(small_run, tmp_path, router="expert_choice", predictor_coefficient=0.1)
    report = compute(run, 100, parity_rows=1, predictor_steps=0)
    assert report["predictor"]["fitted_here"] is False
    assert report["predictor"]["accuracy"] is not None
    assert "the checkpoint's own" in " ".join(routers.notes(report))
    model = run.model("cpu")
    for layer in model.moe_layers():
        layer.router.inference = "predictor"  # type: ignore[assignment]
    expected = evaluate(model, run.corpus(), run.config, 100)
    assert report["rows"]["predictor"]["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-6)


def test_the_checkpoint_s_model_is_as_before(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_run.model("cpu")
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    monkeypatch.setattr(Run, "model", lambda self, **options: model)
    compute(small_run, 50, parity_rows=1, predictor_steps=1)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert all(layer.router.inference == "threshold" for layer in model.moe_layers())
    assert model.compute_dtype == torch.float32


def test_nothing_is_counted_as_training(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = set()

    def remember(self: RoutingContext, *arguments: Any, init: Any = RoutingContext.__init__, **options: Any) -> None:
        init(self, *arguments, **options)
        modes.add(self.mode)

    monkeypatch.setattr(RoutingContext, "__init__", remember)
    compute(small_run, 50, parity_rows=1, predictor_steps=1)
    assert modes == {"causal", "train_router"}


@pytest.mark.parametrize(
    ("moe", "rows", "notes"),
    [
        (
            {"router": "token_choice", "capacity_factor": 1.0},
            ["as trained", "as served"],
            ["EMA threshold, recalibrated: token_choice tracks no cutoffs", "predictor, token choice: token_choice is"],
        ),
        ({"router": "threshold"}, ["EMA threshold", "recalibrated"], ["as trained: it routes in training as in"]),
        ({"router": "soft"}, ["as trained", "as served"], ["EMA threshold, recalibrated: soft tracks no cutoffs"]),
        (
            {"router": "mixture_of_depths", "num_experts": 1, "experts_per_token": 1, "depth_capacity": 0.25},
            FIVE[:4],
            ["token choice: every token would choose"],
        ),
    ],
)
def test_a_run_of_another_router_has_fewer_rows(
    small_run: Run, tmp_path: Path, moe: dict[str, Any], rows: list[str], notes: list[str]
) -> None:
    report = compute(trained(small_run, tmp_path, **moe), 50, parity_rows=1, predictor_steps=2)
    assert list(report["rows"]) == rows
    assert [row[0] for row in routers.table(report).rows] == rows
    left_out = [note for note in routers.notes(report) if note.startswith("Left out")]
    for part in notes:
        assert any(part in note for note in left_out)
    json.dumps(report, allow_nan=False)
    assert report["rows"][report["baseline"]]["parity"]["holds"]


def test_an_expert_that_nobody_meets_leaves_no_nan(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_run.model("cpu")
    for layer in model.moe_layers():
        layer.router.cutoff_E.fill_(2.0)  # type: ignore[operator]
    monkeypatch.setattr(Run, "model", lambda self, **options: model)
    report = compute(small_run, 50, parity_rows=1, predictor_steps=1)
    row = report["rows"]["EMA threshold"]
    assert row["experts_per_token"] == 0 and row["zero_expert_fraction"] == 1 and row["max_violation"] is None
    json.dumps(report, allow_nan=False)


def test_too_few_windows_for_a_routing_group_leave_as_trained_out(small_run: Run, tmp_path: Path) -> None:
    run = trained(small_run, tmp_path, router="expert_choice", group_sequences=4)
    report = compute(run, 24, parity_rows=1, predictor_steps=1)
    assert list(report["rows"]) == FIVE[1:]
    assert report["left_out"] == {"as trained": "too few whole held-out windows to fill a routing group"}
    assert report["predictor"]["accuracy"] is None


def test_the_command_prints_the_table_and_writes_whole_files(
    small_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.open(shutil.copytree(small_run.folder, tmp_path / "copied"))
    routers.main([str(run.folder), "--tokens", "50", "--rows", "1", "--predictor-steps", "2"])
    assert sorted(path.name for path in (run.folder / "eval").iterdir()) == ["routers.json", "routers.md"]
    saved = json.loads((run.folder / "eval" / "routers.json").read_text())
    assert list(saved["rows"]) == FIVE
    text = (run.folder / "eval" / "routers.md").read_text()
    assert "| as trained | NOT causal: never a result |" in text
    printed = capsys.readouterr().out
    assert all(name in printed for name in FIVE) and "routers.json" in printed
    value = f"{saved['rows']['EMA threshold']['bits_per_byte']:.4f}"
    assert value in printed and value in text


def test_failed_parity_is_said_aloud() -> None:
    parity = {"possible": True, "holds": False, "max_logit_difference": 0.5, "routes_different": 12}
    assert routers._parity(parity | {"routes_explained": False}) == "FAILS: logits 5e-01, routes 12 NOT at cutoff"
    assert routers._parity(parity | {"holds": True, "routes_explained": True}).endswith("routes 12 at cutoff")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "not a run folder"),
        (["DENSE"], "is a dense run, there is no router to compare"),
        (["RUN", "--tokens", "0"], "--tokens is 0; allowed are 1 and above"),
        (["RUN", "--rows", "0"], "--rows is 0; allowed are 1 and above"),
    ],
)
def test_errors_are_one_line(
    small_run: Run, dense_run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    folders = {"RUN": str(small_run.folder), "DENSE": str(dense_run.folder)}
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda: routers.main([folders.get(a, a) for a in arguments]))
    assert stopped.value.code == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1
