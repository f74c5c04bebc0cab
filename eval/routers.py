"""From expert choice to causal: one checkpoint under five inference routers.

    python -m eval.routers RUN [--tokens N] [--rows N]

| row | how tokens meet experts |
|---|---|
| as trained | the training router, in whole routing groups: where that leaks, it is never a result |
| EMA threshold | the cutoffs tracked in training: how a run is evaluated and served unless told otherwise |
| recalibrated | cutoffs set to exact quantiles of held-out text that is not scored |
| predictor | a linear guess of the training router's choice, fitted here where none was trained |
| token choice | each token's k best experts |

All causal rows score the same windows of held-out text. A row that the run's router cannot have is left out and the
reason given; a router that is served in one way only has the row "as served". The table is printed, and
RUN/eval/routers.json and routers.md are written. The checkpoint stays as it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table as RichTable

from data.atomic import write_atomically
from eval.calibration import PREDICTOR_STEPS
from eval.command import run_command, terminal
from eval.inference_routers import AS_TRAINED, PREDICTOR, RECALIBRATED, compute
from eval.report_tables import MISSING, Table
from moe.routers.registry import Verdict
from training.run import Run

VERDICTS: dict[Verdict, str] = {
    "causal": "causal",
    "batch-dependent": "batch-dependent",
    "leaks": "NOT causal: never a result",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.routers", description="Score one checkpoint under every inference router it can have."
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument(
        "--tokens", type=int, help="held-out tokens of each domain to score (default: the run's final_tokens)"
    )
    parser.add_argument("--rows", type=int, default=4, help="windows on which generation is checked (default 4)")
    parser.add_argument(
        "--predictor-steps",
        type=int,
        default=PREDICTOR_STEPS,
        help=f"steps of a predictor that the run did not train (default {PREDICTOR_STEPS})",
    )
    options = parser.parse_args(arguments)
    if options.predictor_steps < 1:
        raise ValueError(f"--predictor-steps {options.predictor_steps}: must be at least 1")
    console = terminal()
    run = Run.open(options.run)
    with console.status("opening") as status:
        report = compute(run, options.tokens, options.rows, options.predictor_steps, status.update)
    found = table(report)
    written = write(run, report, found)
    console.print(_rich(found))
    for note in notes(report):
        console.print(f"- {note}", style="dim", highlight=False, markup=False)
    console.print()
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def write(run: Run, report: dict[str, Any], found: Table) -> list[Path]:
    """Write routers.json and routers.md to RUN/eval/, each complete or not at all.

    Returns:
        The files.
    """
    folder = run.folder / "eval"
    folder.mkdir(exist_ok=True)
    files = {"routers.json": json.dumps(report, indent=1) + "\n", "routers.md": _markdown(report, found)}
    for name, content in files.items():
        with write_atomically(folder / name) as file:
            file.write(content.encode())
    return [folder / name for name in files]


def table(report: dict[str, Any]) -> Table:
    """The table of a report from `inference_routers.compute`."""
    rows = []
    for name, row in report["rows"].items():
        rows.append(
            (
                name,
                VERDICTS[row["verdict"]],
                _text(row["bits_per_byte"], ".4f"),
                _text(row["nats_per_token"], ".4f"),
                _difference(row["difference"]),
                _text(row["experts_per_token"], ".3f"),
                _text(row["zero_expert_fraction"], ".1%"),
                _text(row["max_violation"], ".2f"),
                _parity(row["parity"]),
            )
        )
    columns = (
        "router",
        "routing is",
        "bits per byte",
        "nats per token",
        f"minus {report['baseline']}",
        "experts per token",
        "without expert",
        "MaxVio",
        "generation parity",
    )
    title = f"Inference routers of {report['run']} ({report['router']}) at step {report['step']:,}"
    return Table(title, columns, rows, text_columns=("routing is", "generation parity"))


def notes(report: dict[str, Any]) -> list[str]:
    """What the table does not say: how each row came about, and which are missing."""
    rows = report["rows"]
    split = f"Every second held-out window of each domain is scored, {report['scored_windows']:,} together."
    if RECALIBRATED in rows:
        split += (
            f" The {report['calibration_windows']:,} between them, without their first token, only calibrate: no token "
            "is in both."
        )
    found = [split]
    if AS_TRAINED in rows:
        row = rows[AS_TRAINED]
        steps = report["threshold_step"]
        phase = f" (of the first {steps:,} steps)" if steps < report["step"] else ""
        found.append(
            f"{AS_TRAINED}: the training router{phase} on the {row['windows']:,} windows that fill its routing groups, "
            f"and compared on these; {row['windows_left_out']:,} are left out. No generation parity: "
            f"{row['parity']['reason']}."
        )
        if row["dropped_fraction"]:
            found[-1] += f" It dropped {row['dropped_fraction']:.1%} of what tokens asked for; no other row drops any."
    if RECALIBRATED in rows:
        share = report["experts_per_token_configured"] / report["experts"]
        found.append(
            f"{RECALIBRATED}: {share:.2%} of {report['calibration_tokens']:,} calibration tokens reach each cutoff. It "
            "is set layer by layer: a layer's inputs come from layers that are recalibrated already."
        )
    if PREDICTOR in rows:
        found.append(_about_predictor(report["predictor"]))
    found.append(
        "The difference is in bits per byte; after ± is its standard error over paired windows, taken as independent. "
        "Experts per token, tokens without expert and MaxVio (largest load over mean load, less 1, over all scored "
        "text) are means over layers. Parity: by how much logits differ in fp32, and how many routes do, between a "
        "text in one pass and token by token, in chunks, row by row and padded."
    )
    for reason in dict.fromkeys(report["left_out"].values()):
        names = [name for name, why in report["left_out"].items() if why == reason]
        found.append(f"Left out, {', '.join(names)}: {reason}.")
    return found


def _about_predictor(predictor: dict[str, Any]) -> str:
    made = "the checkpoint's own"
    if predictor["fitted_here"]:
        made = (
            f"fitted here, as the run trained none: a logistic regression of {predictor['steps']:,} Adam steps on "
            f"{predictor['training_tokens']:,} tokens of training text"
        )
    if predictor["accuracy"] is None:
        return f"{PREDICTOR}: {made}."
    return (
        f"{PREDICTOR}: {made}. It guesses {predictor['accuracy']:.1%} of the training router's (token, expert) choices "
        f"on the scored text; one answer for all would be right for {predictor['base_rate']:.1%}."
    )


def _parity(parity: dict[str, Any]) -> str:
    if not parity["possible"]:
        return "not possible"
    verdict = "holds" if parity["holds"] else "FAILS"
    where = "" if parity["routes_different"] == 0 else " at cutoff" if parity["routes_explained"] else " NOT at cutoff"
    return f"{verdict}: logits {parity['max_logit_difference']:.0e}, routes {parity['routes_different']:,}{where}"


def _difference(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return MISSING
    error = _text(difference["bits_per_byte_standard_error"], ".4f")
    return f"{_text(difference['bits_per_byte'], '+.4f')} ± {error}"


def _text(value: float | None, how: str) -> str:
    return MISSING if value is None else format(value, how)


def _markdown(report: dict[str, Any], found: Table) -> str:
    lines = [f"# {found.title}", "", *(f"| {' | '.join(cells)} |" for cells in (found.columns, *found.rows))]
    lines.insert(3, "|" + "---|" * len(found.columns))
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(report))]) + "\n"


def _rich(found: Table) -> RichTable:
    made = RichTable(title=found.title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(found.columns):
        if column in found.text_columns:
            made.add_column(column)
        else:  # names and numbers stay on one line
            width = max(map(len, [*column.split(), *(row[number] for row in found.rows)]))
            made.add_column(column, justify="right" if number else "left", width=width)
    for row in found.rows:
        made.add_row(*row, style=None if row[1] == VERDICTS["causal"] else "dim")
    return made


if __name__ == "__main__":
    run_command(main)
