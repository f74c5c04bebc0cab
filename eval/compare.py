"""Is run B worse than run A? Bits per byte of both on the same held-out text, document by document.

    python -m eval.compare RUN_A RUN_B [--tokens N] [--fail-if-worse-by BITS] [--output FILE]

For every domain and for all bytes: the difference B - A, and its 95% interval from a paired bootstrap over documents
(both runs keep the same documents in every resample). Scores are causal.

The runs must have the same held-out documents, byte for byte. That is so where their corpora have one sha256; where
these differ (another tokenizer), the held-out documents are decoded and compared, and then all of them are scored,
since a limit on tokens would choose other text for each.

B is worse in a domain, or over all bytes, where the difference exceeds the margin, its 95% interval lies above the
margin, and the one-sided test of that is significant by Holm's rule over all domains and the total, at a family-wise
level of 0.025. A domain with too few documents for an interval is not judged alone.

Exit status: 0 not worse, or no margin was given; 2 bad input; 4 B is worse by more than --fail-if-worse-by.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import write_json
from data.corpus import Corpus
from eval.command import require_at_least, run_command, terminal
from eval.intervals import IntervalUndefined, RatioBootstrap, Strata, holm, interval_values
from eval.likelihood import Likelihood, Scores, evaluate
from eval.report_tables import MISSING, Table, print_table
from training.run import Run, RunError

FORMAT_VERSION = 1
EXIT_BAD_INPUT, EXIT_WORSE = 2, 4
LEVEL = 0.025  # one-sided and family-wise: what is significant has its two-sided 95% interval above the margin
TOTAL = "all bytes (total)"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; raises SystemExit with the status where that is not 0."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.compare",
        description="Compare two runs on the same held-out text: differences of bits per byte, B - A, with paired "
        "intervals over documents.",
        epilog="Exit status: 0 B is not worse, or --fail-if-worse-by was not given; 2 bad input (also: runs of other "
        "text); 4 B is worse than A by more than BITS in some domain or in total, with the 95%% interval above BITS "
        "and significant by Holm's rule over all of them.",
    )
    parser.add_argument("run_a", metavar="RUN_A", help="the folder of the run to compare with")
    parser.add_argument("run_b", metavar="RUN_B", help="the folder of the run to judge")
    parser.add_argument("--tokens", type=int, help="held-out tokens of each domain (default: all of them)")
    parser.add_argument(
        "--fail-if-worse-by",
        type=float,
        metavar="BITS",
        help="margin in bits per byte, 0 or more: exit with 4 where B is worse by more",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of RUN_B/eval/compare.json")
    parser.add_argument("--seed", type=int, default=0, help="of the resampling of documents (default 0)")
    options = parser.parse_args(arguments)
    margin = options.fail_if_worse_by
    if margin is not None and not 0 <= margin < math.inf:
        raise ValueError(f"--fail-if-worse-by is {margin}; allowed are 0 and above")
    if options.output is not None and options.output.is_dir():
        raise ValueError(f"--output {options.output} is a folder; name a file in it")
    console = terminal()
    with console.status("opening") as status:
        run_a, run_b = Run.open(options.run_a), Run.open(options.run_b)
        found = compute(run_a, run_b, options.tokens, margin or 0.0, options.seed, status.update)
    path = options.output or run_b.folder / "eval" / "compare.json"
    write_json(path, found)
    table = make_table(found)
    print_table(console, table)
    console.print(verdict(found), style="bold", highlight=False)
    console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if margin is not None and found["worse"]:
        sys.exit(EXIT_WORSE)


def compute(
    run_a: Run,
    run_b: Run,
    tokens: int | None = None,
    margin: float = 0.0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Score two runs and compare.

    Args:
        run_a: to compare with.
        run_b: to judge.
        tokens: held-out labels of each domain at most; None scores all.
        margin: bits per byte that B may be worse.
        seed: of the resampling.
        progress: told what is being done.

    Returns:
        Plain data; a value that is not defined is None.

    Raises:
        RunError: the runs have other held-out text.
        ValueError: a number is out of range, or a limit would choose other text for each run.
    """
    require_at_least(1, tokens=tokens)
    require_at_least(0, seed=seed)
    corpus_a, corpus_b = run_a.corpus(), run_b.corpus()
    same_corpus = corpus_a.sha256 == corpus_b.sha256
    if not same_corpus:
        require_same_documents(corpus_a, corpus_b)
    lengths = [run.config.training.sequence_length for run in (run_a, run_b)]
    if tokens is not None and (not same_corpus or lengths[0] != lengths[1]):
        why = f"sequence lengths {lengths[0]} and {lengths[1]}" if same_corpus else "different tokenizers"
        raise ValueError(f"--tokens {tokens}: the runs have {why}, so that a limit would choose other text for each")
    scores, steps = [], []
    for name, run, corpus in (("A", run_a, corpus_a), ("B", run_b, corpus_b)):
        progress(f"scoring {name}, {run.folder}")
        checkpoint = run.checkpoint()
        steps.append(checkpoint.step)
        scores.append(evaluate(run.model(checkpoint=checkpoint), corpus, run.config, tokens))
    return {
        "format_version": FORMAT_VERSION,
        "run_a": str(run_a.folder),
        "run_b": str(run_b.folder),
        "step_a": steps[0],
        "step_b": steps[1],
        "corpus_sha256_a": corpus_a.sha256,
        "corpus_sha256_b": corpus_b.sha256,
        "same_tokenizer": corpus_a.tokenizer.sha256 == corpus_b.tokenizer.sha256,
        "tokens_per_domain_limit": tokens,
        "margin": margin,
        **differences(scores[0], scores[1], margin, seed),
    }


def require_same_documents(corpus_a: Corpus, corpus_b: Corpus) -> None:
    """Refuse corpora whose held-out documents are not the same bytes in the same order.

    Raises:
        RunError: says where they differ first.
    """
    names = [sorted(c.domains) for c in (corpus_a, corpus_b)]
    if names[0] != names[1]:
        raise RunError(
            f"the runs have other domains ({', '.join(names[0])}; {', '.join(names[1])}): compare runs of one corpus"
        )
    for domain in names[0]:
        digests = [_document_digests(corpus, domain) for corpus in (corpus_a, corpus_b)]
        if digests[0] != digests[1]:
            raise RunError(
                f"the runs have different corpora (sha256 {corpus_a.sha256[:12]} and {corpus_b.sha256[:12]}) and their "
                f'held-out documents of "{domain}" are not the same bytes: train both on one corpus, or on two that '
                "differ in the tokenizer only"
            )


def differences(a: Scores, b: Scores, margin: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """B - A in bits per byte, by domain and over all.

    Args:
        a: of run A, with sums of documents.
        b: of run B, on the same text.
        margin: bits per byte that B may be worse.
        seed: of the resampling.

    Returns:
        "rows" by name, each with both values, the difference, its interval, p-value and verdict; and "worse", the
        names where B is.

    Raises:
        ValueError: the documents are not the same.
    """
    if a.documents.keys() != b.documents.keys():
        raise ValueError("the runs scored other domains: compare runs of one corpus")
    strata: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, documents in a.documents.items():
        others = b.documents[name]
        if {n: one.bytes for n, one in documents.items()} != {n: one.bytes for n, one in others.items()}:
            raise ValueError(f'the runs scored other text of "{name}": leave --tokens out')
        order = sorted(documents)
        bits_M = np.array([others[n].nats - documents[n].nats for n in order]) / math.log(2)
        strata[name] = (bits_M, np.array([documents[n].bytes for n in order], dtype=np.float64))
    rows = {name: _row(a.domains[name], b.domains[name], {name: strata[name]}, margin, seed) for name in strata}
    rows[TOTAL] = _row(a.total, b.total, strata, margin, seed)
    significant = holm({name: row["p_value"] for name, row in rows.items() if row["p_value"] is not None}, LEVEL)
    worse = []
    for name, row in rows.items():
        low, high = row["interval"]["low"], row["interval"]["high"]
        if name in significant and low > margin:
            worse.append(name)
        row["verdict"] = (
            "not judged"
            if low is None
            else "worse"
            if name in worse
            else "better"
            if high < 0
            else "not shown to be worse"
        )
    return {"rows": rows, "worse": worse}


def make_table(found: dict[str, Any]) -> Table:
    """The table of what `compute` found."""
    rows = []
    for name, row in found["rows"].items():
        interval = row["interval"]
        shown = MISSING if interval["low"] is None else f"{interval['low']:+.4f} to {interval['high']:+.4f}"
        values = [MISSING if row[key] is None else f"{row[key]:.4f}" for key in ("a", "b")]
        difference = MISSING if row["difference"] is None else f"{row['difference']:+.4f}"
        p_value = MISSING if row["p_value"] is None else f"{row['p_value']:.2g}"
        rows.append((name, *values, difference, shown, str(interval["documents"]), p_value, row["verdict"]))
    notes = [
        "Paired bootstrap over documents: it holds the choice of text, not the seed of the training. One-sided p of "
        f'"B is worse by {found["margin"]:g} bits at most", before Holm\'s rule.'
    ]
    if found["corpus_sha256_a"] != found["corpus_sha256_b"]:
        notes.append("The runs have different corpora; their held-out documents are the same, byte for byte.")
    for name, row in found["rows"].items():
        if row["interval"]["reason"]:
            notes.append(f"{name} is not judged alone: {row['interval']['reason']}.")
    return Table(
        f"Bits per byte, B - A; A: {found['run_a']} at step {found['step_a']:,}, B: {found['run_b']} at step "
        f"{found['step_b']:,}",
        ("domain", "A", "B", "B - A", "95% interval", "documents", "p", "B is"),
        rows,
        " ".join(notes),
        ("B is",),
    )


def verdict(found: dict[str, Any]) -> str:
    """One line."""
    if found["worse"]:
        return f"B is worse by more than {found['margin']:g} bits per byte: {', '.join(found['worse'])}"
    return f"B is not shown to be worse by more than {found['margin']:g} bits per byte"


def _row(a: Likelihood, b: Likelihood, strata: Strata, margin: float, seed: int) -> dict[str, Any]:
    values = [one.bits_per_byte if one.bytes and math.isfinite(one.nats) else None for one in (a, b)]
    try:
        p_value = RatioBootstrap(strata, seed, draws=1).p_value_above(margin)
    except IntervalUndefined:
        p_value = None
    return {
        "a": values[0],
        "b": values[1],
        "difference": None if None in values else values[1] - values[0],  # type: ignore[operator]
        "interval": interval_values(strata, seed),
        "p_value": p_value,
    }


def _document_digests(corpus: Corpus, domain: str) -> list[bytes]:
    return [hashlib.sha256(text).digest() for text in corpus.documents("heldout", domain)]


if __name__ == "__main__":
    run_command(main, EXIT_BAD_INPUT)
