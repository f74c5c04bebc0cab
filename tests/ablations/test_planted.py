"""Routers on planted mixtures: the ends of the scale, the table and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ablations import planted
from ablations.planted import OMITTED, ORACLE, PRESETS, Score
from data.planted import Kind, PlantedMixture
from eval.command import run_command
from moe.layer import MoELayer
from moe.routers.registry import ROUTERS
from moe.routing import Routing, RoutingContext


def scored(router: str, kind: Kind, steps: int, seed: int = 4) -> dict[str, Any]:
    """A trained layer's held-out measures."""
    mixture = PlantedMixture(planted.CLUSTERS, planted.VOCABULARY, planted.WIDTH, kind, seed)
    layer = planted.build_layer(router, seed)
    planted.train(layer, router, mixture, steps)
    error, measures = planted.heldout(layer, router, mixture)
    return {"error": error, **measures}


@pytest.mark.parametrize("kind", ["id", "context"])
def test_the_oracle_beats_a_learned_router_which_beats_a_dense_layer_which_beats_knowing_nothing(kind: Kind) -> None:
    oracle, learned, dense = (scored(router, kind, steps=80)["error"] for router in (ORACLE, "token_choice", "dense"))
    assert oracle + 0.2 < learned < dense - 0.05
    assert dense < 0.95  # the mean of the targets alone scores 1


def test_the_oracle_routes_each_token_to_its_cluster() -> None:
    mixture = PlantedMixture(planted.CLUSTERS, planted.VOCABULARY, planted.WIDTH, "context", seed=1)
    batch = mixture.sample(0, 3, 11)
    seen: list[Routing] = []
    context = RoutingContext(3, 11, mode="causal", observe=lambda _, routing: seen.append(routing))
    planted.forward(planted.build_layer(ORACLE, 0), ORACLE, batch, context)
    assert torch.equal(seen[0].assigned_TE().long().argmax(1), batch.cluster_BS.flatten())
    assert seen[0].assigned_TE().sum() == 33
    assert seen[0].weight_A is not None and bool((seen[0].weight_A == 1).all())


def test_the_oracle_has_full_marks_and_the_clusters_own_imbalance() -> None:
    found = scored(ORACLE, "id", steps=1)
    assert (found["adjusted_rand_index"], found["zero_expert_fraction"], found["experts_per_token"]) == (1, 0, 1)
    assert found["max_violation"] == pytest.approx(8 * 15 / 92 - 1, abs=0.1)  # the largest share is 15 / (8 + ... + 15)


@pytest.mark.parametrize("kind", ["id", "context"])
def test_a_hash_of_the_id_is_at_chance(kind: Kind) -> None:
    assert abs(scored("hash", kind, steps=1)["adjusted_rand_index"]) < 0.01


def test_every_router_starts_from_the_same_experts() -> None:
    first, second = planted.build_layer("token_choice", 3), planted.build_layer(ORACLE, 3)
    assert isinstance(first, MoELayer) and isinstance(second, MoELayer)
    assert torch.equal(first.experts.w13_E2FD, second.experts.w13_E2FD)
    other = planted.build_layer("token_choice", 4)
    assert isinstance(other, MoELayer)
    assert not torch.equal(first.experts.w13_E2FD, other.experts.w13_E2FD)


@pytest.mark.parametrize("router", [name for name in ROUTERS if name not in OMITTED])
def test_every_router_can_be_compared(router: str) -> None:
    """Two steps and a score: a new router needs its line in PRESETS, or none, or a reason in OMITTED."""
    found = scored(router, "context", steps=2)
    assert 0 < found["error"] < 100
    assert (found["adjusted_rand_index"] is None) == (router in ("soft", "dense"))


def test_presets_and_omissions_name_routers_that_exist() -> None:
    assert set(PRESETS) | set(OMITTED) <= set(ROUTERS)


def test_regret_is_counted_from_the_oracle_of_the_same_kind_and_seed() -> None:
    scores = planted.compare(["id", "context"], ["hash"], seeds=2, steps=2)
    assert [(s.kind, s.seed, s.router) for s in scores] == [
        (kind, seed, router) for kind in ("id", "context") for seed in (0, 1) for router in (ORACLE, "hash")
    ]
    for oracle, other in zip(scores[::2], scores[1::2], strict=True):
        assert oracle.regret == 0
        assert other.regret == other.error - oracle.error != 0
    assert len({score.error for score in scores}) == 8


def test_a_layer_that_diverges_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "LEARNING_RATE", 1e30)
    with pytest.raises(ValueError, match=r"oracle diverged \(id, seed 0\)"):
        planted.compare(["id"], ["hash"], seeds=1, steps=3)


def test_the_same_call_gives_the_same_scores() -> None:
    first, second = (planted.compare(["id"], ["noisy_top_k"], seeds=1, steps=3) for _ in range(2))
    assert [score.error for score in first] == [score.error for score in second]


def test_a_summary_has_mean_and_deviation_and_the_best_first() -> None:
    def score(router: str, seed: int, regret: float, index: float | None) -> Score:
        return Score("id", router, seed, regret + 0.1, regret, 2.0, index, 1.0, 0.0, 0.5)

    scores = [score("b", 0, 0.5, None), score("b", 1, 0.7, None), score("a", 0, 0.1, 0.2), score("a", 1, 0.3, 0.6)]
    entries = planted.summarise([*scores, Score("context", "c", 0, 1.0, 1.0, 2.0, 1.0, 1.0, 0.0, 0.5)], "id")
    assert [entry["router"] for entry in entries] == ["a", "b"]
    assert entries[0]["regret"] == pytest.approx([0.2, 0.2 / 2**0.5])
    assert entries[1]["adjusted_rand_index"] is None
    assert planted.cells(entries[0])[:4] == ["a", "0.20 ± 0.14", "0.30 ± 0.14", "0.40 ± 0.28"]
    assert planted.cells(entries[1])[3] == "-"
    assert planted.summarise(scores[:1], "id")[0]["regret"] == [0.5, None]


def test_the_command_writes_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    arguments = ["--routers", "token_choice", "dense", "dense", "--steps", "3", "--seeds", "1", "--output", str(folder)]
    planted.main(arguments)
    report = json.loads((folder / "planted.json").read_text())
    assert list(report["summary"]) == ["id", "context"]
    assert {score["router"] for score in report["scores"]} == {ORACLE, "token_choice", "dense"}
    assert len(report["scores"]) == 6
    assert report["configurations"]["token_choice"]["balance_coefficient"] == 0.01
    text = (folder / "planted.md").read_text()
    shown = capsys.readouterr().out
    for router in (ORACLE, "token_choice", "dense"):
        assert text.count(f"| {router} |") == 2
        assert router in shown
    assert sorted(path.name for path in folder.iterdir()) == ["planted.json", "planted.md"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--routers", "mixture_of_depths"], "error: --routers mixture_of_depths: left out, because it has one expert"),
        (["--routers", "top_choice"], "error: --routers top_choice: must be among expert_choice threshold"),
        (["--kinds", "word"], "error: --kinds word: must be among id context"),
        (["--steps", "0"], "error: --steps 0: must be at least 1"),
        (["--seeds", "0"], "error: --seeds 0: must be at least 1"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda: planted.main(arguments))
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
