"""Failures of other libraries where many processes do not give the gradients of one, with their numbers.

What any layout must do is in `test_layouts.py`, failures of experts on several processes are in
`test_known_expert_failures.py`, steps that are left out in `test_skipped_steps.py`. Each test names the failure;
`grep -rw C03 tests` finds all that answer one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from data.batches import Batch
from moe.config import ConfigError
from parallel.collectives import total
from parallel.gradients import clip_gradients, gradient_norm
from parallel.shards import local_gradient, local_part, shard_of, specialize
from parallel.tensor import vocabulary_losses
from tests.parallel.engines import assert_same, batch_of, build, micro_batches, plain, plant_gradient, share, train_on
from tests.parallel.layouts import Part, Pieces, assemble, make_config, parts_of
from tests.parallel.pool import Pool
from training.config import Config
from training.optimizer import build_optimizer
from training.step import StepResult, train_step

Pools = Callable[[int], Pool]
UNEVEN = (6, 2, 5, 1)  # labels of rows
SMALL = {"batch_sequences": 4, "sequence_length": 6}
TOP_K = {"router": "token_choice", "group_sequences": 1, "balance_coefficient": 0.05}
HASH = {"router": "hash", "z_coefficient": None, "group_sequences": 1}  # rounding changes no decision

# C01

PARTS = {
    (101, 2): [(0, 51), (51, 101)],
    (101, 4): [(0, 26), (26, 52), (52, 78), (78, 101)],
    (41, 4): [(0, 11), (11, 22), (22, 33), (33, 41)],
}


def losses_and_gradients(vocabulary: int, label_BS: Tensor, part: tuple[int, int] | None) -> list[Tensor]:
    """Losses, gradients of the inputs and of a part of the head; then the losses of logits that are all 0."""
    generator = torch.Generator().manual_seed(0)
    x_BSD = torch.randn(*label_BS.shape, 16, generator=generator, requires_grad=True)
    weight_VD = torch.randn(vocabulary, 16, generator=generator)
    scale_BS = torch.rand(label_BS.shape, generator=generator)
    start, end = part or (0, vocabulary)
    weight_VD = weight_VD[start:end].clone().requires_grad_()

    def losses(logits_BSV: Tensor) -> Tensor:
        if part is None:
            return F.cross_entropy(logits_BSV.flatten(0, 1), label_BS.flatten(), reduction="none").view_as(label_BS)
        return vocabulary_losses(logits_BSV, label_BS, start, dist.group.WORLD)

    losses_BS = losses(x_BSD @ weight_VD.T)
    (losses_BS * scale_BS).sum().backward()
    assert x_BSD.grad is not None and weight_VD.grad is not None
    x_grad = x_BSD.grad if part is None else total(x_BSD.grad, dist.group.WORLD)
    zero_BS = losses(torch.zeros(*label_BS.shape, end - start))
    return [losses_BS.detach(), x_grad, weight_VD.grad, zero_BS]


def of_my_part(vocabulary: int, label_BS: Tensor) -> list[Tensor]:
    """The same with the head split over all processes."""
    return losses_and_gradients(vocabulary, label_BS, PARTS[vocabulary, dist.get_world_size()][dist.get_rank()])


@pytest.mark.parametrize(("vocabulary", "world"), PARTS)
def test_a_vocabulary_that_does_not_divide_gives_the_losses_of_one_process(
    pool: Pools, vocabulary: int, world: int
) -> None:
    """C01: the last part is shorter; there is no padding. ln 101 = 4.61512."""
    edges = sorted({id_ for start, end in PARTS[vocabulary, world] for id_ in (start, end - 1)})
    label_BS = torch.tensor([[*edges, -100]])
    losses_BS, x_grad, weight_grad, zero_BS = losses_and_gradients(vocabulary, label_BS, None)
    for (start, end), found in zip(
        PARTS[vocabulary, world], pool(world).run(of_my_part, vocabulary, label_BS), strict=True
    ):
        expected = [losses_BS, x_grad, weight_grad[start:end], zero_BS]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert found[3][0, 0].item() == pytest.approx(math.log(vocabulary), rel=1e-6)
    assert math.log(101) == pytest.approx(4.61512, abs=5e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_and_a_head_of_101_rows_train_over_two_processes(pool: Pools, tied: bool) -> None:
    """C01: ids on both sides of the cut."""
    config = make_config(
        model={"vocabulary_size": 101, "width": 16, "tie_embeddings": tied, "layers": 2},
        moe=TOP_K,
        parallel={"tensor": 2},
        training=SMALL,
    )
    edges = torch.tensor([0, 50, 51, 100])
    batches = []
    for step in range(2):
        batch = batch_of(UNEVEN, 6, step)
        label_BS = torch.where(batch.label_BS == -100, -100, edges[batch.label_BS % 4])
        batches.append(batch._replace(token_BS=edges[batch.token_BS % 4], label_BS=label_BS))
    assert_same(train_on(plain(config), 1, batches), pool(2).run(train_on, config, 2, batches))


@pytest.mark.parametrize(("vocabulary", "refused"), [(9, True), (10, False)])
def test_a_process_that_would_hold_no_part_of_the_vocabulary_is_refused(vocabulary: int, refused: bool) -> None:
    """C01: of 9 ids four processes take 3 each, and the last one none."""
    config = make_config(model={"vocabulary_size": vocabulary}, parallel={"tensor": 4})
    if refused:
        with pytest.raises(ConfigError, match=r"parallel\.tensor = 4 .*model\.vocabulary_size = 9"):
            config.layout(4)
    else:
        config.layout(4)


# C03


def tied_gradient(config: Config, gradients: list[float]) -> list[float]:
    """The smallest and largest gradient of this process' copy of the embedding, when each process has a constant one.

    The loss is a mean over data-parallel processes, of one label each.
    """
    engine = build(config, len(gradients))
    plant_gradient(engine, gradients[dist.get_rank()])
    told = micro_batches(share(engine, batch_of([1] * 4, 6)), config.micro_batch_sequences(engine.mesh.layout))
    engine.forward_backward(told, torch.tensor(engine.mesh.layout.data * len(told)))
    engine.finish_gradients()
    (held,) = [h for h in engine.held if h.name == "embedding.weight"]
    assert held.tied == (engine.mesh.stage == 1)
    gradient = local_gradient(held.parameter)
    return [gradient.min().item(), gradient.max().item()]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_tied_embedding_gets_the_sum_over_stages_of_the_means_over_data(pool: Pools, zero: int) -> None:
    """C03: (1 + 3)/2 + (5 + 7)/2 = 8 on all four processes, whether it is scattered over data or not."""
    config = make_config(
        model={"tie_embeddings": True, "layers": 2},
        moe=HASH,
        parallel={"pipeline": 2, "zero": zero, "schedule": "GPipe"},
        training=SMALL,
    )
    assert pool(4).run(tied_gradient, config, [1.0, 3.0, 5.0, 7.0]) == [[8.0, 8.0]] * 4


def train_and_count(config: Config, world: int, batches: list[Batch]) -> tuple[Part, tuple[int, int]]:
    """As `train_on` under AdamW, with the numbers of parameters."""
    return train_on(config, world, batches, adam=True), build(config, world).parameter_counts()


def test_ten_steps_of_adamw_leave_both_copies_of_a_tied_embedding_equal_bit_for_bit(pool: Pools) -> None:
    """C03: with weight decay, which happens once, and ZeRO-1; the embedding counts once in numbers and in the norm.

    Copies on other processes are compared when the whole is put together. A large epsilon, because Adam makes a full
    step out of a gradient that is nothing but rounding.
    """
    config = make_config(
        model={"tie_embeddings": True, "layers": 2},
        moe=HASH,
        parallel={"pipeline": 2, "zero": 1},
        training={**SMALL, "steps": 10, "learning_rate": 0.01, "weight_decay": 0.5, "epsilon": 1e-3},
    )
    batches = [batch_of(UNEVEN, 6, step) for step in range(10)]
    reference, counts = train_and_count(plain(config), 1, batches)
    parts, found = zip(*pool(4).run(train_and_count, config, 4, batches), strict=True)
    assert_same(reference, list(parts))
    assert list(found) == [counts] * 4
    holders = [sum(name in part.weights for part in parts) for name in ("embedding.weight", "final_norm.weight")]
    assert holders == [4, 2]


# C04


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_micro_batches_of_a_pipeline_add_up_to_their_mean(pool: Pools, schedule: str) -> None:
    """C04: four micro-batches whose gradients are 1 give 1 (and not 0.75, which a division at every call gives)."""
    config = make_config(
        model={"layers": 2, "tie_embeddings": True},
        moe=HASH,
        parallel={"pipeline": 2, "schedule": schedule},
        training={**SMALL, "micro_batch_sequences": 1},
    )
    assert pool(2).run(tied_gradient, config, [1.0, 0.0]) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("rows", [1, 2], ids=["4 micro-batches", "2 micro-batches"])
def test_a_pipeline_weighs_labels_and_not_micro_batches(pool: Pools, schedule: str, rows: int) -> None:
    """C04: 6, 2, 5 and 1 labels."""
    config = make_config(
        model={"layers": 2},
        moe=TOP_K,
        parallel={"pipeline": 2, "schedule": schedule},
        training={**SMALL, "micro_batch_sequences": rows},
    )
    batches = [batch_of(UNEVEN, 6, step) for step in range(3)]
    assert_same(train_on(plain(config), 1, batches), pool(2).run(train_on, config, 2, batches))


# C05


def given_losses(config: Config, world: int) -> StepResult:
    """A step in which one label costs 4, and three others 2 each."""
    engine = build(config, world)

    def losses(self: Any, normed_BSD: Tensor, label_BS: Tensor) -> Tensor:
        cost_BS = torch.where(label_BS == -100, 0.0, torch.where(label_BS == 7, 4.0, 2.0))
        return cost_BS + 0.0 * normed_BSD.sum(-1)

    for model in engine.models:
        specialize(model, {"losses": losses})
    batch = batch_of([1, 3], 6)
    batch.label_BS[batch.label_BS == 7] = 8
    batch.label_BS[0, 0] = 7
    optimizer = torch.optim.SGD([h.parameter for h in engine.held], lr=0.1)
    return train_step(engine, optimizer, share(engine, batch), config, 0, 0)


@pytest.mark.parametrize(("world", "rows"), [(1, 1), (1, 2), (2, 1)], ids=["2 x 1", "1 x 2", "dp2"])
def test_a_loss_is_a_mean_over_labels_and_not_over_micro_batches_or_processes(
    pool: Pools, world: int, rows: int
) -> None:
    """C05: (4 + 3 * 2) / 4 = 2.5; the mean of the means is 3."""
    training = {**SMALL, "batch_sequences": 2, "micro_batch_sequences": rows}
    config = make_config(model={"layers": 2}, moe=HASH, training=training)
    for result in pool(world).run(given_losses, config, world):
        assert result.loss == 2.5 and result.tokens == 4


@pytest.mark.parametrize(("world", "rows"), [(1, 1), (1, 2), (2, 1), (2, 2)], ids=["4 x 1", "2 x 2", "dp2", "dp2, 2"])
def test_gradients_of_unequal_micro_batches_are_those_of_the_whole_batch(pool: Pools, world: int, rows: int) -> None:
    """C05: 6, 2, 5 and 1 labels."""
    config = make_config(model={"layers": 2}, moe=TOP_K, training={**SMALL, "micro_batch_sequences": rows})
    batches = [batch_of(UNEVEN, 6, step) for step in range(3)]
    assert_same(train_on(plain(config), 1, batches), pool(world).run(train_on, config, world, batches))


def test_a_last_window_that_would_be_smaller_than_the_others_is_refused() -> None:
    """C05: ten sequences in micro-batches of four. Batches themselves never end, so none of them is a part of one."""
    with pytest.raises(ConfigError, match=r"micro_batch_sequences = 4 does not divide .* = 10: choose among \[1, 2, 5"):
        make_config(training={**SMALL, "batch_sequences": 10, "micro_batch_sequences": 4})


# C07


def planted_norm(config: Config, world: int, squares: dict[str, list[list[float]]], most: float) -> list[Any]:
    """The norm where each process is given some gradients, and what is left of those after clipping.

    Args:
        squares: by parameter and process, the first elements of its gradient; no other parameter has any, nor do
            processes with an empty list.
    """
    engine = build(config, world)
    planted = []
    for held in engine.held:
        values = squares.get(held.name, [[]] * world)[dist.get_rank()]
        if values:
            planted.append(held.parameter)
            local_gradient(held.parameter).view(-1)[: len(values)] = torch.tensor(values)
        else:
            assert held.parameter.grad is None
    norm = engine.finish_gradients()
    engine.clip(norm, most)
    dense = [h.parameter for h in engine.held if h.name in squares and ".experts." not in h.name]
    return [norm, [local_gradient(p).view(-1)[0].item() for p in {*planted, *dense}]]


EXPERT, DENSE = "blocks.1.feed_forward.experts.w2_EDF", "blocks.1.attention.output.weight"


@pytest.mark.parametrize(
    ("parallel", "squares", "norm"),
    [
        ({"expert": 2}, {EXPERT: [[4.0, 2.0], [10.0]]}, math.sqrt(120)),
        ({"expert": 2}, {EXPERT: [[4.0, 2.0], []]}, math.sqrt(20)),
        ({"pipeline": 2}, {EXPERT: [[], [4.0, 2.0]]}, math.sqrt(20)),
        ({"expert": 2}, {EXPERT: [[4.0], []], DENSE: [[1.0], [2.0]]}, 5.0),
    ],
    ids=["20 and 100", "20 and None", "no experts and 20", "dense 3 and experts 4"],
)
def test_the_norm_counts_every_expert_once_and_all_processes_know_it(
    pool: Pools, parallel: dict[str, int], squares: dict[str, list[list[float]]], norm: float
) -> None:
    """C07: 10.95445, where means over processes give 7.23607; 4.47214; 5, and clipped to 1 a fifth of everything."""
    config = make_config(
        model={"layers": 2}, moe=TOP_K, parallel=parallel, training={**SMALL, "micro_batch_sequences": 2}
    )
    results = pool(2).run(planted_norm, config, 2, squares, 1.0)
    assert [found for found, _ in results] == pytest.approx([norm] * 2, rel=1e-6)
    assert results[0][0] == results[1][0]
    if DENSE in squares:  # both processes have the sum of its parts
        assert sorted(results[0][1]) == pytest.approx([0.6, 0.8]) and results[1][1] == pytest.approx([0.6])


def clip_planted(config: Config, world: int) -> tuple[float, dict[str, Pieces], dict[str, tuple[int, ...]]]:
    """Norm of gradients that are the same in the whole under every layout, and this process' part of them, clipped."""
    engine = build(config, world)
    for held in engine.held:
        whole = torch.randn(held.parameter.shape, generator=torch.Generator().manual_seed(len(held.name)))
        start, gradient = shard_of(held.parameter.detach()).start, local_gradient(held.parameter)
        gradient.copy_(whole[tuple(slice(s, s + n) for s, n in zip(start, gradient.shape, strict=True))])
    norm = gradient_norm(engine.held, engine.mesh)
    clip_gradients(engine.held, norm, 1.0)
    return norm, parts_of(engine, lambda p: p.grad), {h.name: tuple(h.parameter.shape) for h in engine.held}


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {"expert": 2}), (2, {"tensor": 2}), (4, {"expert": 2, "tensor": 2}), (4, {"expert": 2, "zero": 3})],
    ids=["EP 2 TP 1", "EP 1 TP 2", "EP 2 TP 2", "EP 2 ZeRO-3"],
)
def test_the_norm_and_what_clipping_leaves_depend_on_no_degree(
    pool: Pools, world: int, parallel: dict[str, int]
) -> None:
    """C07: copies are equal bit for bit, or they could not be put together."""
    config = make_config(moe=TOP_K, parallel=parallel)
    expected, pieces, shapes = clip_planted(plain(config), 1)
    norms, parts, _ = zip(*pool(world).run(clip_planted, config, world), strict=True)
    assert len(set(norms)) == 1 and norms[0] == pytest.approx(expected, rel=1e-6)
    whole, one = assemble(list(parts), shapes), assemble([pieces], shapes)
    for name, gradient in one.items():
        np.testing.assert_allclose(whole[name], gradient, rtol=1e-6, err_msg=name)
    assert math.sqrt(sum(np.square(g.astype(float)).sum() for g in whole.values())) == pytest.approx(1.0, rel=1e-6)


# C09


def decays(config: Config, world: int) -> dict[str, tuple[float, float, float]]:
    """Decay of each parameter here; and the smallest and largest of its values after one step from 1 without gradient.

    Of a tied embedding's copy as well.
    """
    engine = build(config, world)
    optimizer = build_optimizer(engine, config.training)
    groups = [(id(p), group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    assert len(groups) == len(dict(groups)) == len(engine.held)
    for held in engine.held:
        local_part(held.parameter.detach()).fill_(1.0)
        local_gradient(held.parameter).zero_()
    optimizer.step()
    values = {h.name: local_part(h.parameter.detach()) for h in engine.held}
    found = {h.name: dict(groups)[id(h.parameter)] for h in engine.held}
    return {name: (decay, values[name].min().item(), values[name].max().item()) for name, decay in found.items()}


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (1, {}),
        (2, {"expert": 2}),
        (2, {"tensor": 2}),
        (2, {"expert_tensor": 2}),
        (2, {"pipeline": 2}),
        (2, {"zero": 1}),
        (2, {"zero": 3}),
        (2, {"zero": 3, "expert": 2}),
        (4, {"zero": 3, "tensor": 2, "expert": 2}),
        (4, {"zero": 1, "pipeline": 2}),
    ],
    ids=lambda value: str(value).translate(str.maketrans("", "", "{}':,")),
)
def test_matrices_decay_and_norms_and_biases_do_not_under_any_layout(
    pool: Pools, world: int, parallel: dict[str, int]
) -> None:
    """C09: learning rate 0.1 and decay 0.1 take a 1 to 0.99 where there is no gradient."""
    config = make_config(
        moe={"predictor_coefficient": 0.1},  # which has a bias
        parallel=parallel,
        training={"learning_rate": 0.1, "weight_decay": 0.1},
    )
    names: set[str] = set()
    for found in pool(world).run(decays, config, world):
        for name, values in found.items():
            vector = name.endswith(("norm.weight", ".bias_E"))
            assert values == pytest.approx((0.0, 1.0, 1.0) if vector else (0.1, 0.99, 0.99)), name
        names |= found.keys()
    assert names == {h.name for h in build(plain(config)).held}
    assert sum(name.endswith(".bias_E") for name in names) == 3
