"""One checkpoint under every inference router it can have, measured on the same held-out windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from data.batches import HeldoutBatch
from data.corpus import Corpus
from eval import likelihood
from eval import routing_metrics as metrics
from eval.calibration import (
    PREDICTOR_STEPS,
    GuessCounter,
    fit_predictors,
    own_predictors,
    predictor_text,
    preserved,
    recalibrate,
    serve,
    split_heldout,
    watched,
)
from eval.command import require_at_least
from eval.likelihood import Likelihood, MixedWindows, Mode, NothingToScore, Scores
from eval.parity import LOGIT_TOLERANCE, check_parity
from eval.routing_recorder import RoutingRecorder
from moe.config import MoEConfig
from moe.model import Transformer
from moe.routers.predictor import Predictor
from moe.routers.registry import ROUTERS, Verdict
from training.config import Config
from training.run import Run

FORMAT_VERSION = 1
AS_TRAINED, AS_SERVED = "as trained", "as served"
THRESHOLD, RECALIBRATED, PREDICTOR, TOKEN_CHOICE = "EMA threshold", "recalibrated", "predictor", "token choice"
WARNINGS: dict[Verdict, str] = {
    "batch-dependent": "depends on the other sequences of the batch: not what a model that is served would score",
    "leaks": "not causal: the training router sees later tokens; never a result",
}
NO_PARITY: dict[Verdict, str] = {
    "causal": "places are counted over whole sequences, and generation does not know their end",
    "batch-dependent": "a token competes with the other sequences of its batch",
    "leaks": "a token competes with later ones, which are not generated yet",
}


def inference_routers(moe: MoEConfig) -> tuple[list[str], dict[str, str]]:
    """Which rows a run can have, in order, and why it lacks the others."""
    rows: list[str] = []
    left_out: dict[str, str] = {}
    reads = ROUTERS[moe.router].reads
    if moe.training_verdict == "causal" and moe.capacity_factor is None:
        left_out[AS_TRAINED] = "it routes in training as in the first row"
    else:
        rows.append(AS_TRAINED)
    if "threshold_decay" in reads:
        rows += [THRESHOLD, RECALIBRATED]
    else:
        rows.append(AS_SERVED)
        left_out |= dict.fromkeys((THRESHOLD, RECALIBRATED), f"{moe.router} tracks no cutoffs")
    if "inference" not in reads:
        reason = f"{moe.router} is not expert choice and is served in one way"
        return rows, left_out | dict.fromkeys((PREDICTOR, TOKEN_CHOICE), reason)
    if moe.training_verdict == "causal" and not moe.predictor_coefficient:
        left_out[PREDICTOR] = "the run trained by thresholds from its first step: there is no choice to predict"
    else:
        rows.append(PREDICTOR)
    if moe.num_experts == 1:
        left_out[TOKEN_CHOICE] = "every token would choose the one expert there is"
    else:
        rows.append(TOKEN_CHOICE)
    return rows, left_out


def compute(
    run: Run,
    tokens: int | None = None,
    parity_rows: int = 4,
    predictor_steps: int = PREDICTOR_STEPS,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Score a run's newest checkpoint under every inference router it can have.

    Args:
        run: with at least one checkpoint.
        tokens: held-out labels of each domain to score at most; about as many calibrate. None takes
            `eval.final_tokens` of the run.
        parity_rows: windows on which generation parity is checked.
        predictor_steps: Adam steps of a predictor that is fitted here.
        progress: told what is being done.

    Returns:
        Plain data, as in routers.json. A value that is not defined is None.

    Raises:
        ValueError: a dense run, too little held-out text, or a number out of range.
    """
    require_at_least(1, tokens=tokens, rows=parity_rows)
    config = run.config
    if not config.moe.is_moe:
        raise ValueError(f"{run.folder} is a dense run, there is no router to compare: give a run with experts")
    corpus = run.corpus()
    limit = config.eval.final_tokens if tokens is None else tokens
    split = split_heldout(corpus, config.training.sequence_length, limit)
    progress("loading the model")
    checkpoint = run.checkpoint()
    bench = Bench(run.model(checkpoint=checkpoint), config, corpus, split.scored, parity_rows)
    names, left_out = inference_routers(config.moe)
    predictors: dict[int, Predictor] = {}
    about_predictor: dict[str, Any] | None = None
    if PREDICTOR in names:
        progress("predictor, on training text")
        predictors, about_predictor = _predictors(bench, predictor_steps)
    rows: dict[str, dict[str, Any]] = {}
    calibration_tokens = 0
    for name in names:
        progress(name)
        with preserved(bench.model):
            if name == AS_TRAINED:
                try:
                    rows[name] = bench.as_trained(predictors, about_predictor)
                except NothingToScore:
                    left_out[name] = "too few whole held-out windows to fill a routing group"
                continue
            if name == THRESHOLD:
                serve(bench.model, "threshold")
            elif name == RECALIBRATED:
                calibration_tokens = recalibrate(bench.model, split.calibration, bench.end_of_text, bench.batch_rows)
            elif name == PREDICTOR:
                serve(bench.model, "predictor", predictors)
            elif name == TOKEN_CHOICE:
                serve(bench.model, "token_choice")
            rows[name] = bench.causal()
    baseline = THRESHOLD if THRESHOLD in rows else AS_SERVED
    windows = {name: row.pop("by_window") for name, row in rows.items()}
    for name, row in rows.items():
        row["difference"] = None if name == baseline else paired_difference(windows[name], windows[baseline])
    return {
        "format_version": FORMAT_VERSION,
        "run": run.folder.name,
        "step": checkpoint.step,
        "threshold_step": config.threshold_step,
        "corpus_sha256": corpus.sha256,
        "router": config.moe.router,
        "training_verdict": config.moe.training_verdict,
        "experts": config.moe.num_experts,
        "experts_per_token_configured": config.moe.assignments_per_token,
        "scored_windows": len(split.scored),
        "calibration_windows": len(split.calibration),
        "calibration_tokens": calibration_tokens,
        "predictor": about_predictor,
        "baseline": baseline,
        "rows": rows,
        "left_out": left_out,
    }


@dataclass
class Bench:
    """A model, and the windows that it is scored on again and again.

    Attributes:
        model: of the run, in the run's precision.
        config: of the run.
        corpus: of the run.
        scored: windows, one a row.
        parity_rows: windows on which generation parity is checked.
    """

    model: Transformer
    config: Config
    corpus: Corpus
    scored: list[HeldoutBatch]
    parity_rows: int

    @property
    def end_of_text(self) -> int | None:
        """See `likelihood.evaluate_windows`."""
        return self.corpus.tokenizer.end_of_text if self.config.data.document_mask else None

    @property
    def batch_rows(self) -> int:
        """Rows of one forward pass."""
        return likelihood.rows_of_a_pass(self.config)

    def as_trained(self, predictors: dict[int, Predictor], about: dict[str, Any] | None) -> dict[str, Any]:
        """The row of the training router, over the windows that fill routing groups.

        Args:
            predictors: compared with the router's choice on the way; may be empty.
            about: told how they did, where there are some.

        Raises:
            NothingToScore: no group is filled.
        """
        verdict = self.config.moe.training_verdict
        warning = {"warning": WARNINGS[verdict]} if verdict in WARNINGS else {}
        counter = GuessCounter(predictors)
        with watched(self.model, counter) if predictors else nullcontext():
            measured = self._measured("train_router")
        if about is not None:
            about |= {"accuracy": counter.accuracy, "base_rate": counter.base_rate}
        return {"verdict": verdict, **warning, **measured, "parity": {"possible": False, "reason": NO_PARITY[verdict]}}

    def causal(self) -> dict[str, Any]:
        """The row of the model as it serves now."""
        return {"verdict": "causal", **self._measured("causal"), "parity": self._parity()}

    def _measured(self, mode: Mode) -> dict[str, Any]:
        # Every window is a domain of its own here, so that windows can be paired; real domains are summed afterwards.
        windows = [row._replace(domain=str(number)) for number, row in enumerate(self.scored)]
        recorder = RoutingRecorder(self.model, [row.domain for row in windows])
        token_bytes_V = self.corpus.tokenizer.token_bytes_V
        if mode == "train_router":
            scores = likelihood.evaluate_windows(self.model, windows, token_bytes_V, self.end_of_text, mode, recorder)
        else:
            parts = [windows[first : first + self.batch_rows] for first in range(0, len(windows), self.batch_rows)]
            scores = likelihood.score(
                (_stacked(part) for part in parts),
                lambda part: likelihood.model_nats(self.model, part, self.end_of_text, mode, recorder),
                token_bytes_V,
            )
        return {**self._likelihoods(scores), **_routing(recorder), "by_window": scores.domains}

    def _likelihoods(self, scores: Scores) -> dict[str, Any]:
        domains: dict[str, Likelihood] = {}
        for number, found in scores.domains.items():
            domain = self.scored[int(number)].domain
            domains[domain] = domains.get(domain, Likelihood()) + found
        return {
            "windows": len(scores.domains),
            "windows_left_out": scores.skipped_rows,
            **_values(scores.total),
            "domains": {name: _values(domains[name]) for name in self.corpus.domains if name in domains},
        }

    def _parity(self) -> dict[str, Any]:
        """Generation parity on whole windows spread over the scored ones, in fp32 like `eval.parity`."""
        whole = [row.token_BS for row in self.scored if row.valid_BS.all()]
        if not whole:
            return {"possible": False, "reason": "no held-out window is full"}
        count = min(self.parity_rows, len(whole))
        token_BS = torch.cat([whole[place * len(whole) // count] for place in range(count)])
        with _in_fp32(self.model):
            ways = check_parity(self.model, token_BS)
        worst, different = max(way.max_logit_difference for way in ways), sum(way.routes_different for way in ways)
        explained = all(way.explained for way in ways)
        return {
            "possible": True,
            "holds": explained and (different > 0 or worst <= LOGIT_TOLERANCE),
            "windows": count,
            "max_logit_difference": worst,
            "routes": sum(way.routes for way in ways),
            "routes_different": different,
            "routes_explained": explained,
            "ways": [asdict(way) for way in ways],
        }


def paired_difference(row: dict[str, Likelihood], base: dict[str, Likelihood]) -> dict[str, Any]:
    """The difference row - base over the windows that both scored, with standard errors.

    A difference is a ratio, summed nats over summed tokens (or bytes); its error is that of a ratio estimator over
    windows (Cochran 1977, section 2.11). Windows count as independent: those of one long document are not, so that the
    true error is somewhat larger.

    Args:
        row: by window.
        base: by window.

    Returns:
        Window count, and difference and standard error in nats a token and bits a byte; None where not defined.
    """
    common = [window for window in base if window in row]
    nats_R = np.array([row[window].nats - base[window].nats for window in common])
    sizes = {
        "nats_per_token": np.array([base[window].tokens for window in common], dtype=np.float64),
        "bits_per_byte": np.array([base[window].bytes for window in common]) * math.log(2),
    }
    result: dict[str, Any] = {"windows": len(common)}
    for unit, size_R in sizes.items():
        mean = error = None
        if size_R.sum() > 0:
            mean = float(nats_R.sum() / size_R.sum())
            if len(common) > 1:
                squares = float(((nats_R - mean * size_R) ** 2).sum())
                error = math.sqrt(len(common) / (len(common) - 1) * squares) / float(size_R.sum())
        result |= {unit: mean, f"{unit}_standard_error": error}
    return result


def _predictors(bench: Bench, steps: int) -> tuple[dict[int, Predictor], dict[str, Any]]:
    """The checkpoint's predictors, or new ones; and what is to be said of them."""
    about: dict[str, Any] = {"fitted_here": False, "accuracy": None, "base_rate": None}
    if found := own_predictors(bench.model):
        return found, about
    batches, step_tokens = predictor_text(bench.corpus, bench.config)
    found = fit_predictors(bench.model, lambda step: batches.batch(step).token_BS, steps, bench.end_of_text)
    return found, about | {"fitted_here": True, "steps": steps, "training_tokens": steps * step_tokens}


def _stacked(rows: list[HeldoutBatch]) -> MixedWindows:
    tensors = (torch.cat(parts) for parts in zip(*(row[1:] for row in rows), strict=True))
    return MixedWindows([row.domain for row in rows], *tensors)


def _values(found: Likelihood) -> dict[str, Any]:
    return {
        "bits_per_byte": found.bits_per_byte if found.bytes else None,
        "nats_per_token": found.nats_per_token,
        "tokens": found.tokens,
        "bytes": found.bytes,
    }


def _routing(recorder: RoutingRecorder) -> dict[str, Any]:
    """Fan-out and load of each layer, and their means over layers; None where nothing is routed."""
    layers: list[dict[str, Any]] = []
    for index, record in recorder.layers.items():
        counts_E = sum(counts_RE.sum(0) for counts_RE in record.counts_RE)
        violation = metrics.max_violation(counts_E)
        layers.append(
            {
                "layer": index,
                "experts_per_token": metrics.fan_out_mean(record.fan_out),
                "zero_expert_fraction": metrics.zero_expert_fraction(record.fan_out),
                "max_violation": None if math.isnan(violation) else violation,  # no expert took any token
            }
        )
    means: dict[str, float | None] = {}
    for key in ("experts_per_token", "zero_expert_fraction", "max_violation"):
        values = [layer[key] for layer in layers]
        means[key] = None if not values or None in values else math.fsum(values) / len(values)
    return {**means, "dropped_fraction": recorder.dropped_fraction, "layers": layers}


@contextmanager
def _in_fp32(model: Transformer) -> Iterator[None]:
    dtype, model.compute_dtype = model.compute_dtype, torch.float32
    try:
        yield
    finally:
        model.compute_dtype = dtype
