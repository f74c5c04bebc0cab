"""One function of the text, however it is fed; and the checker notices when it is not."""

from __future__ import annotations

import pytest
import torch

from eval.parity import Parity, check_parity, main
from moe.routing import RoutingContext
from tests.eval.small_models import ROUTERS, random_text, small_model


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_every_way_of_feeding_agrees(router: str, backend: str) -> None:
    """H01, H04, H05: logits within 1e-4 and the same routes."""
    model = small_model(router, backend=backend)
    results = check_parity(model, random_text(3, 11))
    assert [result.way for result in results] == ["token by token", "in chunks", "row by row", "padded on the left"]
    for result in results:
        assert result.explained
        assert result.routes == (0 if router == "dense" else 3 * 3 * 11 * 6)
        if result.routes_different == 0:
            assert result.max_logit_difference < 1e-4


def test_a_router_that_compares_tokens_is_noticed() -> None:
    model = small_model("expert_choice", group="chunk", chunk_length=3)
    training = RoutingContext(1, 12, mode="train_router")
    for layer in model.moe_layers():

        def whole_texts_by_choice(scores, logits, context, select=layer.router.select):  # type: ignore[no-untyped-def]
            return select(scores, logits, training if len(scores) == 12 else context)

        layer.router.select = whole_texts_by_choice
    by_way = {result.way: result for result in check_parity(model, random_text(1, 12))}
    assert not by_way["token by token"].explained
    assert by_way["token by token"].first_different > 0
    assert by_way["token by token"].max_logit_difference > 1e-3


def test_a_score_at_its_cutoff_explains_a_different_route() -> None:
    model = small_model("threshold")
    text = random_text(2, 9)
    seen = {}
    with torch.no_grad():
        model(text, RoutingContext(2, 9, observe=lambda layer, routing: seen.setdefault(layer, routing)))
    # The cutoff of one expert of layer 0 becomes one token's score, to within rounding.
    router = model.moe_layers()[0].router
    router.cutoff_E[2] = seen[0].scores_TE[10, 2]
    select, calls = router.select, []

    def nudged(scores_TE, logits_TE, context):  # type: ignore[no-untyped-def]
        calls.append(1)
        return select(scores_TE + (-1e-7 if len(calls) > 1 else 0), logits_TE, context)

    router.select = nudged
    by_way = {result.way: result for result in check_parity(model, text)}
    result = by_way["token by token"]
    # What follows from the first difference, in later layers and positions, is not counted as a first one.
    assert result.first_different == result.first_near_cutoff == 1
    assert result.routes_different >= 1
    assert result.explained


def test_the_command_reports_every_way_and_passes_on_a_sound_run(small_run, capsys) -> None:  # type: ignore[no-untyped-def]
    main([str(small_run.folder), "--rows", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["token by token", "in chunks", "row by row", "padded on the left"]
    assert all("0 of them first" in line for line in lines)


def test_the_command_fails_where_a_route_differs_without_a_reason(small_run, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    broken = [Parity("in chunks", 0.5, 100, 3, 1, 0)]
    monkeypatch.setattr("eval.parity.check_parity", lambda model, token_BS: broken)
    with pytest.raises(ValueError, match="a route differs although its score is not at the cutoff"):
        main([str(small_run.folder)])
