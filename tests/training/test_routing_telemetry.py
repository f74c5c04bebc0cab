"""One record of a step's routing: every value against one worked out by hand, counted once, and layout-independent."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from data.batches import Batch
from eval.likelihood import evaluate_windows
from moe.initialization import build_model
from moe.model import Transformer
from moe.routing import Decision, Routing, RoutingContext
from tests.eval.small_models import window
from tests.moe.helpers import make_layer, make_model
from training.config import Config
from training.load_config import config_from_dict
from training.routing_telemetry import RoutingTelemetry, layer_means, margins, routing_record
from training.step import train_step

nan = math.nan


def ragged(experts_of_token: list[list[int]], num_experts: int, **more: Any) -> Routing:
    """A routing of given pairs, every weight and score 1/E and every logit 0 unless given."""
    mask_TE = torch.zeros(len(experts_of_token), num_experts, dtype=torch.bool)
    for token, experts in enumerate(experts_of_token):
        mask_TE[token, experts] = True
    scores_TE = more.get("scores_TE", torch.full(mask_TE.shape, 1 / num_experts))
    logits_TE = more.get("logits_TE", torch.zeros(mask_TE.shape))
    decision = Decision.from_mask(mask_TE, more.get("chosen_TE"))
    return Routing.from_decision(decision, scores_TE, scores_TE, logits_TE, more.get("valid_T"))


def one_layer_record(routing: Routing, experts_per_token: int, sequence_length: int) -> dict[str, Any]:
    telemetry = RoutingTelemetry([0], routing.num_experts, experts_per_token, sequence_length)
    telemetry.start_step(detailed=True)
    telemetry.observe(0, routing)
    return routing_record(telemetry.sums())


def by_hand() -> Routing:
    """Two sequences of three tokens, three experts, k = 1. Expert 0 has no room for the last token."""
    chosen = [0, 0, 1, 0, 2, 0]
    scores_TE = torch.tensor(
        [[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.25, 0.5, 0.25], [0.75, 0.125, 0.125], [0.25, 0.25, 0.5], [0.4, 0.3, 0.3]]
    )
    logits_TE = torch.tensor([[3.0, 4, 0], [0, 0, -1], [0, 2, 0], [0, 0, 0], [1, 2, 2], [5, 0, -12]])
    chosen_TE = torch.nn.functional.one_hot(torch.tensor(chosen), 3).bool()
    kept = [[e] for e in chosen[:5]] + [[]]
    return ragged(kept, 3, scores_TE=scores_TE, logits_TE=logits_TE, chosen_TE=chosen_TE)


def test_every_value_of_a_record_is_the_one_worked_out_by_hand() -> None:
    record = one_layer_record(by_hand(), experts_per_token=1, sequence_length=3)
    assert record["tokens"] == 6
    assert record["counts"] == [[3, 1, 1]]
    assert record["gate_mass"] == [pytest.approx([0.5 + 0.6 + 0.75, 0.5, 0.5])]
    assert record["fan_out"] == [[1, 5, 0, 0]]
    assert record["stretch_tokens"] == [2, 2, 2]
    assert record["stretch_counts"] == [[[2, 0, 0], [1, 0, 1], [0, 1, 0]]]
    assert record["stretch_dropped"] == [[0, 0, 1]]
    per_layer = {
        "max_violation": 3 / (5 / 3) - 1,
        "window_max_violation": 3 / (5 / 3) - 1,
        "coefficient_of_variation": math.sqrt(8 / 9) / (5 / 3),
        "load_entropy": -(0.6 * math.log(0.6) + 0.4 * math.log(0.2)) / math.log(3),
        "experts_per_token": 5 / 6,
        "zero_expert_fraction": 1 / 6,
        "dropped_fraction": 1 / 6,
        "margin": (0.2 + 0.3 + 0.25 + 0.625 + 0.25 + 0.1) / 6,
        "logit_norm": (5 + 1 + 2 + 0 + 3 + 13) / 6,
    }
    for name, value in per_layer.items():
        assert record[name] == [pytest.approx(value, rel=1e-6)], name


def test_the_window_is_all_steps_since_the_record_before() -> None:
    """Imbalance that differs from batch to batch cancels in the window: 7 and 5 of 12, while the batch has 3 and 1."""
    model = make_model(router="token_choice", num_experts=2, experts_per_token=1)
    telemetry = RoutingTelemetry([4], 2, 1, sequence_length=4)
    loads, records = [[4, 0], [0, 4], [3, 1], [1, 3]], []
    for step, (first, second) in enumerate(loads):
        telemetry.start_step(detailed=step >= 2)
        telemetry.observe(4, ragged([[0]] * first + [[1]] * second, 2))
        records.append(telemetry.end_step(model))
    assert records[:2] == [None, None]
    assert records[2] is not None and records[3] is not None
    assert records[2]["window_steps"] == 3 and records[2]["counts"] == [[3, 1]]
    assert records[2]["max_violation"] == [pytest.approx(0.5)]
    assert records[2]["window_max_violation"] == [pytest.approx(7 / 6 - 1)]
    assert records[3]["window_steps"] == 1 and records[3]["window_max_violation"] == [pytest.approx(0.5)]


def test_padding_counts_nowhere_whatever_it_holds() -> None:
    """A02: expert 1 of two, two slots each, must fill up with padding, which is poisoned."""
    valid_T = torch.tensor([True, False, True, False])
    scores_TE = torch.tensor([[0.75, 0.25], [nan, nan], [0.5, 0.125], [torch.inf, 1e38]])
    logits_TE = torch.tensor([[3.0, 4], [nan, 0], [0, 1], [torch.inf, 7]])
    decision = Decision(torch.tensor([0, 2, 0, 3]), torch.tensor([2, 4], dtype=torch.int32), capacity=2)
    routing = Routing.from_decision(decision, scores_TE, scores_TE, logits_TE, valid_T)
    record = one_layer_record(routing, experts_per_token=1, sequence_length=2)
    assert record["tokens"] == 2
    assert record["counts"] == [[2, 1]]
    assert record["gate_mass"] == [[1.25, 0.25]]
    assert record["fan_out"] == [[0, 1, 1]]
    assert record["stretch_tokens"] == [2, 0]  # the second token of both sequences is padding
    assert record["stretch_counts"] == [[[2, 1], [0, 0]]]
    assert record["window_max_violation"] == record["max_violation"] == [pytest.approx(2 / 1.5 - 1)]
    assert record["margin"] == [pytest.approx((0.5 + 0.375) / 2)]
    assert record["logit_norm"] == [pytest.approx((5 + 1) / 2)]


def test_a_choice_of_padding_is_not_a_dropped_assignment() -> None:
    routing = ragged([[0], []], 2, chosen_TE=torch.tensor([[True, False], [True, True]]))
    routing.valid_T = torch.tensor([True, False])
    assert one_layer_record(routing, 1, sequence_length=2)["dropped_fraction"] == [0]


def test_drops_towards_the_end_of_a_sequence_show_where_they_are() -> None:
    """17 tokens in 8 stretches: 3, 2, 2, ..., 2. First come, first served: the last three find no room."""
    chosen_TE = torch.tensor([[True, False]]).expand(17, 2)
    record = one_layer_record(ragged([[0]] * 14 + [[]] * 3, 2, chosen_TE=chosen_TE), 1, sequence_length=17)
    assert record["stretch_tokens"] == [3, 2, 2, 2, 2, 2, 2, 2]
    assert record["stretch_dropped"] == [[0, 0, 0, 0, 0, 0, 1, 2]]
    assert record["stretch_counts"][0][6:] == [[1, 0], [0, 0]]
    assert record["dropped_fraction"] == [pytest.approx(3 / 17)]


def test_values_that_are_not_defined_are_none_and_json_takes_the_record() -> None:
    """No token reaches a cutoff, and k = E leaves no next score."""
    record = one_layer_record(ragged([[], [], []], 2), experts_per_token=2, sequence_length=3)
    for name in ("max_violation", "window_max_violation", "coefficient_of_variation", "load_entropy", "margin"):
        assert record[name] == [None], name
    assert record["zero_expert_fraction"] == [1] and record["experts_per_token"] == [0]
    assert record["dropped_fraction"] == [None] and record["gate_mass"] == [[0, 0]]
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_margin_is_from_the_kth_to_the_next_score_and_zero_in_a_tie() -> None:
    scores_TE = torch.tensor([[0.5, 0.125, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.5, 0.0]])
    assert margins(scores_TE, 1).tolist() == [0.25, 0, 0]
    assert margins(scores_TE, 2).tolist() == [0.125, 0, 0]
    assert margins(scores_TE, 3).tolist() == [0.125, 0, 0.5]
    assert margins(scores_TE, 4).isnan().all()


def test_cutoff_drift_is_the_mean_move_since_the_record_before() -> None:
    model = make_model(router="threshold", num_experts=4)
    telemetry = RoutingTelemetry.of(model, sequence_length=3)
    assert telemetry.layers == [0, 1, 2]
    drifts = []
    for step in range(3):
        telemetry.start_step(detailed=True)
        for layer in model.moe_layers():
            telemetry.observe(layer.index, ragged([[0], [1], [2, 3]], 4))
        record = telemetry.end_step(model)
        assert record is not None
        drifts.append(record["cutoff_drift"])
        if step == 0:
            model.moe_layers()[1].router.cutoff_E += torch.tensor([0.25, -0.5, 0, 0.125])
    assert drifts == [[None] * 3, [0, 0.875 / 4, 0], [0, 0, 0]]


def test_routers_without_cutoffs_have_no_drift() -> None:
    model = make_model(router="token_choice")
    telemetry = RoutingTelemetry.of(model, sequence_length=3)
    for _ in range(2):
        telemetry.start_step(detailed=True)
        for layer in range(3):
            telemetry.observe(layer, ragged([[0, 1], [1, 2], [2, 3]], 6))
        record = telemetry.end_step(model)
    assert record is not None and record["cutoff_drift"] == [None] * 3
    assert "cutoff_drift" not in layer_means(record)


def test_layer_means_leave_out_layers_without_a_value() -> None:
    record = {name: [1.0, None, 4.0] for name in ("max_violation", "window_max_violation", "load_entropy")}
    others = ("zero_expert_fraction", "dropped_fraction", "experts_per_token", "margin", "logit_norm", "cutoff_drift")
    means = layer_means(record | {name: [None, None, None] for name in others})
    assert means == {"max_violation": 2.5, "window_max_violation": 2.5, "load_entropy": 2.5}


@pytest.mark.parametrize("router", ["dense", "soft"])
def test_a_model_that_routes_nothing_has_no_record(router: str) -> None:
    telemetry = RoutingTelemetry.of(make_model(router=router), sequence_length=3)
    telemetry.start_step(detailed=True)
    assert telemetry.end_step(make_model(router=router)) is None


# Real routers and real training steps.


def make_config(router: str, micro_batch: int = 6) -> Config:
    extra = {"capacity_factor": 1.0} if router == "token_choice" else {}
    model = {"vocabulary_size": 40, "width": 12, "layers": 3, "heads": 3, "kv_heads": 1, "dense_layers": 1}
    moe = {"num_experts": 5, "experts_per_token": 2, "expert_width": 7, "group_sequences": 2, "allow_leak": True}
    training = {"steps": 9, "warmup_steps": 0, "batch_sequences": 6, "micro_batch_sequences": micro_batch}
    return config_from_dict(
        {"model": model, "moe": {"router": router, **moe, **extra}, "training": {**training, "sequence_length": 10}}
    )


def make_batch(seed: int) -> Batch:
    token_BS = torch.randint(1, 40, (6, 11), generator=torch.Generator().manual_seed(seed))
    return Batch(token_BS[:, :-1].contiguous(), token_BS[:, 1:].contiguous(), torch.zeros(6, dtype=torch.int64))


def evaluate_in_between(model: Transformer) -> None:
    text = torch.randint(1, 40, (2, 11), generator=torch.Generator().manual_seed(5))
    for mode in ("causal", "train_router"):
        evaluate_windows(model, [window("text", list(text), 10)], np.ones(40, dtype=np.int64), mode=mode)


def train(config: Config, steps: int, evaluating: bool = False, every: int = 2) -> list[dict[str, Any]]:
    """The records of a training run that makes one every `every` steps."""
    model = build_model(config.model, config.moe, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    telemetry, records = RoutingTelemetry.of(model, config.training.sequence_length), []
    for step in range(steps):
        telemetry.start_step(detailed=(step + 1) % every == 0)
        train_step(model, optimizer, make_batch(step), config, step, 0, telemetry.observe)
        records.append(telemetry.end_step(model))
        if evaluating:
            evaluate_in_between(model)
    return [record for record in records if record is not None]


@pytest.mark.parametrize("router", ["expert_choice", "threshold", "token_choice"])
def test_micro_batches_change_no_record(router: str) -> None:
    whole, parts = train(make_config(router, 6), 4), train(make_config(router, 2), 4)
    assert [record["tokens"] for record in whole] == [60, 60]
    assert [record["layers"] for record in whole] == [[1, 2]] * 2
    for a, b in zip(whole, parts, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            np.testing.assert_allclose(
                np.array(value, dtype=float), np.array(b[name], dtype=float), rtol=1e-4, atol=1e-6, err_msg=name
            )


def test_dropping_by_capacity_is_recorded() -> None:
    """Capacity 1 x 20 tokens x 2 / 5 experts = 8 a group: kept and dropped make 2 for each of 60 tokens."""
    (record,) = train(make_config("token_choice"), 2)
    kept, dropped = np.sum(record["counts"], axis=1), np.sum(record["stretch_dropped"], axis=1)
    assert (kept + dropped == 120).all() and (dropped > 0).all()
    assert record["dropped_fraction"] == pytest.approx(dropped / 120)


def test_expert_choice_is_balanced_by_construction() -> None:
    (record,) = train(make_config("expert_choice"), 2)
    assert record["counts"] == [[24] * 5] * 2 and record["experts_per_token"] == [2, 2]
    assert record["max_violation"] == record["window_max_violation"] == record["dropped_fraction"] == [0, 0]


@pytest.mark.parametrize("router", ["expert_choice", "threshold", "token_choice"])
def test_evaluation_changes_no_record(router: str) -> None:
    """A11: held-out text is not the training load."""
    assert train(make_config(router), 4, evaluating=True) == train(make_config(router), 4)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("router", ["expert_choice", "threshold", "token_choice", "remoe"])
def test_activation_recompute_counts_once(router: str, recompute: bool) -> None:
    """A11: a layer that runs again in backward is not a second batch."""
    torch.manual_seed(2)
    layer = make_layer(14, router=router, num_experts=6, group_sequences=3, allow_leak=True)
    telemetry = RoutingTelemetry([layer.index], 6, 2, sequence_length=8)
    x_BSD = torch.randn(3, 8, 14, requires_grad=True)
    context = RoutingContext(3, 8, mode="train", observe=telemetry.observe)
    telemetry.start_step(detailed=True)
    y_BSD = checkpoint(layer, x_BSD, context, use_reentrant=False) if recompute else layer(x_BSD, context)
    y_BSD.sum().backward()
    record = routing_record(telemetry.sums())
    assert record["tokens"] == np.sum(record["fan_out"]) == np.sum(record["stretch_tokens"]) == 24
    if router in ("expert_choice", "token_choice"):
        assert np.sum(record["counts"]) == 48
    assert telemetry.sums()["window_LE"].tolist() == record["counts"]


def test_the_sums_of_processes_are_added() -> None:
    """Each sees some of the sequences, or only some of the layers."""
    routings = [by_hand(), ragged([[0, 1, 2], [1], []], 3), ragged([[2]] * 3, 3)]

    def sums(*seen: tuple[int, Routing]) -> dict[str, Tensor]:
        telemetry = RoutingTelemetry([1, 3], 3, 1, sequence_length=3)
        telemetry.start_step(detailed=True)
        for layer, routing in seen:
            telemetry.observe(layer, routing)
        return telemetry.sums()

    alone = sums((1, routings[0]), (1, routings[1]), (3, routings[2]), (3, routings[0]))
    parts = [sums((1, routings[0])), sums((1, routings[1])), sums((3, routings[2]), (3, routings[0]))]
    added = {name: sum(part[name] for part in parts) for name in alone}
    assert routing_record(added) == routing_record(alone)
    assert added["fan_out_LX"].tolist() == [[2, 6, 0, 1], [1, 8, 0, 0]]


def test_an_unfinished_window_goes_on_from_a_checkpoint() -> None:
    config = make_config("threshold")
    model = build_model(config.model, config.moe, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    telemetry, straight, halves = RoutingTelemetry.of(model, 10), [], []
    other = RoutingTelemetry.of(model, 10)
    for step in range(6):
        for each in (telemetry, other):
            each.start_step(detailed=(step + 1) % 3 == 0)

        def both(layer: int, routing: Routing, other: RoutingTelemetry = other) -> None:
            telemetry.observe(layer, routing)
            other.observe(layer, routing)

        train_step(model, optimizer, make_batch(step), config, step, 0, both)
        straight.append(telemetry.end_step(model))
        halves.append(other.end_step(model))
        if step == 3:  # one step into the second window
            state = json.loads(json.dumps(other.state()))
            other = RoutingTelemetry.of(model, 10)
            other.load_state(state)
    assert straight == halves
    assert straight[5] is not None and straight[5]["window_steps"] == 3 and None not in straight[5]["cutoff_drift"]


def to(routing: Routing, device: str) -> Routing:
    return Routing(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(routing).items()})


@pytest.mark.parametrize("padded", [False, True])
def test_observing_reads_no_value(padded: bool) -> None:
    """So that nothing waits for the device: a tensor on "meta" has shapes only, and cannot be read."""
    routing = by_hand()
    routing.valid_T = torch.ones(6, dtype=torch.bool) if padded else None
    telemetry = RoutingTelemetry([0], 3, 1, sequence_length=3, device="meta")
    telemetry.start_step(detailed=True)
    telemetry.observe(0, to(routing, "meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_records_what_a_cpu_does() -> None:
    routing, there = by_hand(), to(by_hand(), "cuda")
    telemetry = RoutingTelemetry([0], 3, 1, sequence_length=3, device="cuda")
    telemetry.start_step(detailed=True)
    telemetry.observe(0, there)
    record, expected = routing_record(telemetry.sums()), one_layer_record(routing, 1, sequence_length=3)
    for name, value in expected.items():
        np.testing.assert_allclose(record[name], value, rtol=1e-6, err_msg=name)
