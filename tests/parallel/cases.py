"""The layouts that are proven, and the routers and batches they are proven with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.parallel.layouts import make_config
from training.config import Config

# By name: what differs in [moe].
ROUTERS: dict[str, dict[str, Any]] = {
    "EC flat": {},
    "EC position": {"group": "position", "group_sequences": 4},
    "threshold": {"router": "threshold"},
    "top-k": {"router": "token_choice", "balance_coefficient": 0.05, "renormalize": True},
    "top-k, capacity": {"router": "token_choice", "balance_coefficient": 0.05, "capacity_factor": 1.0},
    "sigmoid, bias": {
        **{"router": "loss_free", "bias_rate": 0.01, "balance_coefficient": 0.01, "balance_scope": "sequence"},
    },
}
# Seeds of the data with which no routing decision is a close one, by `Case.variant`; `python -m tests.parallel.seeds`
# looks for them.
SEEDS_FILE = Path(__file__).with_name("seeds.json")
MARGIN = 1e-4
# Layouts by world size, as [parallel] sections. Their names say only what is not 1.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "dp2": {},
        "ep2": {"expert": 2},
        "tp2": {"tensor": 2},
        "etp2": {"expert_tensor": 2},
        "ep2 within tp2": {"expert": 2, "tensor": 2},
        "etp2 x tp2": {"expert_tensor": 2, "tensor": 2},
        "pp2": {"pipeline": 2},
        "zero1": {"zero": 1},
        "zero2": {"zero": 2},
        "zero3": {"zero": 3},
        "zero3 x ep2": {"zero": 3, "expert": 2},
    },
    4: {
        "dp4": {},
        "ep4": {"expert": 4},
        "tp4": {"tensor": 4},
        "etp4": {"expert_tensor": 4},
        "pp4": {"pipeline": 4},
        "zero1 x ep2": {"zero": 1, "expert": 2},
        "zero2 x ep2": {"zero": 2, "expert": 2},
        "zero3 x ep2": {"zero": 3, "expert": 2},
        "zero3 x tp2": {"zero": 3, "tensor": 2},
        "dp2 x tp2": {"tensor": 2},
        "ep2 x tp2": {"expert": 2, "tensor": 2},
        "ep4 across tp2": {"expert": 4, "tensor": 2},
        "ep2 x etp2": {"expert": 2, "expert_tensor": 2},
        "ep2 x etp2 x tp2": {"expert": 2, "expert_tensor": 2, "tensor": 2},
        "etp4 over tp2": {"expert_tensor": 4, "tensor": 2},
        "pp2 x ep2": {"pipeline": 2, "expert": 2},
        "pp2 x tp2": {"pipeline": 2, "tensor": 2},
        "pp2 x zero1": {"pipeline": 2, "zero": 1},
        "pp2 x zero3": {"pipeline": 2, "zero": 3},
        "hsdp 2x2, zero1": {"replicate": 2, "zero": 1},
        "hsdp 2x2, zero3": {"replicate": 2, "zero": 3},
        "hsdp 2x2, zero2 x ep2": {"replicate": 2, "zero": 2, "expert": 2},
    },
    8: {
        "ep4 x etp2": {"expert": 4, "expert_tensor": 2},
        "ep4 x etp2 x tp2": {"expert": 4, "expert_tensor": 2, "tensor": 2},
        "ep8 across tp2": {"expert": 8, "tensor": 2},
        "pp2 x tp2 x ep2": {"pipeline": 2, "tensor": 2, "expert": 2},
        "pp2 x zero1 x ep2": {"pipeline": 2, "zero": 1, "expert": 2},
        "pp2 x zero3 x ep2": {"pipeline": 2, "zero": 3, "expert": 2},
        "dp2 x pp2 x ep2, accumulation": {"pipeline": 2, "expert": 2},
        "zero3 x tp2 x ep2": {"zero": 3, "tensor": 2, "expert": 2},
        "hsdp 2x2 x tp2 x ep2": {"replicate": 2, "zero": 2, "tensor": 2, "expert": 2},
    },
}
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Case:
    """One job under one layout.

    Attributes:
        name: of the test.
        world: number of processes.
        sections: of the configuration, besides the small job's.
        kind: of batch.
        starve: see `layouts.train`.
    """

    name: str
    world: int
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    kind: str = "uneven"
    starve: bool = False

    @property
    def key(self) -> str:
        """Its name among those of all numbers of processes."""
        return f"{self.world}: {self.name}"

    @property
    def layout(self) -> str:
        """Its name in `LAYOUTS`, or what it is called by itself."""
        return max(
            (name for name in LAYOUTS.get(self.world, {}) if self.name.startswith(name)), key=len, default=self.name
        )

    @property
    def variant(self) -> str:
        """What the numbers depend on: cases that differ in the layout only are compared with the same reference."""
        training = {k: v for k, v in self.sections.get("training", {}).items() if k != "micro_batch_sequences"}
        told = self.sections | {
            "training": training,
            "parallel": {},
            "batch": {"kind": self.kind, "starve": self.starve},
        }
        return json.dumps({name: values for name, values in told.items() if values}, sort_keys=True)

    @property
    def seed(self) -> int:
        """Of the data."""
        seeds: dict[str, int] = json.loads(SEEDS_FILE.read_text()) if SEEDS_FILE.exists() else {}
        return seeds[self.variant]

    def config(self) -> Config:
        """Of the job in many processes."""
        return make_config(**self.sections)

    def reference(self) -> Config:
        """Of the job in one process, all rows at once."""
        whole = {"parallel": {}, "training": self.sections.get("training", {}) | {"micro_batch_sequences": 0}}
        return make_config(**(self.sections | whole))


def case(
    world: int,
    layout: str,
    router: str = "EC flat",
    parallel: dict[str, Any] | None = None,
    note: str = "",
    kind: str = "uneven",
    starve: bool = False,
    **sections: dict[str, Any],
) -> Case:
    """A case by the names of its layout and router; `parallel` and `sections` add to theirs."""
    named = {"moe": ROUTERS[router] | sections.pop("moe", {}), "parallel": LAYOUTS[world][layout] | (parallel or {})}
    name = f"{layout}, {router}" + (f", {note}" if note else "")
    return Case(name, world, sections | named, kind, starve)


def by_layout() -> list[Case]:
    """Every layout with static shapes (expert choice) and with ragged ones (top-k)."""
    return [
        case(world, layout, router)
        for world, layouts in LAYOUTS.items()
        for layout in layouts
        for router in ("EC flat", "top-k")
    ]


def by_router() -> list[Case]:
    """The other routers where tokens travel, where layers are cut, and where widths are."""
    places = ((2, "ep2"), (2, "tp2"), (4, "pp2 x ep2"))
    return [case(*place, router) for router in list(ROUTERS)[1:] if router != "top-k" for place in places]


def by_schedule() -> list[Case]:
    """Every schedule, with more micro-batches than stages; with tied embeddings, and with every loss there is."""
    losses = {
        **{"orthogonality_coefficient": 0.01, "importance_coefficient": 0.01, "mutual_information_coefficient": 0.01},
        **{"balance_scope": "global"},
    }
    found = []
    for schedule in SCHEDULES:
        parallel, few = {"schedule": schedule}, {"micro_batch_sequences": 4}
        found += [
            case(2, "pp2", parallel=parallel, note=f"{schedule}, tied", training=few, model={"tie_embeddings": True}),
            case(2, "pp2", "top-k", parallel, schedule, training={"micro_batch_sequences": 2}, moe=losses),
        ]
    uneven = {"stage_layers": [1, 3]}
    found.append(case(2, "pp2", parallel=uneven, note="layers 1 + 3", training={"micro_batch_sequences": 4}))
    tied = {"tie_embeddings": True}
    found.append(case(4, "pp2 x zero1", note="tied", model=tied))  # C03
    found.append(case(4, "pp2 x tp2", note="tied", model=tied))
    return found


def by_recompute() -> list[Case]:
    """Recompute under every kind of layout: decisions are replayed, nothing is counted twice."""
    places = ((2, "dp2"), (2, "ep2"), (2, "tp2"), (2, "pp2"), (4, "zero3 x ep2"))
    whole = [case(*place, "top-k", {"recompute": "full"}, "recompute full") for place in places]
    parts = {"recompute": "selective", "recompute_modules": ["attention", "feed_forward"]}
    some = [case(*place, "EC flat", parts, "recompute attention and feed-forward") for place in places]
    split = {"recompute": "full", "schedule": "ZBVZeroBubble"}
    return [*whole, *some, case(2, "pp2", "top-k", split, "ZBVZeroBubble, recompute full")]


def by_batch() -> list[Case]:
    """Labels, padding and tokens that are spread unequally over processes and micro-batches."""
    one = {"experts_per_token": 1, "num_experts": 4}  # B01: rank 1, then rank 0, gets no token
    small = {"micro_batch_sequences": 2}
    return [
        case(2, "dp2", kind="first half", note="a process without labels"),
        case(4, "pp2 x ep2", kind="first half", note="a process without labels"),
        case(2, "tp2", kind="padded", note="padded"),
        case(2, "ep2", kind="padded", note="padded"),
        case(4, "pp2 x ep2", "top-k", kind="padded", note="padded", training=small),
        case(4, "zero3 x tp2", "top-k", kind="documents", note="documents"),
        *(
            case(world, layout, "sigmoid, bias", parallel, f"{note}starved", starve=True, moe=one, training=small)
            for world, layout, parallel, note in (
                (2, "ep2", {}, ""),
                (2, "ep2", {"recompute": "full"}, "recompute full, "),
                (2, "zero3", {}, ""),
                (4, "ep2 x etp2", {}, ""),
                (4, "etp4 over tp2", {}, ""),
                (4, "pp2 x ep2", {}, ""),
            )
        ),
        case(2, "pp2", note="a stage without experts", model={"dense_layers": 2}),  # B10
        case(
            4,
            "pp2 x ep2",
            "top-k",
            {"stage_layers": [3, 1]},
            "experts on the last stage only",
            model={"dense_layers": 3},
        ),
    ]


def by_rare_router() -> list[Case]:
    """Every other router and its state, losses and noise: where each has something that processes must agree on."""
    rare: dict[str, dict[str, Any]] = {
        "EC, predictor, cap 3": {"predictor_coefficient": 0.1, "expert_cap": 3},
        "mixture of depths": {
            "router": "mixture_of_depths",
            "num_experts": 1,
            "experts_per_token": 1,
            "depth_capacity": 0.5,
        },
        "quantile": {"router": "quantile"},
        "remoe": {"router": "remoe", "l1_initial": 0.01},
        "gshard": {"router": "gshard", "capacity_factor": 1.0, "drop_order": "choice", "balance_coefficient": 0.01},
        "noisy top-k": {
            "router": "noisy_top_k",
            "load_coefficient": 0.01,
            "importance_coefficient": 0.01,
            "jitter": 0.01,
        },
        "sinkhorn": {"router": "sinkhorn"},
        "hash": {"router": "hash", "z_coefficient": None},
        "forced balance": {"router": "token_choice", "forced_balance": True},
    }
    places = ((2, "tp2"), (4, "pp2 x ep2"))
    found = []
    for name, moe in rare.items():
        for world, layout in places:
            parallel = LAYOUTS[world][layout] | ({"expert": 1} if moe.get("num_experts") == 1 else {})
            found.append(Case(f"{layout}, {name}", world, {"moe": moe, "parallel": parallel}))
    soft = {"router": "soft", "z_coefficient": None}
    return [*found, Case("zero3, soft", 2, {"moe": soft, "parallel": {"zero": 3}})]


def sixteen() -> Case:
    """PP2 x DP4 x TP2, with the experts over all eight processes of a stage."""
    parallel = {"pipeline": 2, "tensor": 2, "expert": 8, "schedule": "GPipe"}
    return Case("pp2 x dp4 x tp2, ep8", 16, {"moe": {}, "parallel": parallel})


def every_case() -> list[Case]:
    """All but the one with sixteen processes."""
    return [*by_layout(), *by_router(), *by_schedule(), *by_recompute(), *by_batch(), *by_rare_router()]
