"""`python -m moe.routers`: every router, and what to know of it."""

from __future__ import annotations

from dataclasses import fields

from rich import box
from rich.console import Console
from rich.table import Table

from moe.config import MoEConfig
from moe.routers.registry import ROUTERS

# Configurations in which a router's dependence differs from its default one.
VARIANTS: dict[str, list[dict[str, object]]] = {
    "expert_choice": [{"group": "position"}],
    "mixture_of_depths": [{"group": "position"}],
    "soft": [{"group": "position"}],
    "token_choice": [{"capacity_factor": 1.25}, {"capacity_factor": 1.25, "drop_order": "choice"}],
    "noisy_top_k": [{"capacity_factor": 1.25}],
    "gshard": [{"capacity_factor": 1.25}, {"capacity_factor": 1.25, "drop_order": "choice"}],
    "loss_free": [{"capacity_factor": 1.25}],
    "quantile": [{"capacity_factor": 1.25}],
}
SIZES: dict[str, dict[str, object]] = {"mixture_of_depths": {"num_experts": 1, "experts_per_token": 1},
                                       "base": {"experts_per_token": 1}}  # fmt: skip


def listing() -> Table:
    """One row for each router, and for each variant that changes its dependence."""
    table = Table(title="moe.router", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("router", "in training", "when served", "static shapes", "balance loss", "what it does", "source"):
        table.add_column(column)
    for name, facts in ROUTERS.items():
        for variant in [{}, *VARIANTS.get(name, [])]:
            moe = MoEConfig(router=name, **{**SIZES.get(name, {}), **variant})  # type: ignore[arg-type]
            said = ", ".join(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in variant.items())
            static = "yes" if facts.static_shapes else "no"
            needs = "needed" if facts.needs_balance_loss else "no"
            if variant:
                table.add_row(f"  {said}", moe.training_verdict, facts.evaluation(moe), static, needs, "", "")
            else:
                table.add_row(name, moe.training_verdict, facts.evaluation(moe), static, needs, facts.summary, facts.source)
    return table
