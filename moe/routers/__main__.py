"""`python -m moe.routers`: every router, and what to know of it before choosing one."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from moe.config import MoEConfig
from moe.routers.registry import ROUTERS

# Settings that change what routing depends on.
VARIANTS: list[dict[str, Any]] = [
    {"group": "position"},
    {"capacity_factor": 1.25},
    {"capacity_factor": 1.25, "drop_order": "choice"},
]


def listing() -> Table:
    """One row for each router, and one for each variant of it that depends on something else."""
    table = Table(title="moe.router", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in ("in training", "served", "static shapes", "balanced by", "what it does"):
        table.add_column(column)
    for name, facts in ROUTERS.items():
        plain = MoEConfig(router=name, **facts.requires)
        static = "yes" if facts.static_shapes else ""
        balance = "a loss, which it needs" if facts.needs_balance_loss else facts.balance
        row = (plain.training_verdict, facts.evaluation(plain), static, balance)
        table.add_row(name, *row, f"{facts.summary} ({facts.source})" if facts.source else facts.summary)
        for variant in VARIANTS:
            if variant.keys() <= facts.reads:
                moe = MoEConfig(router=name, **facts.requires, **variant)
                if moe.training_verdict != plain.training_verdict:
                    said = ", ".join(f"{key} = {value}" for key, value in variant.items())
                    table.add_row(f"  {said}", moe.training_verdict, facts.evaluation(moe), static, balance, "")
    return table


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m moe.routers", description="List all routers.").parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(listing())
    console.print(
        "causal: a token's routing depends on itself and its past. batch-dependent: also on other sequences of the "
        "batch. leaks: on later tokens of its own sequence. `python -m eval.causality` measures it.",
        style="dim",
    )
