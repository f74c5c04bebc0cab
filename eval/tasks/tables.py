"""The tables of task scores."""

from __future__ import annotations

import math
from typing import Any

from eval.report_tables import MISSING, Table

Figure = tuple[float, float | None] | list[Any] | None


NOTE = (
    "± is the standard error over questions. acc_mutual_info ranks by what the context adds to a continuation's "
    "log-likelihood; less chance: it, less one over the number of continuations. No context: acc without it, the null. "
    "Bits/byte: of the right continuation."
)


def accuracy_table(report: dict[str, Any]) -> Table:
    """Every task, and every domain of those that have domains."""
    rows = []
    for name, task in report["tasks"].items():
        parts = task["domains"]
        rows.append(_row(f"all {name}" if parts else name, task["all"]))
        rows += [_row(f"  {domain}", part) for domain, part in parts.items()]
    return Table(
        f"Tasks, causal routing: {report['run']} at step {report['step']:,}",
        (
            "task",
            "questions",
            "acc",
            "acc_norm",
            "acc_bytes",
            "acc_mutual_info",
            "less chance",
            "no context",
            "bits/byte",
        ),
        rows,
        " ".join([NOTE, *_notes(report)]),
    )


def comparison_table(report: dict[str, Any]) -> Table | None:
    """What the same questions give others; None where nothing was compared."""
    rows = [
        (name, other, metric, percent(values["of_this"]), percent(values["model_less_this"], signed=True))
        for name, task in report["tasks"].items()
        for other, metrics in task["compared"].items()
        for metric, values in metrics.items()
    ]
    if not rows:
        return None
    return Table(
        "Accuracy of others on the same questions",
        ("task", "scored by", "metric", "value", "model less this"),
        rows,
        "Differences are paired, question by question. Unigram and bigram are fitted on what the run has read; the "
        "bigram sees the last token of the context, the unigram none.",
        ("scored by", "metric"),
    )


def _row(name: str, part: dict[str, Any]) -> tuple[str, ...]:
    keys = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")
    accuracies = (percent(part[key]) for key in keys)
    beyond, alone = percent(part["mutual_info_less_chance"], signed=True), percent(part["without_context"])
    return (name, f"{part['questions']:,}", *accuracies, beyond, alone, number(part["bits_per_byte"]))


def _notes(report: dict[str, Any]) -> list[str]:
    totals = {
        key: sum(task["all"][key] for task in report["tasks"].values())
        for key in ("continuations", "context_cut", "in_pieces", "border_in_token")
    }
    said = (
        (totals["context_cut"], f"had their context cut on the left to the {report['row_length']} tokens of training"),
        (totals["in_pieces"], "are longer than that, and were read in several rows"),
        (totals["border_in_token"], "begin within a token, and were encoded apart from their context"),
    )
    notes = [f"{count:,} of {totals['continuations']:,} continuations {what}." for count, what in said if count]
    if left_out := sum(task["unconditional_lines_left_out"] for task in report["tasks"].values()):
        notes.append(f"{left_out:,} lines that repeat questions without context were left out.")
    if report["limit"] is not None:
        notes.append(f"Only the first {report['limit']:,} questions of each task.")
    return notes


def percent(figure: Figure, signed: bool = False) -> str:
    """Mean and standard error in percent."""
    return _with_error(figure, 100, f"{'+' if signed else ''}.1f", "%")


def number(figure: Figure) -> str:
    """Mean and standard error."""
    return _with_error(figure, 1, ".4f", "")


def _with_error(figure: Figure, scale: float, how: str, unit: str) -> str:
    if figure is None:
        return MISSING
    mean, error = figure
    if isinstance(mean, str) or not math.isfinite(mean):
        return str(mean)
    told = f"{scale * mean:{how}}"
    return f"{told}{unit}" if error is None else f"{told} ± {scale * error:{how.strip('+')}}{unit}"
