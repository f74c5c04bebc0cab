"""Audits of a run: bias, leakage of training text, energy.

    python -m eval.audit RUN [bias|leakage|energy|all]

Each prints a table and writes RUN/eval/audit_NAME.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from data.atomic import write_json
from eval.audits.bias import audit_bias, bias_table
from eval.audits.energy import (
    CPU_WATTS_PER_CORE,
    GPU_WATTS,
    GRID_GRAMS_PER_KWH,
    GRID_SOURCE,
    audit_energy,
    energy_table,
)
from eval.audits.leakage import NEW_TOKENS, PER_DOMAIN, PROMPT_TOKENS, audit_leakage, leakage_table
from eval.command import require_at_least, run_command, terminal
from eval.report_tables import Table, print_table
from training.run import Run

FORMAT_VERSION = 1
AUDITS = ("bias", "leakage", "energy")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.audit", description="Audit a run.")
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("audit", nargs="?", choices=[*AUDITS, "all"], default="all", help="which (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, sampling and intervals (default 0)")
    leakage = parser.add_argument_group("leakage")
    leakage.add_argument("--prompts", type=int, default=PER_DOMAIN, help=f"of each kind and domain ({PER_DOMAIN})")
    leakage.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, help=f"default {PROMPT_TOKENS}")
    leakage.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help=f"of a continuation ({NEW_TOKENS})")
    leakage.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    energy = parser.add_argument_group("energy")
    energy.add_argument("--device", choices=("cpu", "gpu"), help="default: what the run recorded")
    energy.add_argument("--devices", type=int, help="cores or GPUs of the whole job (default: the recorded threads)")
    energy.add_argument(
        "--watts", type=float, help=f"of each (default: {CPU_WATTS_PER_CORE:g} a core, {GPU_WATTS:g} a GPU)"
    )
    energy.add_argument("--grid", type=float, help=f"g CO2e a kWh (default: {GRID_GRAMS_PER_KWH:g}, {GRID_SOURCE})")
    energy.add_argument("--overhead", type=float, default=1.0, help="of the building, PUE (default 1: none)")
    options = parser.parse_args(arguments)
    require_at_least(0, seed=options.seed)
    console = terminal(130)
    run = Run.open(options.run)
    chosen = AUDITS if options.audit == "all" else (options.audit,)
    makers: dict[str, Callable[[argparse.Namespace, Run], tuple[dict[str, Any], Table]]] = {
        "bias": _bias,
        "leakage": _leakage,
        "energy": _energy,
    }
    for name in chosen:
        with console.status(name):
            found, table = makers[name](options, run)
        path = run.folder / "eval" / f"audit_{name}.json"
        content = {"format_version": FORMAT_VERSION, "run": run.folder.name, **found}
        write_json(path, content)
        print_table(console, table)
        console.print(f"wrote {path}\n", highlight=False, soft_wrap=True)


def _bias(options: argparse.Namespace, run: Run) -> tuple[dict[str, Any], Table]:
    corpus, checkpoint = run.corpus(), run.checkpoint()
    found = audit_bias(run.model(checkpoint=checkpoint), corpus.tokenizer, options.seed)
    return {"step": checkpoint.step, **found}, bias_table(found)


def _leakage(options: argparse.Namespace, run: Run) -> tuple[dict[str, Any], Table]:
    corpus, checkpoint = run.corpus(), run.checkpoint()
    found = audit_leakage(
        run.model(checkpoint=checkpoint),
        corpus,
        run.config,
        checkpoint.step,
        options.prompts,
        options.prompt_tokens,
        options.new_tokens,
        options.temperature,
        options.seed,
    )
    return found, leakage_table(found)


def _energy(options: argparse.Namespace, run: Run) -> tuple[dict[str, Any], Table]:
    found = audit_energy(run, options.device, options.devices, options.watts, options.grid, options.overhead)
    return found, energy_table(found)


if __name__ == "__main__":
    run_command(main)
