"""Certificates of causality: the audits A1 to A6 of a run or a configuration, and what they say together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from data.corpus import Corpus
from eval.canary import STEPS, Canary, run_canary
from eval.causality_audits import (
    RANK,
    Verdicts,
    certify_model,
    certify_router,
    count_moe_layers,
    information_bound,
    probe_shape,
)
from eval.leak import LeakReport, measure_leak, mixed_rows
from eval.likelihood import MixedWindows, Mode, model_nats
from moe.groups import needs_allow_leak
from moe.initialization import build_model
from moe.routers.registry import Verdict
from training.checkpoint import Checkpoint, load_model
from training.config import Config
from training.run import Run

PAIRS = 16
UNTRAINED = "not measured: untrained"


@dataclass
class Certificate:
    """Everything that was found out.

    Attributes:
        target: what was audited.
        config: its configuration, with `moe.allow_leak` set so that it loads.
        allow_leak: as it was given.
        verdicts: A1 and A2.
        leak: A3 and A6; or why they were not measured.
        bound: A4, bits a token; None where routing has no such bound.
        canary: A5; None where it was skipped.
        step: of the run's checkpoint.
    """

    target: str
    config: Config
    allow_leak: bool
    verdicts: Verdicts
    leak: LeakReport | str
    bound: float | None
    canary: Canary | None
    step: int | None = None

    @property
    def training(self) -> Verdict:
        """The training router's measured verdict; a leak that only the canary shows is a leak."""
        return "leaks" if self.canary is not None and self.canary.proves_leak else self.verdicts.training

    @property
    def lacks_allow_leak(self) -> bool:
        """Training is refused until `moe.allow_leak` is set."""
        return needs_allow_leak(self.config.moe, self.config.training.sequence_length) and not self.allow_leak

    @property
    def certified(self) -> bool:
        """Whether the exit status is 0."""
        return self.verdicts.evaluation == "causal" and not self.lacks_allow_leak

    def require_honest_registry(self) -> None:
        """Raise ValueError where a router sees more than `moe/routers/registry.py` declares."""
        for which, measured, said in (
            ("training", self.training, self.verdicts.declared_training),
            ("evaluation", self.verdicts.evaluation, self.verdicts.declared_evaluation),
        ):
            if RANK[measured] > RANK[said]:
                raise ValueError(
                    f"the registry is wrong: {self.config.moe.router} declares its {which} router {said}, and it was "
                    f"measured to be {measured}; correct its entry in moe/routers/registry.py, or the router"
                )


def certify_config(
    config: Config,
    allow_leak: bool,
    target: str,
    canary_steps: int = STEPS,
    progress: Callable[[str], None] = lambda text: None,
) -> Certificate:
    """Certify a configuration with untrained models.

    Args:
        config: with `moe.allow_leak` set where it needs that.
        allow_leak: as it was given.
        target: its name.
        canary_steps: optimizer steps of the canary; 0 skips it.
        progress: told what is being done.
    """
    progress("changing tokens, looking for changed bits")
    verdicts = certify_router(config.moe, config.training.sequence_length)
    return _certificate(config, allow_leak, target, verdicts, UNTRAINED, canary_steps, progress)


def certify_run(
    run: Run,
    allow_leak: bool,
    canary_steps: int = STEPS,
    pairs: int = PAIRS,
    progress: Callable[[str], None] = lambda text: None,
) -> Certificate:
    """Certify a run with its own weights on its held-out text.

    Args:
        run: with at least one checkpoint.
        allow_leak: as its configuration gives it.
        canary_steps: optimizer steps of the canary; 0 skips it.
        pairs: of batches with the true and with independent futures, for the leak in bits.
        progress: told what is being done.

    Raises:
        ValueError: there is too little held-out text.
    """
    config, corpus, checkpoint = run.config, run.corpus(), run.checkpoint()
    length = config.training.sequence_length
    model = build_model(config.model, replace(config.moe, backend="reference"), config.run.seed)
    load_model(checkpoint, [model])
    model.eval()
    rows, cut = probe_shape(config.moe, length)
    group = config.moe.group_sequences if config.moe.is_moe else 1
    token_RS, label_RS = mixed_rows(corpus, length, max(2 * rows, 2 * pairs * group))
    if len(token_RS) < 2 * rows:
        raise ValueError(
            f"{len(token_RS)} whole rows of {length} held-out tokens; {2 * rows} are needed: hold more text out"
        )
    progress("changing tokens, looking for changed bits")
    generator = torch.Generator().manual_seed(0)
    verdicts = certify_model(model, token_RS[:rows, :cut], token_RS[rows : 2 * rows, :cut], generator)
    if cut < length:
        verdicts.notes.append(f"A1 and A2: sequences cut from {length} to {cut} tokens, which no routing group spans")
    progress("measuring the loss with true and with other futures")
    leak: LeakReport | str
    if not config.moe.is_moe:
        leak = "not measured: the model has no router"
    elif len(token_RS) < 4 * group:
        leak = f"not measured: {len(token_RS)} whole rows of held-out text, {4 * group} are needed"
    else:
        leak = measure_run_leak(config, corpus, checkpoint, (token_RS, label_RS), group, pairs)
    certificate = _certificate(config, allow_leak, str(run.folder), verdicts, leak, canary_steps, progress)
    certificate.step = checkpoint.step
    return certificate


def measure_run_leak(
    config: Config, corpus: Corpus, checkpoint: Checkpoint, text: tuple[Tensor, Tensor], rows: int, pairs: int
) -> LeakReport:
    """A3 and A6 of a run with a router.

    Args:
        config: of the run.
        corpus: of the run.
        checkpoint: of the run.
        text: (token_RS, label_RS) from `mixed_rows`.
        rows: see `measure_leak`.
        pairs: see `measure_leak`.
    """
    # Not on the reference backend, which computes every expert for every token.
    model = build_model(config.model, config.moe, config.run.seed)
    load_model(checkpoint, [model])
    model.eval()
    end_of_text = corpus.tokenizer.end_of_text if config.data.document_mask else None

    def nats(mode: Mode) -> Callable[[Tensor, Tensor], np.ndarray]:
        return lambda token_BS, label_BS: model_nats(
            model, MixedWindows([], token_BS, label_BS, torch.ones_like(token_BS, dtype=torch.bool)), end_of_text, mode
        )

    # A run that trains by thresholds from the first step has no other training router.
    trained: Mode = "train_router" if config.threshold_step > 0 else "causal"
    return measure_leak(nats(trained), nats("causal"), *text, corpus.tokenizer.token_bytes_V, rows, pairs)


def _certificate(
    config: Config,
    allow_leak: bool,
    target: str,
    verdicts: Verdicts,
    leak: LeakReport | str,
    canary_steps: int,
    progress: Callable[[str], None],
) -> Certificate:
    """A4 and A5, and all together."""
    canary = None
    if canary_steps and config.moe.is_moe:
        canary = run_canary(config.moe, config.training.sequence_length, canary_steps, progress=progress)
    layers = count_moe_layers(config.model, config.moe)
    return Certificate(target, config, allow_leak, verdicts, leak, information_bound(config.moe, layers), canary)
