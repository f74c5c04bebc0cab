"""From the figures of all runs to what they say together: means, paired differences, verdicts, sentences.

`summarise` gives plain data (results.json); tables, figure and sentences are made from that alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ablations.budget import Cost
from ablations.claims import decide
from ablations.intervals import Interval, paired
from ablations.measures import MEASURES, Results
from ablations.spec import Ablation
from eval.intervals import corrected_p_values
from moe.groups import RoutingGroup

FORMAT_VERSION = 1
HEADLINE = MEASURES["bits_per_byte"]


def summarise(ablation: Ablation, results: Results, missing: Sequence[str] = (), command: str = "") -> dict[str, Any]:
    """Everything, as plain data.

    Args:
        ablation: what was asked.
        results: figures of the finished runs.
        missing: runs that are not there, and why, one text each.
        command: that repeats it.

    Raises:
        ValueError: no run is finished, or the runs read different text.
    """
    finished = [run for runs in results.values() for run in runs.values()]
    if not finished:
        raise ValueError(f"{ablation.path}: no run is finished: {'; '.join(missing) or 'start it without --collect'}")
    corpora = sorted({run["corpus_sha256"] for run in finished})
    if len(corpora) > 1:
        raise ValueError(f"{ablation.path}: runs read different corpora ({', '.join(c[:12] for c in corpora)})")
    others = [arm.name for arm in ablation.arms if arm.name != ablation.baseline]
    reference = HEADLINE.by_seed(results.get(ablation.baseline, {}))
    differences = {name: paired(HEADLINE.by_seed(results.get(name, {})), reference) for name in others}
    corrected = corrected_p_values([difference.p if difference else None for difference in differences.values()])
    summary: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "name": ablation.name,
        "question": ablation.question,
        "quick": ablation.quick,
        "baseline": ablation.baseline,
        "budget": ablation.budget.describe(),
        "seeds": ablation.seed_list,
        "comparisons": len(others),
        "arms": {},
        "claims": [
            {
                "says": finding.claim.text,
                "measure": finding.claim.measure,
                "verdict": "smoke run" if ablation.quick else finding.verdict,
                "detail": finding.detail,
            }
            for finding in decide(ablation.claims, results)
        ],
        "missing": list(missing),
        "provenance": _provenance(results, command),
    }
    for arm in ablation.arms:
        runs = results.get(arm.name, {})
        cost = Cost.of(arm.config)
        difference = differences.get(arm.name)
        summary["arms"][arm.name] = {
            "changes": arm.changes,
            **vars(cost),
            "flops": cost.flops,
            "router": arm.config.moe.router,
            "group_tokens": _group_tokens(arm.config) if arm.config.moe.is_moe else None,
            "training_router_leaks": arm.config.training_router_leaks and arm.config.threshold_step > 0,
            "means": {key: _mean(measure.by_seed(runs)) for key, measure in MEASURES.items()},
            "domains": {
                domain: _mean({seed: run["domains"][domain] for seed, run in runs.items()})
                for domain in finished[0]["domains"]
            },
            "noncausal_bits_per_byte": _mean(
                {s: v for s, run in runs.items() if (v := run["noncausal_bits_per_byte"]) is not None}
            ),
            "against_baseline": None
            if difference is None
            else {**vars(difference), "corrected_p": corrected[others.index(arm.name)]},
            "runs": {str(seed): run for seed, run in sorted(runs.items())},
        }
    summary["statements"] = statements(summary)
    return summary


def statements(summary: dict[str, Any]) -> list[str]:
    """What the numbers show and what they do not, in sentences."""
    said = []
    baseline, seeds, arms = summary["baseline"], len(summary["seeds"]), summary["arms"]
    if summary["quick"]:
        said.append("SMOKE RUN: a few steps, to see that everything works. No number here means anything.")
    for name in ranking(summary):
        if name != baseline and (found := arms[name]["against_baseline"]) is not None:
            said.append(_compared(name, baseline, found, summary["comparisons"]))
    said += [
        f"{name}: the training router sees later tokens. Under it the same text scores "
        f"{arm['noncausal_bits_per_byte']['mean']:.4f} bits a byte, which is no result; causally it is "
        f"{arm['means']['bits_per_byte']['mean']:.4f}."
        for name, arm in arms.items()
        if arm["noncausal_bits_per_byte"] is not None
    ]
    tokens = [arm["tokens"] for arm in arms.values()]
    parameters = [arm["parameters"] for arm in arms.values()]
    said.append(
        f"All of this is of {seeds} {'seed' if seeds == 1 else 'seeds'}, {_span(tokens)} training tokens and "
        f"{_span(parameters)} parameters, at one learning rate and schedule: it says nothing of longer training or of "
        "larger models."
    )
    if summary["missing"]:
        said.append(f"Incomplete: {'; '.join(summary['missing'])}. Differences are over the seeds that both arms have.")
    return said


def ranking(summary: dict[str, Any]) -> list[str]:
    """Arms by their mean held-out bits a byte under causal routing, the best first; those without a run are left out.

    No loss under a router that sees the future takes part.
    """
    known = {name: arm["means"]["bits_per_byte"] for name, arm in summary["arms"].items()}
    return sorted((name for name, mean in known.items() if mean is not None), key=lambda name: known[name]["mean"])


def _compared(name: str, baseline: str, found: dict[str, Any], comparisons: int) -> str:
    """One arm beside the baseline."""
    interval = Interval(*(found[key] for key in ("mean", "low", "high", "values", "p")))
    size = f"{abs(interval.mean):.4f} bits a byte"
    which = "below" if interval.mean < 0 else "above"
    if interval.low is None or interval.high is None:
        return f"{name}: {size} {which} {baseline} in one seed; without a second one no difference is evidence."
    low, high = sorted((abs(interval.low), abs(interval.high)))
    if interval.contains_zero:
        most = max(low, high)
        return (
            f"{name} and {baseline}: {interval.text(sign=True)} bits a byte, an interval that contains 0: no evidence "
            f"of a difference in either direction, and some against one of more than {most:.4f}."
        )
    between = f"{size} (95% interval {low:.4f} to {high:.4f}, {interval.values} seeds)"
    p = found["corrected_p"]
    if p < 0.05:
        verb = "is better than" if interval.mean < 0 else "is worse than"
        many = f"; corrected for {comparisons} comparisons p = {p:.2g}" if comparisons > 1 else f"; p = {p:.2g}"
        return f"{name} {verb} {baseline} by {between}{many}."
    return (
        f"{name} is {which} {baseline} by {between}, but among {comparisons} comparisons one such interval may well "
        f"exclude 0 by chance (corrected p = {p:.2g}): a hint, not evidence."
    )


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _mean(values: dict[int, float]) -> dict[str, Any] | None:
    return vars(Interval.of([values[seed] for seed in sorted(values)])) if values else None


def _group_tokens(config: Any) -> int:
    moe = config.moe
    return RoutingGroup(moe.group, moe.group_sequences, config.training.sequence_length, moe.chunk_length).tokens


def _provenance(results: Results, command: str) -> dict[str, Any]:
    finished = [run for runs in results.values() for run in runs.values()]
    environments = [run["environment"] for run in finished]
    return {
        "command": command,
        "commits": sorted({str(environment.get("commit")) for environment in environments}),
        "dates": sorted({run["date"] for run in finished}),
        "torch": sorted({environment["packages"]["torch"] for environment in environments}),
        "threads": sorted({run["threads"] for run in finished}),
        "corpus_sha256": finished[0]["corpus_sha256"],
        "heldout_tokens": finished[0]["heldout_tokens"],
        "cpu_minutes": sum(run["cpu_minutes"] for run in finished),
        "attempts_killed": sum(run["attempts_killed"] for run in finished),
        "written": time.strftime("%Y-%m-%d", time.gmtime()),
    }
