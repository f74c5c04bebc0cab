"""Routing is counted once, by row and by domain, and padding nowhere."""

from __future__ import annotations

import pytest
import torch

from eval.likelihood import evaluate_windows
from eval.routing_recorder import RoutingRecorder
from tests.eval.small_models import ROUTERS, random_text, small_model, window
from tests.moe.helpers import routing_from_mask


def test_counts_by_row_and_domain_worked_out_by_hand() -> None:
    model = small_model("threshold", num_experts=3)
    recorder = RoutingRecorder(model, ["a", "b"])
    # Two rows of three tokens; the last token is padding.
    mask_TE = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.bool)
    scores_TE = torch.full((6, 3), 2.0)  # no cutoff is anywhere near
    valid_T = torch.tensor([True] * 5 + [False])
    routing = routing_from_mask(mask_TE, scores_TE, scores_TE, valid_T=valid_T)
    recorder.start(["b", "a"])
    recorder(1, routing)
    assert recorder.counts_by_domain(1).tolist() == [[0, 1, 0], [2, 1, 1]]
    assert recorder.tokens_by_domain(1).tolist() == [2, 3]
    assert recorder.zero_expert_by_domain(1).tolist() == [1, 1]
    assert recorder.layers[1].fan_out.tolist() == [2, 2, 0, 1]
    counts_RE, domain_R = recorder.rows(1)
    assert counts_RE.tolist() == [[2, 1, 1], [0, 1, 0]]
    assert domain_R.tolist() == [1, 0]
    assert recorder.layers[1].near == 0


def test_decisions_at_a_cutoff_are_counted() -> None:
    model = small_model("threshold", num_experts=3)
    layer = model.moe_layers()[0]
    scores_TE = layer.router.cutoff_E + torch.tensor([[1e-6, 0.1, -1e-6], [1e-6, 1e-6, 1e-6]])
    valid_T = torch.tensor([True, False])
    routing = routing_from_mask(scores_TE > layer.router.cutoff_E, scores_TE, scores_TE, valid_T=valid_T)
    recorder = RoutingRecorder(model, ["a"])
    recorder.start(["a"])
    recorder(layer.index, routing)
    assert recorder.layers[layer.index].near == 2


def test_token_choice_decides_between_its_kth_and_next_score() -> None:
    layer = small_model("token_choice", num_experts=4).moe_layers()[0]
    scores_TE = torch.tensor([[0.5, 0.3, 0.2, 0.0]])
    routing = routing_from_mask(scores_TE > 0.25, scores_TE, scores_TE)
    assert layer.router.decision_distance(routing)[0].tolist() == pytest.approx([0.25, 0.05, 0.05, 0.25])
    all_experts = small_model("token_choice", num_experts=2).moe_layers()[0]
    scores_TE = scores_TE[:, :2]
    routing = routing_from_mask(scores_TE > 0, scores_TE, scores_TE)
    assert all_experts.router.decision_distance(routing).isinf().all()


@pytest.mark.parametrize("router", ROUTERS)
def test_recording_an_evaluation(router: str) -> None:
    model = small_model(router)
    recorder = RoutingRecorder(model, ["a", "b", "unused"])
    batches = [window("a", list(random_text(3, 9)), 8), window("b", [random_text(1, 4)[0], torch.zeros(1).long()], 8)]
    scores = evaluate_windows(model, batches, list(range(37)), recorder=recorder)
    assert list(recorder.layers) == ([] if router == "dense" else [0, 1, 2])
    for index in recorder.layers:
        assert recorder.tokens_by_domain(index).tolist() == [24, 3, 0]
        assert recorder.layers[index].fan_out.sum() == scores.total.tokens
        counts_RE, _ = recorder.rows(index)
        assert len(counts_RE) == 4  # the row of padding is left out
        assert counts_RE.sum() == recorder.counts_by_domain(index).sum()
        if router == "token_choice":
            assert counts_RE.sum() == 2 * 27


def test_mistakes_are_explained() -> None:
    recorder = RoutingRecorder(small_model(), ["a"])
    with pytest.raises(ValueError, match="unknown domain 'b'"):
        recorder.start(["b"])
    scores_TE = torch.rand(6, 6)
    routing = routing_from_mask(scores_TE > 0.5, scores_TE, scores_TE)
    with pytest.raises(ValueError, match="call start"):
        recorder(0, routing)
    recorder.start(["a"] * 4)
    with pytest.raises(ValueError, match="6 tokens were routed but start.. named 4 rows"):
        recorder(0, routing)
