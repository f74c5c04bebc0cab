"""A tape is what the model did on the held-out text, no more and no less."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from eval.analysis import identity, specialisation, tape
from eval.analysis.counting import Assignments, label_counts
from eval.likelihood import evaluate
from eval.routing_recorder import RoutingRecorder
from moe.config import MoEConfig
from moe.initialization import build_model
from training.run import Run


@pytest.fixture(scope="module")
def recorded(small_run: Run) -> tape.Tape:
    return tape.record(small_run.model("cpu"), small_run.corpus(), small_run.config, 200)


def test_losses_and_routes_are_those_of_the_evaluation(small_run: Run, recorded: tape.Tape) -> None:
    model, corpus = small_run.model("cpu"), small_run.corpus()
    recorder = RoutingRecorder(model, corpus.domains)
    scores = evaluate(model, corpus, small_run.config, 200, recorder=recorder)
    assert recorded.num_tokens == scores.total.tokens
    assert recorded.loss_T.astype(np.float64).sum() == pytest.approx(scores.total.nats, rel=1e-5)
    for layer in recorded.layers:
        counts_ME, _ = label_counts(recorded.domain_T, Assignments.of(layer.assigned_TE), 2)
        np.testing.assert_array_equal(counts_ME, recorder.counts_by_domain(layer.layer))
        assert len(layer.weight_A) == layer.assigned_TE.sum()
        weight_TE = np.zeros(layer.assigned_TE.shape, np.float32)
        weight_TE[layer.assigned_TE] = layer.weight_A
        np.testing.assert_array_equal(tape.top(layer.assigned_TE, weight_TE), layer.top_T)


def test_each_token_knows_its_text(small_run: Run, recorded: tape.Tape) -> None:
    corpus = small_run.corpus()
    start_M = corpus.document_starts("heldout", "low")
    low = recorded.domain_T == corpus.domains.index("low")
    assert np.unique(recorded.row_T[low]).size == 9  # windows of 24
    # Walk the first window by hand.
    first = recorded.row_T == 0
    token_S = corpus.tokens("heldout", "low")[:24]
    np.testing.assert_array_equal(recorded.token_T[first], token_S)
    np.testing.assert_array_equal(recorded.label_T[first], corpus.tokens("heldout", "low")[1:25])
    np.testing.assert_array_equal(recorded.document_T[first], np.searchsorted(start_M, np.arange(24), "right") - 1)
    assert recorded.position_T[first][0] == 0
    # Domains do not share documents or windows.
    assert not set(recorded.row_T[low]) & set(recorded.row_T[~low])
    assert not set(recorded.document_T[low]) & set(recorded.document_T[~low])


def test_positions_restart_at_a_document_where_attention_does() -> None:
    token_BS = np.array([[5, 0, 7, 7, 0], [0, 1, 2, 3, 4]])
    assert tape._positions(token_BS, 0, True).tolist() == [[0, 0, 1, 2, 0], [0, 1, 2, 3, 4]]
    assert tape._positions(token_BS, 0, False).tolist() == [[0, 1, 2, 3, 4]] * 2


def test_memory_is_foretold(recorded: tape.Tape) -> None:
    experts_per_token = np.mean([len(layer.weight_A) / recorded.num_tokens for layer in recorded.layers])
    foretold = tape.planned_bytes(recorded.num_tokens, len(recorded.layers), 4, float(experts_per_token))
    assert recorded.nbytes == foretold


def test_the_first_expert_has_the_largest_weight_and_ties_go_to_the_first() -> None:
    assigned_TE = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]], dtype=bool)
    weight_TE = np.array([[0.5, 0.5, 0.9], [0.9, 0.1, 0.4], [0, 0, 0]])
    assert tape.top(assigned_TE, weight_TE).tolist() == [0, 2, -1]


def test_a_hash_router_is_all_identity_and_a_dense_model_has_no_layer(small_run: Run) -> None:
    config, corpus = small_run.config, small_run.corpus()
    moe = MoEConfig(router="hash", num_experts=4, experts_per_token=2, expert_width=8)
    hashed = tape.record(build_model(config.model, moe, 0), corpus, replace(config, moe=moe), 1500)
    for layer in hashed.layers:
        assert identity.decisions(hashed, layer).value == pytest.approx(1)
        assert identity.first(hashed, layer).value == pytest.approx(1)
        found = identity.table_accuracy(hashed.token_T, layer.top_T, 4, hashed.row_T)
        assert found.accuracy == 1
        assert specialisation.vocabulary(hashed, layer, "input id").value == 1
    dense = MoEConfig(router="dense")
    assert tape.record(build_model(config.model, dense, 0), corpus, replace(config, moe=dense), 50).layers == ()


def test_units_are_documents_where_there_are_enough(recorded: tape.Tape) -> None:
    unit_T, name = specialisation.units(recorded)
    few = replace(recorded, document_T=np.zeros_like(recorded.document_T))
    assert specialisation.units(few)[1] == "rows"
    assert name in ("rows", "documents") and len(unit_T) == recorded.num_tokens
    many = replace(recorded, document_T=recorded.row_T)
    assert specialisation.units(many)[1] == "documents"


def test_an_untrained_measure_of_nothing_is_not_a_number(recorded: tape.Tape) -> None:
    layer = recorded.layers[0]
    empty = replace(layer, packed_TB=np.zeros_like(layer.packed_TB), top_T=np.full_like(layer.top_T, -1))
    assert math.isnan(specialisation.domain(recorded, empty).value)
