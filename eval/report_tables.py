"""The tables of a report, as text cells: printed with rich and written as Markdown from one source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

MISSING = "-"


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        title: above it.
        columns: heads; the first column names the row.
        rows: cells.
        note: below it.
        text_columns: further columns of words, aligned to the left.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    text_columns: tuple[str, ...] = ()


def tables(report: dict[str, Any]) -> list[Table]:
    """The tables of a report from `scoreboard.compute`."""
    found = [_scores(report)]
    if report["noncausal"] is not None:
        found.append(_noncausal(report))
    if report["routing"] is not None:
        found += [_load(report["routing"]), _specialisation(report["routing"])]
    return found


def markdown(report: dict[str, Any], files: Sequence[str]) -> str:
    """The report as Markdown, with the figures among `files` shown."""
    lines = [f"# Report of {report['run']}", ""]
    for table in tables(report):
        lines += [f"## {table.title}", "", *markdown_table(table)]
        lines += ["", *([table.note, ""] if table.note else [])]
    lines += [f"![{name.removesuffix('.png')}]({name})" for name in files if name.endswith(".png")]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(table: Table) -> list[str]:
    """The lines of its heads and rows."""
    heads = "| " + " | ".join(_escape(column) for column in table.columns) + " |"
    rows = ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in table.rows]
    return [heads, "|" + "---|" * len(table.columns), *rows]


def _scores(report: dict[str, Any]) -> Table:
    scores = report["scores"]
    model = scores["model"]

    def row(name: str, part: Any) -> tuple[str, ...]:
        own, *baselines = (part(scores[key]) for key in ("model", "bigram", "unigram"))
        return (
            name,
            _number(own["bits_per_byte"], 4),
            plus_minus(own["interval"]),
            *(_number(value["bits_per_byte"], 4) for value in baselines),
            _number(own["nats_per_token"], 4),
            f"{own['tokens']:,}",
            f"{own['bytes']:,}",
        )

    rows = [row(name, lambda s, name=name: s["domains"][name]) for name in model["domains"]]
    nats = {key: _number(scores[key]["total"]["nats_per_token"], 4) for key in ("model", "bigram", "unigram")}
    in_nats = ", ".join(f"{key} {value}" for key, value in nats.items())
    infinite = " inf: some token was given the probability 0." if "inf" in nats.values() else ""
    means = [scores[key]["mean_over_domains_bits_per_byte"] for key in ("model", "bigram", "unigram")]
    rows.append(row("all bytes (total)", lambda s: s["total"]))
    model_mean, *baseline_means = (_number(mean, 4) for mean in means)
    rows.append(("all domains alike (mean)", model_mean, "", *baseline_means, "", "", ""))
    return Table(
        f"Held-out bits per byte, causal routing: {report['run']} at step {report['step']:,} of "
        f"{report['steps_planned']:,}",
        ("domain", "model", "± (95%)", "bigram", "unigram", "model nats/token", "tokens", "bytes"),
        rows,
        f"About {report['heldout_tokens_per_domain_limit']:,} held-out tokens of a domain, or all. Unigram and bigram "
        f"(Kneser-Ney) are fitted on the windows of the {report['tokens_consumed']:,} tokens that the run consumed. "
        f"Lower is better. In nats a token, over all: {in_nats}.{infinite} "
        + interval_notes({name: values["interval"] for name, values in model["domains"].items()}),
    )


def plus_minus(interval: dict[str, Any]) -> str:
    """The half-width of an interval from `eval.intervals`, or that there is none."""
    return MISSING if interval["half_width"] is None else f"± {interval['half_width']:.4f}"


def interval_notes(intervals: dict[str, dict[str, Any]], without_text: Sequence[str] = ()) -> str:
    """What ± means, and why a domain has none.

    Args:
        intervals: of each domain that was scored.
        without_text: domains that hold nothing out.
    """
    lines = ["±: half of the 95% interval over held-out documents (bootstrap); it does not hold the spread of seeds."]
    lines += [f"No interval for {name}: {one['reason']}." for name, one in intervals.items() if one["reason"]]
    lines += [f"{name} holds nothing out." for name in without_text]
    return " ".join(lines)


def rich_table(table: Table) -> RichTable:
    """The table as it is printed."""
    made = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(table.columns):
        made.add_column(column, justify="left" if number == 0 or column in table.text_columns else "right")
    for row in table.rows:
        made.add_row(*row, style="bold" if row[0].startswith("all ") else None)
    return made


def print_table(console: Console, table: Table) -> None:
    """Print a table and its note."""
    console.print(rich_table(table))
    if table.note:
        console.print(table.note, style="dim", highlight=False)


def _noncausal(report: dict[str, Any]) -> Table:
    noncausal = report["noncausal"]
    dropped = skipped = ""
    if noncausal["dropped_fraction"]:
        dropped = (
            f" The training router dropped {_percent(noncausal['dropped_fraction'])} of what tokens asked for; causal "
            "routing drops nothing."
        )
    if noncausal["skipped_rows"]:
        skipped = (
            f" {noncausal['skipped_rows']} rows ({noncausal['skipped_tokens']:,} tokens) that hold padding or do "
            "not fill a routing group are left out."
        )
    return Table(
        "NOT causal, never a result: the training router on the same text",
        ("routing", "bits per byte", "nats/token"),
        [
            ("training router (sees later tokens)", *_two(noncausal)),
            ("causal, on the same rows", *_two(noncausal["causal_on_the_same_rows"])),
        ],
        "The difference is what the router learns from later tokens together with the mismatch between the two "
        f"routers; it is not the leak alone.{dropped}{skipped}",
    )


def _load(routing: dict[str, Any]) -> Table:
    in_training = "MaxVio in training"
    rows = [
        (
            str(layer["layer"]),
            _number(layer["max_violation_global"], 3),
            _number(layer["max_violation_training"], 3),
            _number(layer["load_entropy"], 4),
            _number(layer["experts_per_token"], 3),
            _percent(layer["zero_expert_fraction"]),
            f"{layer['decisions_near_cutoff']:,}",
        )
        for layer in routing["layers"]
    ]
    note = (
        f"{routing['experts']} experts, {routing['experts_per_token_configured']} a token configured. MaxVio is the "
        "largest load over the mean load, less 1 (0: balanced), of all held-out tokens together. Entropy is of the "
        "load, over ln E (1: balanced). If experts took tokens independently, "
        f"{_percent(routing['zero_expert_fraction_if_independent'])} of tokens would have none. Near cutoff: (token, "
        "expert) decisions within 1e-5 of going the other way."
    )
    if routing["training_steps"] is not None:
        first, last = routing["training_steps"]
        note += f" In training: mean over recorded steps {first:,} to {last:,} ({routing['training_phase']} phase)."
    columns = ("layer", "MaxVio", in_training, "load entropy", "experts/token", "without expert", "near cutoff")
    return Table("Load of the experts, held-out text, causal routing", columns, rows, note)


def _specialisation(routing: dict[str, Any]) -> Table:
    rows = []
    for layer in routing["layers"]:
        found, limit = layer["mutual_information_bits"], layer["mutual_information_null_95"]
        beyond = MISSING if found is None or limit is None else "yes" if found > limit else "no"
        pairs = [f"{p['domain']} {p['expert']} ({p['ratio']:.1f}x)" for p in layer["strongest"]]
        rows.append(
            (
                str(layer["layer"]),
                _number(found, 4),
                _number(layer["mutual_information_null_mean"], 4),
                _number(limit, 4),
                beyond,
                ", ".join(pairs) or MISSING,
            )
        )
    return Table(
        "Specialisation: information between domain and expert, in bits an assignment",
        ("layer", "information", "null mean", "null 95%", "beyond null", "most particular expert of each domain"),
        rows,
        "The null deals the domains to whole rows at random. Last column: the expert whose share of the domain's "
        "tokens most exceeds its mean over domains, and how many times.",
        ("beyond null", "most particular expert of each domain"),
    )


def _two(values: dict[str, Any]) -> tuple[str, str]:
    return _number(values["bits_per_byte"], 4), _number(values["nats_per_token"], 4)


def _number(value: Any, digits: int) -> str:
    """Fixed digits; missing values and infinities as words."""
    if value is None:
        return MISSING
    return value if isinstance(value, str) else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f}%"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")
