"""Failures of other libraries with experts on several processes, with the numbers in which they were reported.

What any layout must do is in `test_layouts.py`, exchanges are in `test_exchange.py`, failures of gradients and of whole
steps in `test_known_parity_failures.py`. Each test names the failure; `grep -rw B04 tests` finds all that answer one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.batches import Batch
from moe.config import ConfigError
from moe.layer import MoELayer
from moe.routers.loss_free import LossFreeRouter
from moe.routing import RoutingContext
from parallel.collectives import Exchange, exchange_counts
from parallel.config import Layout
from parallel.engine import Engine
from parallel.expert import ExpertDispatcher
from parallel.ledger import Ledger
from parallel.mesh import Mesh
from parallel.shards import local_part
from tests.moe.helpers import make_layer
from tests.parallel.engines import assert_same, batch_of, build, micro_batches, plain, share, train_on
from tests.parallel.layouts import Part, assemble, make_config, parts_of
from tests.parallel.pool import Pool
from training.checkpoint import newest_checkpoint, save_checkpoint
from training.config import Config
from training.optimizer import build_optimizer

Pools = Callable[[int], Pool]
UNEVEN = (6, 2, 5, 1)  # labels of rows

# B01


def starve(config: Config, world: int, batches: list[Batch]) -> tuple[Part, list[float]]:
    """All tokens to the first expert in even steps, to the last in odd ones; the largest expert gradient of each step.

    Looked at before gradients are added up, where those that are missing would be filled in.
    """
    largest: list[float] = []

    def send_to_one(engine: Engine, step: int) -> None:
        for layer in engine.models[0].moe_layers():
            assert isinstance(layer.router, LossFreeRouter)
            layer.router.bias_E.fill_(-100.0)[0 if step % 2 == 0 else -1] = 100.0

    def look(engine: Engine, step: int) -> None:
        found = [h.parameter.grad for h in engine.held if ".experts." in h.name]
        assert found and all(gradient is not None for gradient in found)
        largest.append(max(local_part(gradient).abs().max().item() for gradient in found if gradient is not None))

    return train_on(config, world, batches, before=send_to_one, after_backward=look), largest


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_process_whose_experts_get_no_token_goes_on_with_gradients_of_exactly_0(pool: Pools, recompute: str) -> None:
    """B01: five steps, in which either process is starved in turn."""
    one = {"router": "loss_free", "num_experts": 4, "experts_per_token": 1}
    config = make_config(
        moe=one,
        parallel={"expert": 2, "recompute": recompute},
        training={"steps": 5, "batch_sequences": 4, "micro_batch_sequences": 2, "sequence_length": 6},
    )
    batches = [batch_of(UNEVEN, 6, step) for step in range(5)]
    parts, largest = zip(*pool(2).run(starve, config, 2, batches, timeout=30.0), strict=True)
    for rank in range(2):
        assert [value == 0 for value in largest[rank]] == [step % 2 != rank for step in range(5)]
    assert_same(starve(plain(config), 1, batches)[0], list(parts))


# B03


@pytest.mark.parametrize("parallel", [{"zero": 3}, {"zero": 3, "expert": 2}, {}], ids=["zero3", "zero3 x ep2", "dp2"])
def test_processes_that_use_different_experts_and_experts_that_none_uses_do_not_stop_a_step(
    pool: Pools, parallel: dict[str, int]
) -> None:
    """B03: ids, and so a hash router's experts, are such that the first rows use expert 0 and the last ones expert 1.

    Copies of a weight are compared bit for bit; a gradient of an unused expert would change it.
    """
    moe = {"router": "hash", "num_experts": 4, "experts_per_token": 1, "z_coefficient": None}
    training = {"batch_sequences": 4, "sequence_length": 6}
    config = make_config(moe=moe, parallel=parallel, training=training)
    batches = []
    for step in range(3):
        batch = batch_of(UNEVEN, 6, step)
        batch.token_BS.copy_(batch.token_BS // 8 * 4)[2:] += 1
        batches.append(batch)
    parts = pool(2).run(train_on, config, 2, batches, timeout=30.0)
    assert_same(train_on(plain(config), 1, batches), parts)
    weights = assemble([part.weights for part in parts], parts[0].shapes)
    engine = build(plain(config))
    for name, value in assemble([parts_of(engine, lambda p: p)], parts[0].shapes).items():
        if ".experts." in name:
            changed = [not np.array_equal(a, b) for a, b in zip(value, weights[name], strict=True)]
            assert changed == [True, True, False, False], name


# B04


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"expert": 2}),
        (2, {}),
        (2, {"expert": 2, "zero": 3}),
        (4, {"expert": 2}),
        (4, {"expert": 2, "zero": 3}),
        (4, {"expert": 4, "zero": 3}),
    ],
    ids=["DP 1 EP 2", "DP 2 EP 1", "EP 2, shards of 1", "DP 2 EP 2", "DP 2 EP 2, shards of 2", "EP 4, shards of 1"],
)
def test_gradients_of_eight_tokens_are_not_a_multiple_of_those_of_one_process(
    pool: Pools, world: int, parallel: dict[str, int]
) -> None:
    """B04: three steps of plain SGD. A gradient that is twice too large is reported as "2.00x"."""
    config = make_config(
        moe={"router": "token_choice", "group_sequences": 1, "balance_coefficient": 0.05},
        parallel=parallel,
        training={"batch_sequences": 4, "sequence_length": 2},
    )
    batches = [batch_of([2] * 4, 2, step) for step in range(3)]
    assert_same(train_on(plain(config), 1, batches), pool(world).run(train_on, config, world, batches))


# B06


def uneven_splits() -> tuple[list[int], Tensor]:
    """Splits [2, 2] and [3, 1]: what this process is told that it gets, and what it gets."""
    rank = dist.get_rank()
    send = [[2, 2], [3, 1]][rank]
    _, received = exchange_counts(torch.tensor(send)[:, None], dist.group.WORLD)
    receive = [count for (count,) in received]
    exchange = Exchange(dist.group.WORLD, send, receive)
    rows = 10.0 * rank + torch.arange(4.0)[:, None]
    return receive, exchange.finish(exchange.start(rows)).flatten()


def test_a_process_gets_as_many_rows_as_others_send_it(pool: Pools) -> None:
    """B06, first part: 5 and 3 rows."""
    (first, rows), (second, others) = pool(2).run(uneven_splits, timeout=20.0)
    assert first == [2, 3] and second == [2, 1]
    assert rows.tolist() == [0, 1, 10, 11, 12] and others.tolist() == [2, 3, 13]


def mixture(processes: int, tokens: int) -> tuple[MoELayer, Tensor]:
    """A layer with a capacity, and inputs."""
    torch.manual_seed(3)
    moe = {"router": "token_choice", "num_experts": 4, "experts_per_token": 2, "expert_width": 5}
    layer = make_layer(8, **moe, capacity_factor=1.0, group_sequences=1)
    x_TD = torch.randn(tokens, 8, requires_grad=True)
    if processes > 1:
        mesh = Mesh(Layout(2, 1, 2, 1, 1, 2, 1))
        layer.dispatcher = ExpertDispatcher(mesh)
        own = slice(2 * mesh.expert, 2 * mesh.expert + 2)
        for name in ("w13_E2FD", "w2_EDF"):
            setattr(layer.experts, name, torch.nn.Parameter(getattr(layer.experts, name).detach()[own].clone()))
    return layer, x_TD


def unequal_tokens(processes: int, tokens: list[int]) -> list[Tensor]:
    """Output and gradient of the input, for as many tokens as this process has."""
    count = tokens[dist.get_rank()] if processes > 1 else tokens[0]
    layer, x_TD = mixture(processes, count)
    y_BSD = layer(x_TD[None], RoutingContext(1, count, mode="train"))
    y_BSD.square().sum().backward()
    assert x_TD.grad is not None
    return [y_BSD.detach()[0], x_TD.grad]


def test_processes_with_unequal_numbers_of_tokens_get_what_each_would_alone(pool: Pools) -> None:
    """B06, second part: 5 and 3 tokens, with a capacity."""
    for tokens, found in zip((5, 3), pool(2).run(unequal_tokens, 2, [5, 3], timeout=20.0), strict=True):
        torch.testing.assert_close(found, unequal_tokens(1, [tokens]), rtol=1e-5, atol=1e-6)


def refused(sections: dict[str, dict[str, Any]]) -> str:
    """What this process says to a layout."""
    with pytest.raises(ConfigError) as error:
        make_config(**sections).layout(dist.get_world_size())
    return str(error.value)


def test_unequal_numbers_of_micro_batches_are_refused_on_all_processes_in_the_same_words(pool: Pools) -> None:
    """B06, third part: 5 micro-batches for 2 processes."""
    sections = {"training": {"batch_sequences": 10, "micro_batch_sequences": 2}, "parallel": {"expert": 2}}
    first, second = pool(2).run(refused, sections, timeout=20.0)
    assert first == second
    assert "training.batch_sequences = 10 does not divide into 2 data-parallel parts of whole routing groups" in first


def random_routings(config: Config, count: int) -> tuple[dict[str, list[str]], int]:
    """Collectives of forward and backward passes over random valid tokens, and how many routings differed."""
    engine = build(config, 2)
    routings: set[tuple[int, ...]] = set()
    with Ledger() as ledger:
        for number in range(count):
            batch = share(engine, batch_of(UNEVEN, 6, number))
            generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
            valid_BS = torch.rand(batch.token_BS.shape, generator=generator) < number / count
            told = micro_batches(batch._replace(valid_BS=valid_BS), 2, step_tokens=8, step_groups=4)
            told[0].context.observe = lambda _, routing: routings.add(tuple(routing.counts_E().tolist()))
            engine.forward_backward(told, torch.tensor(14))
            engine.finish_gradients()
    return ledger.sequence(), len(routings)


def test_fifty_random_routings_take_the_same_collectives_in_the_same_order_everywhere(pool: Pools) -> None:
    """B06, last part: token choice over numbers of tokens that differ between processes, from none to all."""
    moe = {"router": "token_choice", "balance_coefficient": 0.05, "group_sequences": 1, "capacity_factor": 1.0}
    config = make_config(
        model={"layers": 2},
        moe=moe,
        parallel={"expert": 2, "zero": 3},
        training={"batch_sequences": 4, "sequence_length": 6},
    )
    (sequence, routings), (other, more) = pool(2).run(random_routings, config, 50, timeout=20.0)
    assert sequence == other
    # Counts, tokens and results there, and gradients of those two back.
    assert sum(call.startswith("all_to_all") for call in sequence["0, 1"]) == 50 * 5
    assert min(routings, more) > 40


# B08


def constants(config: Config, world: int) -> Tensor:
    """Output of a block whose residual is 100, whose shared expert gives 10, and whose routed experts give 1."""
    engine = build(config, world)
    width, one = config.model.width, torch.nn.functional.silu(torch.ones(())).item()
    values = {
        "embedding.weight": 100.0,
        "attention.output.weight": 0.0,
        "shared.down.weight": 10 / (config.moe.shared_width * one),
        "w2_EDF": 1 / (config.moe.expert_width * one),
        **dict.fromkeys(("gate.weight", "up.weight", "w13_E2FD"), 1 / width),
    }
    for held in engine.held:
        value = next((value for name, value in values.items() if held.name.endswith(name)), 1.0)
        local_part(held.parameter.detach()).fill_(value)
    (model,) = engine.models
    outputs: list[Tensor] = []
    model.blocks["0"].register_forward_hook(lambda *args: outputs.append(args[-1]))
    told = micro_batches(share(engine, batch_of([2] * 2, 2)), 2 // engine.mesh.layout.data)
    (stage,) = engine.stages.values()
    stage.expect(told)
    stage(told[0].token_BS)
    return outputs[0].detach()


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"tensor": 2},
        {"expert": 2},
        {"expert": 2, "tensor": 2},
        {"expert_tensor": 2, "tensor": 2},
        {"expert_tensor": 2},
    ],
    ids=["dp2", "tp2", "ep2", "ep2 within tp2", "etp2 x tp2", "etp2"],
)
def test_the_shared_expert_and_the_residual_are_added_once(pool: Pools, parallel: dict[str, int]) -> None:
    """B08: 100 + 10 + 1; added twice they give 211 or 121. Tensor parallelism always splits the sequence."""
    config = make_config(
        model={"width": 8, "layers": 1, "dense_layers": None, "feed_forward_width": None},
        moe={"router": "hash", "experts_per_token": 1, "z_coefficient": None, "group_sequences": 1},
        parallel=parallel,
        training={"batch_sequences": 2, "sequence_length": 2},
    )
    tensor = parallel.get("tensor", 1)
    for out_BSD in pool(2).run(constants, config, 2, timeout=20.0):
        assert out_BSD.shape == (tensor, 2 // tensor, 8)
        torch.testing.assert_close(out_BSD, torch.full_like(out_BSD, 111.0), rtol=1e-5, atol=0)


# B10


def train_and_save(config: Config, world: int, batches: list[Batch], folder: Path) -> Part:
    """As `train_on`, with a checkpoint of the last step."""

    def save(engine: Engine, step: int) -> None:
        if step == len(batches) - 1:
            optimizer = build_optimizer(engine, config.training)
            save_checkpoint(folder, step + 1, engine.models, optimizer, {})

    return train_on(config, world, batches, after=save)


@pytest.mark.parametrize(
    "model", [{"dense_layers": 1}, {"dense_layers": 0, "moe_every": 2}], ids=["experts last", "experts first"]
)
def test_a_stage_without_experts_trains_clips_and_saves(pool: Pools, tmp_path: Path, model: dict[str, int]) -> None:
    """B10: with a balance loss; both stages know the norm of one process."""
    config = make_config(
        model={"layers": 2, **model},
        moe={"router": "token_choice", "balance_coefficient": 0.05},
        parallel={"pipeline": 2},
        training={"batch_sequences": 4, "sequence_length": 6, "micro_batch_sequences": 2, "clip_norm": 0.1},
    )
    batches = [batch_of(UNEVEN, 6, step) for step in range(3)]
    reference = train_on(plain(config), 1, batches)
    parts = pool(2).run(train_and_save, config, 2, batches, tmp_path, timeout=60.0)
    assert_same(reference, parts)
    assert min(result.gradient_norm for result in reference.results) > 0.1
    norms = [[result.gradient_norm for result in part.results] for part in parts]
    assert norms[0] == norms[1] and all(map(math.isfinite, norms[0]))
    saved = newest_checkpoint(tmp_path)
    assert saved is not None and saved.step == 3
