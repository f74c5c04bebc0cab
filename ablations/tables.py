"""The tables of an ablation and its Markdown, from the data of `ablations.summary`."""

from __future__ import annotations

from typing import Any

from ablations.intervals import Interval
from ablations.measures import MEASURES
from ablations.summary import ranking
from eval.report_tables import MISSING, Table, markdown_table

# Columns of the main table behind the score and its difference, with those that a claim is about; one that no arm has
# is left out.
FURTHER = ("max_violation", "zero_expert_fraction", "leak_bits", "tokens_per_second", "cpu_minutes")


def tables(summary: dict[str, Any]) -> list[Table]:
    """Budget, scores, domains; and the claims, where there are any."""
    found = [_scores(summary), _budget(summary), _domains(summary)]
    return [*found, _claims(summary)] if summary["claims"] else found


def markdown(summary: dict[str, Any], figure: str = "", level: int = 1) -> str:
    """The whole result.

    Args:
        summary: from `summarise`.
        figure: address of the figure; empty for none.
        level: of the heading.
    """
    mark = "#" * level
    smoke = "SMOKE RUN, not a result: " if summary["quick"] else ""
    lines = [f"{mark} {smoke}{summary['name']}", "", summary["question"], "", f"Budget: {summary['budget']}.", ""]
    for table in tables(summary):
        lines += [f"{mark}# {table.title}", "", *markdown_table(table), "", *([table.note, ""] if table.note else [])]
    if figure:
        lines += [f"![{summary['name']}: bits a byte of every run]({figure})", ""]
    lines += [f"{mark}# What the numbers show", "", *(f"- {said}" for said in summary["statements"]), ""]
    return "\n".join([*lines, *_provenance(summary["provenance"])]) + "\n"


def _scores(summary: dict[str, Any]) -> Table:
    arms, baseline = summary["arms"], summary["baseline"]
    order = ranking(summary) + [name for name, arm in arms.items() if arm["means"]["bits_per_byte"] is None]
    claimed = {claim["measure"] for claim in summary["claims"]} - {"bits_per_byte", "nats_per_token"}
    wanted = dict.fromkeys((*FURTHER[:3], *sorted(claimed), *FURTHER[3:]))
    further = [key for key in wanted if any(arm["means"][key] is not None for arm in arms.values())]
    noncausal = any(arm["noncausal_bits_per_byte"] is not None for arm in arms.values())
    heads = ["arm", "bits/byte", f"less {baseline}'s", "corrected p", "nats/token"]
    heads += [MEASURES[key].head for key in further] + (["noncausal bits/byte"] if noncausal else [])
    rows = []
    for name in order:
        arm = arms[name]
        difference = arm["against_baseline"]
        row = [
            name,
            _interval(arm["means"]["bits_per_byte"], 4),
            _interval(difference, 4, sign=True) if difference else "baseline" if name == baseline else MISSING,
            f"{difference['corrected_p']:.2g}" if difference and difference["corrected_p"] is not None else MISSING,
            _mean(arm["means"]["nats_per_token"], 4),
        ]
        row += [_mean(arm["means"][key], MEASURES[key].digits) for key in further]
        rows.append((*row, *([_mean(arm["noncausal_bits_per_byte"], 4)] if noncausal else [])))
    note = (
        f"Held-out text, the same {summary['provenance']['heldout_tokens']:,} tokens for all, under causal routing; "
        f"best first; mean over {len(summary['seeds'])} seeds [95% t interval]. Differences are paired by seed (the "
        f"same data in the same order); p is corrected for all {summary['comparisons']} (Holm), the intervals are not. "
        "MaxVio (largest load over mean load, less 1) and tokens without expert: held out, mean over layers. tokens/s: "
        "median over steps, as the runs shared the machine. CPU min: of one run."
    )
    if noncausal:
        note += (
            " noncausal: the same text under a training router that sees later tokens; never a result, and no part of "
            "the order."
        )
    return Table("Scores", tuple(heads), rows, note)


def _budget(summary: dict[str, Any]) -> Table:
    rows = [
        (
            name,
            f"{arm['parameters']:,}",
            f"{arm['active_parameters']:,}",
            f"{arm['flops_per_token']:,}",
            f"{arm['steps']:,}",
            f"{arm['tokens']:,}",
            f"{arm['flops']:.4g}",
            ", ".join(f"{key} = {value}" for key, value in arm["changes"].items()) or "the base",
        )
        for name, arm in summary["arms"].items()
    ]
    heads = ("arm", "parameters", "active", "FLOPs a token", "steps", "tokens", "FLOPs in all", "changes")
    note = "FLOPs a token: forward and backward, as configured; what a capacity drops is not subtracted."
    return Table("Budget", heads, rows, note, ("changes",))


def _domains(summary: dict[str, Any]) -> Table:
    arms = summary["arms"]
    domains = next(iter(arms.values()))["domains"]
    rows = [(name, *(_interval(arms[name]["domains"][domain], 3) for domain in domains)) for name in ranking(summary)]
    return Table("Bits a byte by domain", ("arm", *domains), rows)


def _claims(summary: dict[str, Any]) -> Table:
    rows = [(claim["says"], claim["verdict"], claim["detail"]) for claim in summary["claims"]]
    heads = ("claim", "verdict", "paired gain [95% t interval]")
    note = "Corrected for all claims of the file (Holm): supported and contradicted are at p < 0.05."
    return Table("Claims", heads, rows, note, heads[1:])


def _provenance(of: dict[str, Any]) -> list[str]:
    commits = ", ".join(of["commits"])
    killed = of["attempts_killed"]
    lost = f" ({killed} killed attempts are not counted)" if killed else ""
    return [
        f"`{of['command']}`",
        "",
        f"Commit {commits}; run {_between(of['dates'])}; torch {', '.join(of['torch'])}; corpus "
        f"{of['corpus_sha256'][:12]}; {', '.join(map(str, of['threads']))} threads a run; {of['cpu_minutes']:.1f} CPU "
        f"minutes in all{lost}.",
    ]


def _between(dates: list[str]) -> str:
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _interval(value: dict[str, Any] | None, digits: int, sign: bool = False) -> str:
    if value is None:
        return MISSING
    return Interval(*(value[key] for key in ("mean", "low", "high", "values", "p"))).text(digits, sign)


def _mean(value: dict[str, Any] | None, digits: int) -> str:
    return MISSING if value is None else f"{value['mean']:,.{digits}f}"
