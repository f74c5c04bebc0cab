"""One step gives the same numbers however it is cut into micro-batches (known failures A04, C05)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from data.batches import Batch
from moe.initialization import build_model
from training.config import Config
from training.load_config import config_from_dict
from training.optimizer import build_optimizer
from training.step import NonFiniteGradient, train_step


def make_config(router: str, micro_batch: int = 6) -> Config:
    extra = {"balance_coefficient": 0.05} if router != "expert_choice" else {}
    return config_from_dict(
        {
            "model": {"vocabulary_size": 40, "width": 12, "layers": 2, "heads": 3, "kv_heads": 1},
            "moe": {
                **{"router": router, "num_experts": 3, "experts_per_token": 2, "expert_width": 7},
                **{"group_sequences": 2, "allow_leak": True, "z_coefficient": 0.02, "shared_width": 5, **extra},
            },
            "training": {
                **{"steps": 5, "warmup_steps": 0, "batch_sequences": 6, "micro_batch_sequences": micro_batch},
                **{"sequence_length": 9, "learning_rate": 0.01, "clip_norm": 0.5},
            },
        }
    )


def make_batch() -> Batch:
    """Rows with very different numbers of labels that count: 9, 9, 1, 0, 5, 9."""
    window = torch.randint(0, 40, (6, 10), generator=torch.Generator().manual_seed(3))
    label_BS = window[:, 1:].clone()
    for row, kept in enumerate((9, 9, 1, 0, 5, 9)):
        label_BS[row, kept:] = -100
    return Batch(window[:, :-1].contiguous(), label_BS, torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize("router", ["expert_choice", "threshold", "token_choice"])
def test_micro_batches_change_neither_loss_nor_weights_nor_cutoffs(router):
    outcomes = []
    for micro_batch in (6, 2):
        config = make_config(router, micro_batch)
        model = build_model(config.model, config.moe, seed=1)
        # Plain SGD: Adam would hide a constant factor on the gradient.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = [train_step(model, optimizer, make_batch(), config, step, end_of_text=0) for step in range(3)]
        outcomes.append((results, model.state_dict()))
    (whole, whole_state), (parts, parts_state) = outcomes
    for a, b in zip(whole, parts, strict=True):
        assert a.tokens == b.tokens == 33
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-5)
        assert a.auxiliary == pytest.approx(b.auxiliary, rel=1e-5)
    for name, value in whole_state.items():
        torch.testing.assert_close(value, parts_state[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_the_gradient_norm_is_clipped_and_reported_before_clipping():
    config = make_config("token_choice")
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, learning_rate=1.0))
    model = build_model(config.model, config.moe)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters())
    assert train_step(model, optimizer, make_batch(), config, 0, end_of_text=0).gradient_norm > 1
    moved = torch.stack([(p.detach() - before[name]).norm() for name, p in model.named_parameters()]).norm()
    assert moved.item() == pytest.approx(0.5, rel=1e-4)


def test_a_gradient_that_is_not_finite_stops_before_anything_changes():
    config = make_config("expert_choice")
    model = build_model(config.model, config.moe)
    with torch.no_grad():
        model.blocks["1"].attention.output.weight[0, 0] = float("inf")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(NonFiniteGradient, match="step 4: the gradient norm is (nan|inf); lower training.learning_rate"):
        train_step(model, build_optimizer(model, config.training), make_batch(), config, 3, end_of_text=0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
