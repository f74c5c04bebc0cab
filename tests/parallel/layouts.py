"""One training job under any layout: what each process has of its numbers, and how the parts are put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batches import Batch
from moe.groups import RoutingGroup, expert_choice_capacity
from moe.routers.base import Router
from moe.routers.capped import capped_affinity
from moe.routers.expert_choice import ExpertChoiceRouter
from moe.routers.loss_free import LossFreeRouter
from moe.routing import Routing, to_groups
from parallel.engine import Engine
from parallel.shards import local_part, shard_of
from training.build import build_engine
from training.config import Config
from training.load_config import config_from_dict
from training.routing_telemetry import RoutingTelemetry
from training.step import StepResult, train_step

STEPS = 3
ROWS, LENGTH = 16, 8
MODEL = {
    **{"vocabulary_size": 41, "width": 24, "layers": 4, "heads": 4, "kv_heads": 4, "qk_norm": "width"},
    **{"dense_layers": 1, "feed_forward_width": 20},
}
MOE = {
    **{"router": "expert_choice", "num_experts": 8, "experts_per_token": 2, "expert_width": 12, "shared_width": 8},
    **{"group_sequences": 2, "allow_leak": True, "z_coefficient": 0.02},
}
TRAINING = {
    **{"steps": STEPS, "warmup_steps": 0, "schedule": "cosine", "batch_sequences": ROWS, "sequence_length": LENGTH},
    **{"learning_rate": 0.05, "clip_norm": 0.5},
}
Pieces = list[tuple[tuple[int, ...], np.ndarray]]


def make_config(**sections: dict[str, Any]) -> Config:
    """The small job, with other values where they are given; None takes a value away."""
    base: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "moe": MOE,
        "training": TRAINING,
        "parallel": {},
        "run": {"seed": 5},
    }
    merged = {name: values | sections.get(name, {}) for name, values in base.items()}
    return config_from_dict({n: {k: v for k, v in s.items() if v is not None} for n, s in merged.items()})


def make_batch(seed: int, step: int, kind: str = "uneven") -> Batch:
    """Rows of which very different numbers of labels count.

    Args:
        seed: of the data.
        step: of the job.
        kind: "uneven"; "first half" leaves the last rows without any label; "padded" has padding behind the labels;
            "documents" has several a row.
    """
    generator = torch.Generator().manual_seed(1000 * seed + step)
    window = torch.randint(1, MODEL["vocabulary_size"], (ROWS, LENGTH + 1), generator=generator)
    # Rows begin with different tokens and have one document each: nothing ties.
    window[:, 0] = torch.randperm(MODEL["vocabulary_size"] - 1, generator=generator)[:ROWS] + 1
    label_BS = window[:, 1:].clone()
    if kind == "documents":
        window[:, 3] = window[::2, 5] = 0
    valid_BS = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    for row in range(ROWS):
        half = LENGTH if row < ROWS // 2 else 0
        count = half if kind == "first half" else (LENGTH, 3, 1, 7, 2)[row % 5]
        label_BS[row, count:] = -100
        valid_BS[row, count:] = False
    padded = valid_BS if kind == "padded" else None
    return Batch(window[:, :-1].contiguous(), label_BS, torch.zeros(ROWS, dtype=torch.int64), padded)


@dataclasses.dataclass
class Part:
    """What one process has of a job.

    Attributes:
        gradients: of each step, by parameter: where this process' part begins, and the part.
        weights: likewise, after the last step.
        results: of each step.
        records: routing telemetry of each step.
        state: the routers' buffers after the last step.
        shapes: of the whole parameters that it has a part of.
    """

    gradients: list[dict[str, Pieces]]
    weights: dict[str, Pieces]
    results: list[StepResult]
    records: list[dict[str, Any]]
    state: dict[str, np.ndarray]
    shapes: dict[str, tuple[int, ...]]


def train(
    config: Config,
    world: int,
    seed: int,
    kind: str = "uneven",
    starve: bool = False,
    observe: Callable[[int, int, Routing], None] | None = None,
    routers: dict[int, Router] | None = None,
) -> Part:
    """Run the job; called on every process together.

    Args:
        config: of the job.
        world: how many processes it has.
        seed: of the data.
        kind: see `make_batch`.
        starve: send all tokens to the first expert, then all to the last, then to the first again.
        observe: called with (step, layer, routing).
        routers: filled with the routers by layer.
    """
    engine = build_engine(config, world, torch.device("cpu"), torch.float32)
    if routers is not None:
        routers |= {layer.index: layer.router for model in engine.models for layer in model.moe_layers()}
    optimizer = torch.optim.SGD([h.parameter for h in engine.held], lr=0.1, foreach=False)
    gradients: list[dict[str, Any]] = []

    def keep(*_: Any) -> None:
        gradients.append(parts_of(engine, lambda parameter: parameter.grad))

    optimizer.register_step_pre_hook(keep)
    telemetry = RoutingTelemetry.of(engine, LENGTH)
    results, records = [], []
    for step in range(STEPS):
        telemetry.start_step(detailed=True)
        mine = engine.mesh.own_rows(ROWS)
        batch = Batch(*(None if part is None else part[mine] for part in make_batch(seed, step, kind)))
        for model in engine.models if starve else ():
            for layer in model.moe_layers():
                assert isinstance(layer.router, LossFreeRouter)
                layer.router.bias_E.fill_(-100.0)[0 if step % 2 == 0 else -1] = 100.0

        def both(layer: int, routing: Routing, step: int = step) -> None:
            telemetry.observe(layer, routing)
            if observe is not None:
                observe(step, layer, routing)

        results.append(train_step(engine, optimizer, batch, config, step, 0, both))
        records.append(telemetry.end_step(engine) or {})
    weights = parts_of(engine, lambda parameter: parameter)
    shapes = {h.name: tuple(h.parameter.shape) for h in engine.held}
    state = {n: b.numpy().copy() for m in engine.models for n, b in m.named_buffers()}
    return Part(gradients, weights, results, records, state, shapes)


def parts_of(engine: Engine, value: Any) -> dict[str, Pieces]:
    """This process' parts, with where they begin in the whole; a tied embedding has two."""
    found: dict[str, Pieces] = {}
    for h in engine.held:
        tensor: Tensor = value(h.parameter)
        start = shard_of(h.parameter.detach()).start
        found.setdefault(h.name, []).append((start, local_part(tensor).detach().numpy().copy()))
    return found


def assemble(parts: list[dict[str, Pieces]], shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The whole tensors; copies must agree bit for bit, and every element must be somewhere."""
    whole = {name: np.full(shape, np.nan, dtype=np.float32) for name, shape in shapes.items()}
    for part in parts:
        for name, pieces in part.items():
            for start, piece in pieces:
                place = whole[name][tuple(slice(s, s + n) for s, n in zip(start, piece.shape, strict=True))]
                held = ~np.isnan(place)
                assert np.array_equal(place[held], piece[held]), f"copies of {name} differ"
                place[...] = piece
    for name, tensor in whole.items():
        assert not np.isnan(tensor).any(), f"{np.isnan(tensor).sum()} elements of {name} are nowhere (or not a number)"
    return whole


def differences(
    reference: list[Part], parts: list[Part], limit: float = 1e-5, seen: list[float] | None = None
) -> list[str]:
    """What a layout got wrong, in words; empty if nothing. `seen` is filled with all relative differences."""
    seen = [] if seen is None else seen
    shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
    wrong = []
    if shapes != reference[0].shapes:
        wrong.append(f"parameters {sorted(set(shapes) ^ set(reference[0].shapes))} are here or there only")
    for step in range(STEPS):
        want = assemble([part.gradients[step] for part in reference], reference[0].shapes)
        got = assemble([part.gradients[step] for part in parts], shapes)
        wrong += [f"step {step}: gradient of {fault}" for fault in _apart(want, got, limit, seen)]
        for rank, part in enumerate(parts):
            a, b = reference[0].results[step], part.results[step]
            pairs = {"loss": (a.loss, b.loss), "gradient norm": (a.gradient_norm, b.gradient_norm)}
            pairs |= {name: (value, b.auxiliary.get(name, np.nan)) for name, value in a.auxiliary.items()}
            for name, (x, y) in pairs.items():
                seen.append(abs(x - y) / abs(x) if x else 0.0)
                if not abs(x - y) <= limit * abs(x):
                    wrong.append(f"step {step}, rank {rank}: {name} {y / x:.6f}x")
            if a.tokens != b.tokens or a.auxiliary.keys() != b.auxiliary.keys():
                wrong.append(f"step {step}, rank {rank}: {b.tokens} labels and losses {sorted(b.auxiliary)}")
            wrong += _records_apart(reference[0].records[step], part.records[step], f"step {step}, rank {rank}")
    want = assemble([part.weights for part in reference], reference[0].shapes)
    got = assemble([part.weights for part in parts], shapes)
    wrong += [f"weight {fault}" for fault in _apart(want, got, limit, seen)]
    for part in parts:
        for name, value in part.state.items():
            if not np.allclose(value, reference[0].state[name], rtol=1e-4, atol=1e-6):
                wrong.append(f"router state {name}: {value} instead of {reference[0].state[name]}")
    return wrong


def _apart(want: dict[str, np.ndarray], got: dict[str, np.ndarray], limit: float, seen: list[float]) -> list[str]:
    """Tensors whose difference is over `limit` of their norm.

    Some gradients are 0 but for rounding (a predictor's bias while every expert takes its exact share): those below a
    ten-thousandth of all together are measured against that.
    """
    faults = []
    sizes = {name: np.linalg.norm(x.astype(np.float64)) for name, x in want.items()}
    floor = 1e-4 * np.linalg.norm(list(sizes.values()))
    for name, x in want.items():
        y = got.get(name, np.full_like(x, np.nan)).astype(np.float64)
        error = np.linalg.norm(y - x) / max(sizes[name], floor)
        seen.append(float(error))
        if not error <= limit:
            faults.append(f"{name} {np.linalg.norm(y) / max(sizes[name], 1e-30):.2f}x, off by {error:.1e}")
    return faults


def _records_apart(want: dict[str, Any], got: dict[str, Any], where: str) -> list[str]:
    faults = []
    for name, value in want.items():
        x, y = (np.array(v if v is not None else np.nan, dtype=float) for v in (value, got.get(name)))
        exact = name in ("tokens", "counts", "fan_out", "stretch_counts", "stretch_tokens", "stretch_dropped", "layers")
        if x.shape != y.shape or not np.allclose(
            x, y, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6, equal_nan=True
        ):
            faults.append(f"{where}: telemetry {name} {y.tolist()} instead of {x.tolist()}")
    return faults


def smallest_margin(config: Config, seed: int, kind: str = "uneven", starve: bool = False) -> float:
    """How close the closest routing decision of the job is, in scores: nothing may hang on rounding."""
    margins: list[float] = []
    moe = config.moe
    group = RoutingGroup(moe.group, moe.group_sequences, LENGTH, moe.chunk_length)

    def look(step: int, layer: int, routing: Routing) -> None:
        scores_TE = routing.scores().detach()
        valid_T = torch.ones_like(scores_TE[:, 0], dtype=torch.bool) if routing.valid_T is None else routing.valid_T
        if isinstance(routers[layer], ExpertChoiceRouter) and step < config.threshold_step:
            capacity = expert_choice_capacity(moe, group)
            value_GNE = to_groups(scores_TE.masked_fill(~valid_T[:, None], -torch.inf), group)
            if moe.expert_cap:
                value_GNE = capped_affinity(value_GNE.transpose(1, 2), capacity, moe.expert_cap).transpose(1, 2)
            falling_GNE = value_GNE.sort(1, descending=True).values
            if capacity < falling_GNE.shape[1]:  # else everybody is taken
                margins.append((falling_GNE[:, capacity - 1] - falling_GNE[:, capacity]).nan_to_num(1.0).min().item())
        else:
            if moe.capacity_factor is not None and moe.drop_order != "position":
                # The order of a token's choices decides who is dropped. By score that would be the tokens' order too.
                assert moe.drop_order == "choice"
                chosen_TK = scores_TE[valid_T].topk(moe.experts_per_token).values
                margins.append(-chosen_TK.diff(dim=1).max().item())
            margins.append(routers[layer].decision_distance(routing).detach()[valid_T].min().item())

    routers: dict[int, Router] = {}
    train(config, 1, seed, kind, starve, look, routers)
    return min(margins, default=torch.inf)
