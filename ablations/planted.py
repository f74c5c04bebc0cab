"""Which routers find the experts that are there?

    python -m ablations.planted [--kinds id context] [--routers NAME ...] [--seeds 3] [--steps 400] [--output FOLDER]

trains one mixture layer for each router on planted mixtures (`data/planted.py`), serves it as every model is served
(mode "causal"), and compares it with the same layer under the best routing, which is known: one expert for each
cluster. Prints a table for each kind of mixture and writes FOLDER/planted.json and planted.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from data.atomic import write_atomically
from data.planted import Kind, PlantedBatch, PlantedMixture
from eval.clustering import adjusted_rand_index, contingency
from eval.command import run_command, terminal
from eval.routing_metrics import fan_out_histogram, max_violation, zero_expert_fraction
from moe.config import ModelConfig, MoEConfig
from moe.initialization import build_model
from moe.layer import MoELayer
from moe.routers.base import Router
from moe.routers.registry import ROUTERS
from moe.routing import Decision, Routing, RoutingContext
from training.config import TrainingConfig
from training.optimizer import build_optimizer, learning_rate

CLUSTERS = 8  # and as many experts
VOCABULARY = 4096
WIDTH = 32  # of the input and of an expert
ROWS, LENGTH = 4, 64  # of a training batch; the rows are one routing group
HELDOUT_ROWS = 64
HELDOUT_SEED = 2**40  # training batches are seeds from 0
LEARNING_RATE = 1e-2
WARMUP_STEPS = 20

ORACLE = "oracle"
# What a router needs besides the sizes that all share. One that is not here needs nothing more.
PRESETS: dict[str, dict[str, Any]] = {
    "token_choice": {"balance_coefficient": 0.01},
    # The weights are a softmax over the chosen: of one expert it is 1 and the router has no gradient.
    "noisy_top_k": {"experts_per_token": 2, "importance_coefficient": 0.1, "load_coefficient": 0.1},
    "gshard": {"experts_per_token": 2, "balance_coefficient": 0.01},
    # The paper's 1e-8 and 1.2 are for long runs: in a few hundred steps such a factor overshoots.
    "remoe": {"l1_initial": 1e-4, "l1_multiplier": 1.05},
    "soft": {"slots_per_expert": ROWS * LENGTH // CLUSTERS},  # as many slots as tokens
}
ROUTING_MEASURES = ("adjusted_rand_index", "experts_per_token", "zero_expert_fraction", "max_violation")
OMITTED = {"mixture_of_depths": "it has one expert, so there is nothing to find"}


@dataclass(frozen=True)
class Score:
    """One router on one mixture, held out and under causal routing.

    Attributes:
        kind: of the mixture.
        router: its name in the registry, or "oracle".
        seed: of the mixture, of the layer's weights and of the router's noise.
        error: mean squared error as a share of the targets' variance: 1 for a layer that knows nothing.
        regret: error less that of the oracle of the same mixture and seed; below 0 where a router does better than
            one expert for each cluster.
        step_milliseconds: of a training step, the mean.
        adjusted_rand_index: between clusters and experts, over assignments; None where a layer makes none.
        experts_per_token: mean.
        zero_expert_fraction: share of the tokens that get no expert, hence the output 0; None as above.
        max_violation: MaxVio of the held-out load. The clusters are unequal, so the oracle's is not 0. None as above.
    """

    kind: str
    router: str
    seed: int
    error: float
    regret: float
    step_milliseconds: float
    adjusted_rand_index: float | None
    experts_per_token: float | None
    zero_expert_fraction: float | None
    max_violation: float | None


class OracleRouter(Router):
    """Sends each token to its cluster's expert, with weight 1. It is given clusters in place of token ids."""

    def decide(self, scores_TE: Tensor, logits_TE: Tensor, context: RoutingContext) -> Decision:
        """See `Router.decide`."""
        assert context.token_BS is not None
        return Decision.from_mask(F.one_hot(context.token_BS.flatten(), self.config.num_experts).bool())

    def weights(self, scores_TE: Tensor, decision: Decision) -> Tensor:
        """See `Router.weights`."""
        return torch.ones_like(scores_TE)


def moe_config(router: str) -> MoEConfig:
    """The configuration a router is compared under."""
    sizes = {"num_experts": CLUSTERS, "experts_per_token": 1, "expert_width": WIDTH, "group_sequences": ROWS}
    # The oracle's layer is any other's; only its router is put in later.
    name = "token_choice" if router == ORACLE else router
    return MoEConfig(router=name, **{**sizes, **PRESETS.get(router, {})})


def build_layer(router: str, seed: int) -> nn.Module:
    """A layer filled as in a model: every router's has the same experts' weights for the same seed."""
    model = ModelConfig(vocabulary_size=1, width=WIDTH, layers=1, heads=1)
    layer = build_model(model, moe_config(router), seed).get_submodule("blocks.0.feed_forward")
    if router == ORACLE:
        assert isinstance(layer, MoELayer)
        layer.router = OracleRouter(layer.config, WIDTH)
        nn.init.zeros_(layer.router.weight_ED)
        layer.router.reset_buffers()
    return layer


def train(layer: nn.Module, router: str, mixture: PlantedMixture, steps: int) -> float:
    """Train a layer on fresh batches; milliseconds of a step."""
    schedule = TrainingConfig(
        steps=steps,
        learning_rate=LEARNING_RATE,
        warmup_steps=min(WARMUP_STEPS, steps),
        decay_fraction=0.5,
        weight_decay=0.0,
    )
    optimizer = build_optimizer(layer, schedule)
    threshold_step = round(moe_config(router).threshold_after * steps)
    seconds = 0.0
    for step in range(steps):
        batch = mixture.sample(step, ROWS, LENGTH)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, step)
        start = time.perf_counter()
        context = RoutingContext(
            ROWS, LENGTH, mode="train", threshold_phase=step >= threshold_step, seed=mixture.seed, step=step
        )
        F.mse_loss(forward(layer, router, batch, context), batch.target_BSD).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if isinstance(layer, MoELayer):
            type(layer.router).after_step_together([layer.router])
        seconds += time.perf_counter() - start
    return 1000 * seconds / steps


def forward(layer: nn.Module, router: str, batch: PlantedBatch, context: RoutingContext) -> Tensor:
    """(B, S, D) outputs of any layer."""
    if router == "dense":
        return layer(batch.x_BSD)
    context.token_BS = batch.cluster_BS if router == ORACLE else batch.token_BS
    return layer(batch.x_BSD, context)


@torch.no_grad()
def heldout(layer: nn.Module, router: str, mixture: PlantedMixture) -> tuple[float, dict[str, float | None]]:
    """The error of a trained layer, and the measures of its routing by their names in `Score`."""
    batch = mixture.sample(HELDOUT_SEED, HELDOUT_ROWS, LENGTH)
    seen: list[Routing] = []
    context = RoutingContext(HELDOUT_ROWS, LENGTH, mode="causal", observe=lambda _, routing: seen.append(routing))
    error = F.mse_loss(forward(layer, router, batch, context), batch.target_BSD) / batch.target_BSD.var()
    if not seen:
        return error.item(), dict.fromkeys(ROUTING_MEASURES)
    assigned_TE = seen[0].assigned_TE().numpy()
    counts_ME = contingency(batch.cluster_BS.flatten(), assigned_TE, CLUSTERS)
    values = (
        adjusted_rand_index(counts_ME),
        float(assigned_TE.sum(1).mean()),
        zero_expert_fraction(fan_out_histogram(assigned_TE)),
        max_violation(counts_ME.sum(0)),
    )
    # JSON has no nan: a ratio of nothing is missing.
    finite = [value if math.isfinite(value) else None for value in values]
    return error.item(), dict(zip(ROUTING_MEASURES, finite, strict=True))


def compare(
    kinds: Sequence[Kind],
    routers: Sequence[str],
    seeds: int,
    steps: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Score]:
    """Train and score every router, and the oracle, on `seeds` mixtures of each kind.

    Args:
        kinds: of mixture.
        routers: names in the registry.
        seeds: how many, from 0.
        steps: of training.
        say: told what is being done.

    Raises:
        ValueError: if a layer's error is not a number.
    """
    threads = torch.get_num_threads()
    # A second thread gains nothing in so small a layer, and waiting for it is slow where cores are shared.
    torch.set_num_threads(1)
    try:
        return [
            score
            for kind in kinds
            for seed in range(seeds)
            for score in _compare_on(PlantedMixture(CLUSTERS, VOCABULARY, WIDTH, kind, seed), routers, steps, say)
        ]
    finally:
        torch.set_num_threads(threads)


def _compare_on(
    mixture: PlantedMixture, routers: Sequence[str], steps: int, say: Callable[[str], None]
) -> Iterator[Score]:
    oracle_error = math.nan
    for router in (ORACLE, *routers):
        say(f"{mixture.kind}, seed {mixture.seed}: {router}")
        layer = build_layer(router, mixture.seed)
        step_milliseconds = train(layer, router, mixture, steps)
        error, measures = heldout(layer, router, mixture)
        if not math.isfinite(error):
            raise ValueError(f"{router} diverged ({mixture.kind}, seed {mixture.seed}): its held-out error is {error}")
        if router == ORACLE:
            oracle_error = error
        yield Score(mixture.kind, router, mixture.seed, error, error - oracle_error, step_milliseconds, **measures)


COLUMNS = {
    "regret": "regret",
    "error": "error",
    "adjusted_rand_index": "adjusted Rand",
    "zero_expert_fraction": "no expert",
    "experts_per_token": "experts/token",
    "max_violation": "MaxVio",
    "step_milliseconds": "ms/step",
}
NOTE = (
    "Held out, causal routing; mean and standard deviation over seeds; sorted by regret. Regret: squared error above "
    "the oracle's (one expert for each cluster), as a share of the targets' variance, like the error. Adjusted Rand "
    "index between clusters and experts, over assignments: 1 the same, 0 chance. With two experts a token it cannot be "
    "1, and the regret is that of twice the computation. MaxVio of the oracle is not 0: the clusters are unequal."
)


def summarise(scores: Sequence[Score], kind: str) -> list[dict[str, Any]]:
    """One entry a router, by rising regret: {"router": name, measure: [mean, sample standard deviation], ...}.

    The deviation of one seed is None, and so is a measure that the layer does not have.
    """
    of_kind = [score for score in scores if score.kind == kind]
    entries = []
    for router in dict.fromkeys(score.router for score in of_kind):
        entry: dict[str, Any] = {"router": router}
        for measure in COLUMNS:
            values = [getattr(score, measure) for score in of_kind if score.router == router]
            if None in values:
                entry[measure] = None
            else:
                entry[measure] = [statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None]
        entries.append(entry)
    return sorted(entries, key=lambda entry: entry["regret"][0])


def cells(entry: dict[str, Any]) -> list[str]:
    """The text of one row."""
    row = [entry["router"]]
    for measure in COLUMNS:
        if entry[measure] is None:
            row.append("-")
            continue
        mean, deviation = entry[measure]
        digits = 1 if measure == "step_milliseconds" else 2
        row.append(f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}"))
    return row


def markdown(summary: dict[str, list[dict[str, Any]]], seeds: int, steps: int) -> str:
    """All tables."""
    lines = ["# Planted experts", "", f"{seeds} seeds, {steps} steps of {ROWS} x {LENGTH} tokens. {NOTE}"]
    for kind, entries in summary.items():
        lines += ["", f"## Clusters by {kind}", "", "| " + " | ".join(["router", *COLUMNS.values()]) + " |"]
        lines.append("|" + "---|" * (len(COLUMNS) + 1))
        lines += ["| " + " | ".join(cells(entry)) + " |" for entry in entries]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    known = [name for name in ROUTERS if name not in OMITTED]
    parser = argparse.ArgumentParser(
        prog="python -m ablations.planted", description="Which routers find the experts that are there?"
    )
    parser.add_argument(
        "--kinds", nargs="+", default=list(get_args(Kind)), help="of mixture: id, context (default both)"
    )
    parser.add_argument("--routers", nargs="+", default=known, help="default: all; the oracle is always there")
    parser.add_argument("--seeds", type=int, default=3, help="mixtures of each kind (default 3)")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default 400)")
    parser.add_argument("--output", type=Path, default=Path("runs/planted"), help="folder (default runs/planted)")
    options = parser.parse_args(arguments)
    _check(options, known)
    options.output.mkdir(parents=True, exist_ok=True)  # refused now, not after the work
    kinds, routers = list(dict.fromkeys(options.kinds)), list(dict.fromkeys(options.routers))
    console = terminal()
    with console.status("starting") as status:
        scores = compare(kinds, routers, options.seeds, options.steps, status.update)
    summary = {kind: summarise(scores, kind) for kind in kinds}
    for kind, entries in summary.items():
        table = Table(title=f"clusters by {kind}", title_justify="left")
        table.add_column("router", no_wrap=True)
        for heading in COLUMNS.values():
            table.add_column(heading, justify="right")
        for entry in entries:
            table.add_row(*cells(entry))
        console.print(table)
    console.print(NOTE, style="dim", highlight=False)
    report = {
        "steps": options.steps,
        "seeds": options.seeds,
        "configurations": {router: asdict(moe_config(router)) for router in routers},
        "summary": summary,
        "scores": [asdict(score) for score in scores],
    }
    for name, content in {
        "planted.json": json.dumps(report, indent=1, allow_nan=False) + "\n",
        "planted.md": markdown(summary, options.seeds, options.steps),
    }.items():
        with write_atomically(options.output / name) as file:
            file.write(content.encode())
        console.print(f"wrote {options.output / name}", highlight=False, soft_wrap=True)


def _check(options: argparse.Namespace, known: Sequence[str]) -> None:
    for router in options.routers:
        if router in OMITTED:
            raise ValueError(f"--routers {router}: left out, because {OMITTED[router]}")
        if router not in known:
            raise ValueError(f"--routers {router}: must be among {' '.join(known)}")
    for kind in options.kinds:
        if kind not in get_args(Kind):
            raise ValueError(f"--kinds {kind}: must be among {' '.join(get_args(Kind))}")
    for name in ("seeds", "steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")


if __name__ == "__main__":
    run_command(main)
