"""Everything a report says about a run, computed once and kept as plain data.

The held-out text is the same for every row of the scoreboard, and the n-gram baselines are fitted on exactly the
windows that the run consumed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from data.batches import heldout_windows
from data.corpus import Corpus
from eval import ngram
from eval import routing_metrics as metrics
from eval.command import require_at_least
from eval.intervals import bits_per_byte_intervals
from eval.likelihood import NothingToScore, Scores, evaluate, score
from eval.routing_recorder import RoutingRecorder
from training.build import build_batches
from training.config import Config
from training.run import Run

FORMAT_VERSION = 2  # 2: the model's scores have intervals
# Training balance is quoted over so many of the newest routing records of one phase.
NEWEST_RECORDS = 10


def compute(run: Run, tokens: int | None = None, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Score a run and describe its routing.

    Args:
        run: with at least one checkpoint.
        tokens: held-out labels of each domain at most; None takes `eval.final_tokens` of the run.
        progress: told what is being done.

    Returns:
        Plain data, as in report.json. A value that is not defined (nan) or not finite is None.
    """
    require_at_least(1, tokens=tokens)
    config, corpus = run.config, run.corpus()
    tokens = config.eval.final_tokens if tokens is None else tokens
    progress("loading the model")
    checkpoint = run.checkpoint()
    checkpoint_step, model = checkpoint.step, run.model(checkpoint=checkpoint)
    recorder = RoutingRecorder(model, corpus.domains)
    progress("model, causal routing")
    causal = evaluate(model, corpus, config, tokens, recorder=recorder)
    noncausal = None
    if config.training_router_leaks:
        progress("model, training router (not causal)")
        with contextlib.suppress(NothingToScore):  # too little text to fill a routing group: this table is left out
            as_trained = RoutingRecorder(model, corpus.domains)
            scores = evaluate(model, corpus, config, tokens, "train_router", as_trained)
            same_rows = evaluate(model, corpus, config, tokens, rows_as_in_training=True)
            noncausal = _noncausal(scores, same_rows, as_trained.dropped_fraction)
    progress("unigram and bigram of the training tokens")
    unigram, bigram, consumed = _baselines(config, corpus, checkpoint_step, tokens)
    report = {
        "format_version": FORMAT_VERSION,
        "run": run.folder.name,
        "step": checkpoint_step,
        "steps_planned": config.training.steps,
        "tokens_consumed": consumed,
        "heldout_tokens_per_domain_limit": tokens,
        "corpus_sha256": corpus.sha256,
        "threshold_step": config.threshold_step,
        "router": config.moe.router,
        "scores": {"model": _with_intervals(causal), "bigram": _scores(bigram), "unigram": _scores(unigram)},
        "noncausal": noncausal,
        "routing": _routing(config, recorder, run.routing_records()) if recorder.layers else None,
    }
    return finite(report)


def fitted_baselines(config: Config, corpus: Corpus, steps: int) -> tuple[ngram.Unigram, ngram.Bigram]:
    """Unigram and bigram of exactly the windows that a run consumed in so many steps."""
    batches = build_batches(config, corpus)
    consumed = (batches.batch(step) for step in range(steps))
    return ngram.fit(((b.token_BS, b.label_BS) for b in consumed), corpus.vocabulary_size)


def _baselines(config: Config, corpus: Corpus, steps: int, tokens: int) -> tuple[Scores, Scores, int]:
    """Scores of unigram and bigram, and the training tokens that the run consumed."""
    training = config.training
    unigram, bigram = fitted_baselines(config, corpus, steps)

    def scored(baseline: ngram.Unigram | ngram.Bigram) -> Scores:
        windows = heldout_windows(corpus, training.sequence_length, max_tokens=tokens)
        return score(windows, lambda w: baseline.nats(w.token_BS, w.label_BS), corpus.tokenizer.token_bytes_V)

    return scored(unigram), scored(bigram), steps * config.tokens_per_step


def _scores(scores: Scores) -> dict[str, Any]:
    return {
        "domains": {name: likelihood.values() for name, likelihood in scores.domains.items()},
        "total": scores.total.values(),
        "mean_over_domains_bits_per_byte": scores.mean_bits_per_byte,
    }


def _with_intervals(scores: Scores) -> dict[str, Any]:
    values, intervals = _scores(scores), bits_per_byte_intervals(scores.documents)
    for name, domain in values["domains"].items():
        domain["interval"] = intervals["domains"][name]
    values["total"]["interval"] = intervals["total"]
    return values


def _noncausal(scores: Scores, causal: Scores, dropped_fraction: float) -> dict[str, Any]:
    return {
        "warning": "not causal: the training router sees later tokens; never a result",
        "bits_per_byte": scores.bits_per_byte,
        "nats_per_token": scores.nats_per_token,
        "causal_on_the_same_rows": {"bits_per_byte": causal.bits_per_byte, "nats_per_token": causal.nats_per_token},
        "skipped_rows": scores.skipped_rows,
        "skipped_tokens": scores.skipped_tokens,
        "dropped_fraction": dropped_fraction,
    }


def _routing(config: Config, recorder: RoutingRecorder, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Load, fan-out and specialisation of every mixture layer on the held-out text, under causal routing."""
    training = training_balance(records)
    layers = []
    for place, (index, record) in enumerate(recorder.layers.items()):
        counts_ME, tokens_M = recorder.counts_by_domain(index), recorder.tokens_by_domain(index)
        counts_E = counts_ME.sum(0)
        counts_RE, domain_R = recorder.rows(index)
        null_mean, null_95 = metrics.mutual_information_null(counts_RE, domain_R, len(recorder.domains))
        share_ME = metrics.domain_specialisation(counts_ME, tokens_M)
        zero_M = recorder.zero_expert_by_domain(index)
        layers.append(
            {
                "layer": index,
                "max_violation_global": metrics.max_violation(counts_E),
                "max_violation_training": None if training is None else training["max_violation"][place],
                "coefficient_of_variation": metrics.coefficient_of_variation(counts_E),
                "load_entropy": metrics.load_entropy(counts_E),
                "experts_per_token": metrics.fan_out_mean(record.fan_out),
                "zero_expert_fraction": metrics.zero_expert_fraction(record.fan_out),
                "zero_expert_fraction_by_domain": dict(
                    zip(recorder.domains, (zero_M / np.maximum(tokens_M, 1)).tolist(), strict=True)
                ),
                "fan_out": record.fan_out.tolist(),
                "decisions_near_cutoff": record.near,
                "counts": counts_ME.astype(int).tolist(),
                "share_of_domain_tokens": share_ME.tolist(),
                "mutual_information_bits": metrics.mutual_information(counts_ME),
                "mutual_information_null_mean": null_mean,
                "mutual_information_null_95": null_95,
                "strongest": strongest(share_ME, recorder.domains),
            }
        )
    moe = config.moe
    return {
        "experts": moe.num_experts,
        "experts_per_token_configured": moe.assignments_per_token,
        "zero_expert_fraction_if_independent": float(
            metrics.binomial_fan_out(moe.num_experts, moe.assignments_per_token)[0]
        ),
        "domains": recorder.domains,
        "training_phase": None if training is None else training["phase"],
        "training_steps": None if training is None else training["steps"],
        "layers": layers,
    }


def training_balance(records: list[dict[str, Any]], newest: int = NEWEST_RECORDS) -> dict[str, Any] | None:
    """Batch MaxVio of each layer in training, over the newest records of the phase the run was in last.

    Phases are not mixed: expert choice is balanced by construction, the threshold phase is not.

    Returns:
        {"phase", "steps" (first and last record used), "max_violation" (one a layer)}, or None without a record.
    """
    if not records:
        return None
    phase = bool(records[-1].get("threshold_phase"))
    used = [record for record in records if bool(record.get("threshold_phase")) == phase][-newest:]
    counts_XLE = np.array([record["counts"] for record in used], dtype=np.float64)
    return {
        "phase": "threshold" if phase else "training router",
        "steps": [used[0]["step"], used[-1]["step"]],
        "max_violation": [metrics.batch_max_violation(counts_XE) for counts_XE in counts_XLE.swapaxes(0, 1)],
    }


def strongest(share_ME: np.ndarray, domains: list[str]) -> list[dict[str, Any]]:
    """For each domain the expert whose share of its tokens most exceeds that expert's mean over domains.

    Returns:
        {"domain", "expert", "ratio" (share over the expert's mean), "share"} for each domain that has tokens; nothing
        where there is only one domain to compare.
    """
    if len(domains) < 2:
        return []
    mean_E = np.nan_to_num(np.nanmean(share_ME, axis=0))
    ratio_ME = np.divide(share_ME, mean_E, out=np.zeros_like(share_ME), where=mean_E > 0)
    found = []
    for m, domain in enumerate(domains):
        if not np.isnan(ratio_ME[m]).any():
            e = int(ratio_ME[m].argmax())
            ratio, share = float(ratio_ME[m, e]), float(share_ME[m, e])
            found.append({"domain": domain, "expert": e, "ratio": ratio, "share": share})
    return found


def finite(value: Any) -> Any:
    """JSON has no nan and no infinity; "inf" is kept as text, since it is a result, and nan becomes None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
