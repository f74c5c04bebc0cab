"""Held-out bits per byte of a run, with intervals, in windows side by side or overlapping.

    python -m eval.bits_per_byte RUN [--stride N] [--tokens N] [--json]

Every score is causal. Without --stride windows lie side by side, as in all other reports. With --stride N each window
moves on by N labels and scores these, so that a label has at least (sequence length - N) tokens of context, or all
there are; where the run's attention keeps to documents, so do the windows. A smaller stride costs sequence length / N
times as much and gives lower figures: compare only figures of one stride.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from eval.command import require_at_least, run_command, terminal
from eval.intervals import bits_per_byte_intervals
from eval.likelihood import evaluate
from eval.report_tables import MISSING, Table, interval_notes, plus_minus, print_table
from training.run import Run


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.bits_per_byte", description="Held-out bits per byte of a run, with intervals."
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument(
        "--stride", type=int, help="labels from one window to the next (default: the sequence length, no overlap)"
    )
    parser.add_argument("--tokens", type=int, help="held-out tokens of each domain (default: the run's final_tokens)")
    parser.add_argument("--seed", type=int, default=0, help="of the resampling of documents (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    console = terminal()
    run = Run.open(options.run)
    with console.status("opening") as status:
        found = compute(run, options.stride, options.tokens, options.seed, status.update)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    table = make_table(found)
    print_table(console, table)


def compute(
    run: Run,
    stride: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Score a run.

    Args:
        run: with at least one checkpoint.
        stride: see `evaluate`.
        tokens: held-out labels of each domain at most; None takes `eval.final_tokens` of the run.
        seed: of the resampling.
        progress: told what is being done.

    Returns:
        Plain data; a value that is not defined is None.
    """
    length = run.config.training.sequence_length
    if stride is not None and not 1 <= stride <= length:
        raise ValueError(f"--stride is {stride}; allowed are 1 to the run's sequence length, {length}")
    require_at_least(1, tokens=tokens)
    require_at_least(0, seed=seed)
    corpus = run.corpus()
    limit = run.config.eval.final_tokens if tokens is None else tokens
    progress("loading the model")
    checkpoint = run.checkpoint()
    model = run.model(checkpoint=checkpoint)
    progress("scoring")
    scores = evaluate(model, corpus, run.config, limit, stride=stride)
    intervals = bits_per_byte_intervals(scores.documents, seed)
    return {
        "run": run.folder.name,
        "step": checkpoint.step,
        "corpus_sha256": corpus.sha256,
        "sequence_length": length,
        "stride": length if stride is None else stride,
        "within_documents": run.config.data.document_mask,
        "tokens_per_domain_limit": limit,
        "domains": {
            name: part.values() | {"interval": intervals["domains"][name]} for name, part in scores.domains.items()
        },
        "without_text": [name for name in corpus.domains if name not in scores.domains],
        "total": scores.total.values() | {"interval": intervals["total"]},
    }


def make_table(found: dict[str, Any]) -> Table:
    """The table of what `compute` found."""

    def row(name: str, values: dict[str, Any]) -> tuple[str, ...]:
        bits = values["bits_per_byte"]
        return (
            name,
            MISSING if bits is None else f"{bits:.4f}",
            plus_minus(values["interval"]),
            str(values["interval"]["documents"]),
            f"{values['nats_per_token']:.4f}",
            f"{values['tokens']:,}",
            f"{values['bytes']:,}",
        )

    rows = [row(name, values) for name, values in found["domains"].items()]
    rows.append(row("all bytes (total)", found["total"]))
    length, stride = found["sequence_length"], found["stride"]
    how = "windows side by side" if stride == length else f"windows that move on by {stride} labels"
    if stride != length and found["within_documents"]:
        how += " within documents"
    intervals = {name: values["interval"] for name, values in found["domains"].items()}
    return Table(
        f"Held-out bits per byte, causal routing: {found['run']} at step {found['step']:,}",
        ("domain", "bits/byte", "± (95%)", "documents", "nats/token", "tokens", "bytes"),
        rows,
        f"Sequence length {length}, {how}; about {found['tokens_per_domain_limit']:,} tokens of a domain, or all. "
        + interval_notes(intervals, found["without_text"]),
    )


if __name__ == "__main__":
    run_command(main)
