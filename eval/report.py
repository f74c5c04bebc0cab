"""The scoreboard of a run.

    python -m eval.report RUN [--tokens N] [--no-figures]

Prints it, and writes RUN/eval/report.json, report.md and the figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import write_atomically
from eval import figures
from eval.command import run_command, terminal
from eval.report_tables import markdown, print_table, tables
from eval.scoreboard import compute
from training.run import Run


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.report", description="Score a run on its held-out text and describe its routing."
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--tokens", type=int, help="held-out tokens of each domain (default: the run's final_tokens)")
    parser.add_argument("--no-figures", action="store_true", help="write no figures (matplotlib is not needed then)")
    options = parser.parse_args(arguments)
    console = terminal()
    run = Run.open(options.run)
    with console.status("opening") as status:
        report = compute(run, options.tokens, status.update)
        status.update("writing")
        written = write_report(run, report, with_figures=not options.no_figures)
    for table in tables(report):
        print_table(console, table)
        console.print()
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def write_report(run: Run, report: dict[str, Any], with_figures: bool = True) -> list[Path]:
    """Write report.json, report.md and figures to RUN/eval/, each complete or not at all.

    Args:
        run: whose folder is written.
        report: from `scoreboard.compute`.
        with_figures: also draw; needs matplotlib.

    Returns:
        The files.
    """
    folder = run.folder / "eval"
    # Drawn before anything is written: a missing matplotlib leaves the folder as it was.
    files = {f"{name}.png": figures.to_png(figure) for name, figure in _figures(run, report)} if with_figures else {}
    files["report.json"] = (json.dumps(report, indent=1) + "\n").encode()
    files["report.md"] = markdown(report, sorted(files)).encode()
    folder.mkdir(exist_ok=True)
    for name, content in sorted(files.items()):
        with write_atomically(folder / name) as file:
            file.write(content)
    return [folder / name for name in sorted(files)]


def _figures(run: Run, report: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name and figure of what there is to draw."""
    drawn = []
    switch = run.config.threshold_step if 0 < run.config.threshold_step < report["step"] else None
    if metrics := run.metrics():
        drawn.append(("loss", figures.loss_figure(metrics, switch, f"Loss of {report['run']}")))
    routing = report["routing"]
    if routing is not None:
        names = [f"layer {layer['layer']}" for layer in routing["layers"]]
        if records := run.routing_records():
            drawn.append(("load", figures.load_figure(records, switch, names)))
        share_LME = np.array([layer["share_of_domain_tokens"] for layer in routing["layers"]], dtype=np.float64)
        drawn.append(("domains", figures.domain_figure(share_LME, routing["domains"], names)))
    return drawn


if __name__ == "__main__":
    run_command(main)
