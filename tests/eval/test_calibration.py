"""Exact cutoffs on text that is not scored, predictors of the training router's choice, and everything put back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.batches import HeldoutBatch, heldout_windows
from eval.calibration import (
    GuessCounter,
    exact_cutoffs,
    fit_predictors,
    own_predictors,
    preserved,
    recalibrate,
    serve,
    split_heldout,
    watched,
)
from moe.model import Transformer
from moe.routers.expert_choice import ExpertChoiceRouter
from moe.routers.predictor import Predictor
from moe.routing import Routing, RoutingContext
from tests.eval.small_models import VOCABULARY, random_text, small_model, window

MARKER = 0


def corpus_of(**tokens: int) -> Any:
    """A corpus whose held-out ids are all different, so that a token can be told from every other."""
    starts = np.cumsum([1, *tokens.values()])
    ids = {name: np.arange(start, start + count) for (name, count), start in zip(tokens.items(), starts, strict=False)}
    return SimpleNamespace(
        folder=Path("corpus"),
        domains=list(tokens),
        tokens=lambda split, domain: ids[domain] if split == "heldout" else None,
        tokenizer=SimpleNamespace(end_of_text=MARKER),
    )


def ids_in(*parts: Tensor) -> set[int]:
    return set(torch.cat([part.flatten() for part in parts]).tolist()) - {MARKER, -100}


@pytest.mark.parametrize("tokens", [None, 12, 23])
def test_no_token_is_both_scored_and_calibrated_on(tokens: int | None) -> None:
    split = split_heldout(corpus_of(long=83, short=17), 5, tokens)
    scored = ids_in(*(part for row in split.scored for part in (row.token_BS, row.label_BS)))
    calibration = ids_in(*(row.token_BS for row in split.calibration))
    assert scored and calibration and not scored & calibration
    for part in split:
        assert {row.domain for row in part} == {"long", "short"}


def test_windows_are_dealt_in_turn_and_calibration_goes_without_the_first_token() -> None:
    split = split_heldout(corpus_of(text=18), 4, None)  # windows 1-4, 5-8, 9-12, 13-16, 17-18
    assert [row.token_BS.tolist() for row in split.scored] == [[[1, 2, 3, 4]], [[9, 10, 11, 12]], [[17, 18, 0, 0]]]
    assert [row.token_BS.tolist() for row in split.calibration] == [[[6, 7, 8]], [[14, 15, 16]]]


def test_the_scored_windows_are_those_of_a_report_where_there_is_text_enough() -> None:
    corpus = corpus_of(long=97, other=61)
    reported = [row.token_BS.tolist() for row in heldout_windows(corpus, 5, 1, 13)]
    assert [row.token_BS.tolist() for row in split_heldout(corpus, 5, 13).scored] == reported


def test_a_single_window_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="no domain has a second one to calibrate with"):
        split_heldout(corpus_of(one=5, two=4), 5, None)


def test_a_cutoff_is_the_score_that_its_share_of_the_tokens_reaches() -> None:
    scores_NE = torch.tensor([[0.1, 0.8], [0.9, 0.6], [0.5, 0.7], [0.3, 0.9], [0.7, 0.5]])
    assert exact_cutoffs(scores_NE, 0.4).tolist() == pytest.approx([0.7, 0.8])
    assert exact_cutoffs(scores_NE, 1.0).tolist() == pytest.approx([0.1, 0.5])


def test_tokens_that_tie_with_the_cutoff_all_pass() -> None:
    scores_NE = torch.tensor([[0.5], [0.2], [0.5], [0.5], [0.1]])
    cutoff_E = exact_cutoffs(scores_NE, 0.2)
    assert (scores_NE >= cutoff_E).sum() == 3  # one was asked for


def test_too_few_tokens_for_the_share_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 calibration tokens are too few for experts that take 12.50%"):
        exact_cutoffs(torch.rand(3, 2), 0.125)


def padded_rows() -> list[HeldoutBatch]:
    """Five rows of 9 positions, 39 valid tokens together; padding holds an id that would count if it could."""
    documents = [random_text(1, length + 1, seed=row)[0] for row, length in enumerate((9, 9, 8, 9, 4))]
    for row, document in enumerate(documents):
        document[0] = row + 1  # equal beginnings would tie
    batches = [window("a", [document], 9) for document in documents]
    return [row._replace(token_BS=torch.where(row.valid_BS, row.token_BS, VOCABULARY - 1)) for row in batches]


def loads(model: Transformer, rows: list[HeldoutBatch]) -> dict[int, list[int]]:
    """Valid tokens of each expert, by layer."""
    counts: dict[int, Tensor] = {}

    def observe(layer: int, routing: Routing) -> None:
        counts[layer] = counts.get(layer, 0) + routing.counts_E()

    with torch.no_grad():
        for row in rows:
            model(row.token_BS, RoutingContext(1, row.token_BS.shape[1], row.valid_BS, observe=observe))
    return {layer: count_E.tolist() for layer, count_E in counts.items()}


@pytest.mark.parametrize("router", ["expert_choice", "threshold"])
def test_after_recalibration_every_expert_of_every_layer_takes_its_share_of_the_calibration_tokens(router: str) -> None:
    """Also in the last layer, whose inputs moved when the earlier layers' cutoffs did."""
    model, rows = small_model(router), padded_rows()
    fair = {layer: [13] * 6 for layer in range(3)}  # 39 tokens, 2 of 6 experts each
    assert loads(model, rows) != fair
    assert recalibrate(model, rows, batch_rows=1) == 39
    assert loads(model, rows) == fair


def test_recalibration_serves_by_threshold_whatever_was_served_before() -> None:
    model = small_model("expert_choice")
    serve(model, "token_choice")
    recalibrate(model, padded_rows(), batch_rows=1)
    assert loads(model, padded_rows()) == {layer: [13] * 6 for layer in range(3)}


def test_everything_is_put_back_also_after_an_error() -> None:
    model = small_model("expert_choice")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def change_and_fail() -> None:
        with preserved(model):
            recalibrate(model, padded_rows())
            predictors = fit_predictors(model, lambda step: random_text(2, 9), 1)
            serve(model, "predictor", predictors)
            assert own_predictors(model) == predictors
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        change_and_fail()
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    for layer in model.moe_layers():
        assert isinstance(layer.router, ExpertChoiceRouter)
        assert layer.router.inference == "threshold" and layer.router.predictor is None


def counted(model: Transformer, predictors: dict[int, Predictor], token_BS: Tensor) -> GuessCounter:
    counter = GuessCounter(predictors)
    with torch.no_grad(), watched(model, counter):
        model(token_BS, RoutingContext(*token_BS.shape, mode="train_router"))
    return counter


def test_a_fitted_predictor_finds_a_choice_that_is_linear_in_the_inputs() -> None:
    """By sigmoid scores of one group, an expert takes exactly the tokens on one side of a hyperplane."""
    model, token_BS = small_model("expert_choice", score="sigmoid", group_sequences=6), random_text(6, 12)
    before = counted(model, fit_predictors(model, lambda step: token_BS, 0), token_BS)
    assert before.base_rate == pytest.approx(2 / 3)  # 2 of 6 experts, and expert choice is exact
    assert before.accuracy == before.base_rate  # unfitted, it never takes
    after = counted(model, fit_predictors(model, lambda step: token_BS, 300), token_BS)
    assert after.accuracy > 0.97


def test_the_target_is_the_training_router_s_choice_and_not_that_of_the_cutoffs() -> None:
    model, token_BS = small_model("expert_choice", score="sigmoid", group_sequences=6), random_text(6, 12)
    for layer in model.moe_layers():
        layer.router.cutoff_E.fill_(2.0)  # no score reaches it
    predictors = fit_predictors(model, lambda step: token_BS, 150)
    serve(model, "predictor", predictors)
    rows = [HeldoutBatch("a", row_S[None], row_S[None], torch.ones(1, 12).bool()) for row_S in token_BS]
    chosen = sum(sum(count_E) for count_E in loads(model, rows).values())
    assert chosen == pytest.approx(3 * 6 * 12 * 2, rel=0.1)  # 3 layers, 72 tokens, 2 experts each


def test_each_step_has_its_own_text_and_the_fit_is_repeatable() -> None:
    model, asked = small_model("expert_choice"), []

    def text(step: int) -> Tensor:
        asked.append(step)
        return random_text(4, 9, seed=step)

    first, second = fit_predictors(model, text, 3), fit_predictors(model, text, 3)
    assert asked == [0, 1, 2, 0, 1, 2]
    assert list(first) == [0, 1, 2]
    for index in first:
        assert torch.equal(first[index].weight_ED, second[index].weight_ED)
        assert first[index].weight_ED.abs().sum() > 0


def test_a_fit_leaves_no_gradient_and_no_hook_in_the_model() -> None:
    model = small_model("expert_choice")
    fit_predictors(model, lambda step: random_text(2, 9), 2)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not layer.router._forward_hooks for layer in model.moe_layers())
